"""The embedded data against scikit-learn's own copy."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedtta_flwr.data.digits import source_part
from fedtta_flwr.data.digits import test_part as digits_test_part


@pytest.fixture(scope="module")
def nearest() -> tuple[np.ndarray, np.ndarray]:
    """For every image, source part first: the original that it resembles most, and how far off it is."""
    originals = load_digits().images.reshape(-1, 64) * (255 / 16)
    images = np.concatenate([source_part()[0], digits_test_part()[0]])[..., 0].astype(float)
    blocks = images.reshape(-1, 8, 4, 8, 4)  # 4x4 pixels for one: the mean of the inner four is close to it
    small = blocks[:, :, 1:3, :, 1:3].mean(axis=(2, 4)).reshape(-1, 64)
    distance = (small**2).sum(1)[:, None] + (originals**2).sum(1)[None] - 2 * small @ originals.T
    best = distance.argmin(axis=1)
    return best, np.abs(small - originals[best]).mean(axis=1)


def test_sizes_and_types() -> None:
    for (images, labels), count in ((source_part(), 1000), (digits_test_part(), 797)):
        assert images.shape == (count, 32, 32, 3)
        assert images.dtype == np.uint8
        assert labels.shape == (count,)
        assert labels.dtype == np.int64
        assert set(labels.tolist()) == set(range(10))
        assert images.max() == 255
        assert images.min() == 0


def test_the_three_channels_are_equal() -> None:
    for images, _ in (source_part(), digits_test_part()):
        assert (images == images[..., :1]).all()


def test_the_split_is_disjoint_and_complete(nearest: tuple[np.ndarray, np.ndarray]) -> None:
    best, off = nearest
    assert sorted(best) == list(range(1797))
    assert off.max() < 12  # of 255: smoothing at the strokes' edges


def test_labels_belong_to_their_images(nearest: tuple[np.ndarray, np.ndarray]) -> None:
    labels = np.concatenate([source_part()[1], digits_test_part()[1]])
    assert (labels == load_digits().target[nearest[0]]).all()


def test_the_split_is_random_and_never_changes(nearest: tuple[np.ndarray, np.ndarray]) -> None:
    assert digits_test_part()[1][:12].tolist() == PINNED
    order = nearest[0]
    assert abs(np.corrcoef(order, np.arange(1797))[0, 1]) < 0.1
    shares = np.bincount(digits_test_part()[1]) / np.bincount(load_digits().target)
    assert shares.min() > 0.35
    assert shares.max() < 0.55


PINNED = [7, 1, 4, 6, 4, 7, 6, 4, 7, 0, 8, 6]
