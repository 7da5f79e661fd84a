"""The embedded data: 1,797 real handwritten digits, 8x8 grey, that scikit-learn ships (BSD-3, UCI)."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.seeding import numpy_rng

SOURCE_SAMPLES = 1000
SIZE = 32
Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


@cache
def _split() -> tuple[Part, Part]:
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = np.round(digits.images * (255 / 16)).astype(np.uint8)
    large = [Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for image in small]
    grey = np.stack([np.asarray(image) for image in large])
    images = np.repeat(grey[..., None], 3, axis=-1)
    labels = digits.target.astype(np.int64)
    # The split is part of the data: it never depends on a run's seed, or a run would be tested on its own source.
    order = numpy_rng(0, "digits split").permutation(len(labels))
    source, test = order[:SOURCE_SAMPLES], order[SOURCE_SAMPLES:]
    return (images[source], labels[source]), (images[test], labels[test])


def source_part() -> Part:
    """Return the images [1000, 32, 32, 3] (uint8) and labels [1000] that a source model is trained on."""
    return _split()[0]


def test_part() -> Part:
    """Return the images [797, 32, 32, 3] (uint8) and labels [797] that streams are made of."""
    return _split()[1]
