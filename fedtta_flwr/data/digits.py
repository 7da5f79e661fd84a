"""The embedded data: 1,797 real handwritten digits, 8x8 grey, that scikit-learn ships (BSD-3, UCI)."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.seeding import numpy_rng

SOURCE_SAMPLES = 1000
SIZE = 32
Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


@cache
def _split() -> tuple[Part, Part]:
    from PIL import Image

    rows = _rows()
    small = np.round(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    large = [Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for image in small]
    grey = np.stack([np.asarray(image) for image in large])
    images = np.repeat(grey[..., None], 3, axis=-1)
    labels = rows[:, -1].astype(np.int64)
    # The split is part of the data: it never depends on a run's seed, or a run would be tested on its own source.
    order = numpy_rng(0, "digits split").permutation(len(labels))
    source, test = order[:SOURCE_SAMPLES], order[SOURCE_SAMPLES:]
    return (images[source], labels[source]), (images[test], labels[test])


def _rows() -> NDArray[np.float64]:
    """Return the digits [1797, 65]: 64 pixels from 0 to 16, and the class.

    Read from scikit-learn's folder without importing scikit-learn: that takes a second, and a deployed client is a new
    process for every message.
    """
    spec = find_spec("sklearn")
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else Path()
    file = folder / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # another layout of the package

    digits = load_digits()
    return np.hstack([digits.data, digits.target[:, None]])


def source_part() -> Part:
    """Return the images [1000, 32, 32, 3] (uint8) and labels [1000] that a source model is trained on."""
    return _split()[0]


def test_part() -> Part:
    """Return the images [797, 32, 32, 3] (uint8) and labels [797] that streams are made of."""
    return _split()[1]


def all_parts() -> Part:
    """Return all images [1797, 32, 32, 3] (uint8) and labels [1797], for methods that bring no source model."""
    (source, labels), (test, test_labels) = _split()
    return np.concatenate([source, test]), np.concatenate([labels, test_labels])
