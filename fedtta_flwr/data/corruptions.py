"""The corruptions of CIFAR-10-C and CIFAR-100-C: 15 and 4 extra ones, at severities 1 to 5.

What this makes is the published recipe, regenerated: the random streams behind the published arrays
are unknown, so no build equals them bit for bit. `fedtta_flwr.data.reference` has accuracies to
check a build against.

References
----------
D. Hendrycks and T. Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations, ICLR 2019.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.errors import DataError
from fedtta_flwr.seeding import numpy_rng

if TYPE_CHECKING:
    from fedtta_flwr.data._recipe import Recipe

CORRUPTIONS: tuple[str, ...] = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA_CORRUPTIONS: tuple[str, ...] = ("speckle_noise", "gaussian_blur", "spatter", "saturate")

MIN_SIDE = 32
_PIXELS = 128 * 32 * 32  # of the images that are made at a time: an intermediate array takes 3 MB whatever N is


def corrupt(
    images: NDArray[np.uint8],
    name: str,
    severity: int,
    *,
    seed: int,
    indices: Sequence[int] | NDArray[Any] | None = None,
    frost_dir: Path | None = None,
) -> NDArray[np.uint8]:
    """Return the images under one corruption.

    Every draw of a sample comes from a generator of its own, seeded by (seed, name, severity,
    index), so a sample's corruption depends on neither the batch nor its order. The constants are
    those published for 32 x 32 pixels.

    Parameters
    ----------
    images : ndarray of uint8, shape (N, S, S, 3)
        RGB images of S >= 32 pixels a side.
    name : str
        One of `CORRUPTIONS` or `EXTRA_CORRUPTIONS`.
    severity : int
        1 (mild) to 5 (severe).
    seed : int
        Seed of the random draws.
    indices : sequence of N ints, optional
        The samples' positions in their data set; 0 to N - 1 by default.
    frost_dir : Path, optional
        The folder of the frost photographs, which only "frost" reads. By default the one that the
        environment variable FEDTTA_FROST_DIR names, else the one in the installed distribution
        imagecorruptions-imaug.

    Returns
    -------
    ndarray of uint8, shape (N, S, S, 3)
        Truncated, not rounded, as published.

    Raises
    ------
    DataError
        An argument is not allowed, or the frost photographs are not there.

    References
    ----------
    Hendrycks & Dietterich, ICLR 2019, section 4.1.
    """
    from fedtta_flwr.data._recipe import Batch

    recipe = _recipe(name)
    if severity not in range(1, 6):
        raise DataError(f"severity: {severity!r} is not allowed: 1, 2, 3, 4 or 5")
    _check_images(images)
    positions = _checked_indices(indices, len(images))

    result = np.empty(images.shape, np.uint8)
    at_once = max(1, _PIXELS // images.shape[1] ** 2)
    for start in range(0, len(images), at_once):
        chunk = slice(start, start + at_once)
        rngs = [numpy_rng(seed, name, int(severity), int(position)) for position in positions[chunk]]
        batch = Batch(images[chunk], rngs, frost_dir)
        made = recipe.apply(batch, *recipe.settings[int(severity) - 1])
        if made.dtype != np.uint8:
            made = (np.clip(made, 0, 1) * 255).astype(np.uint8)
        result[chunk] = made
    return result


def _recipe(name: str) -> "Recipe":
    # Imported on use: the names above are needed where scipy and Pillow are not.
    from fedtta_flwr.data import _blur, _digital, _noise, _weather

    recipes = _noise.RECIPES | _blur.RECIPES | _weather.RECIPES | _digital.RECIPES
    if name not in recipes:
        allowed = ", ".join((*CORRUPTIONS, *EXTRA_CORRUPTIONS))
        raise DataError(f"corruption: {name!r} is not known: one of {allowed}")
    return recipes[name]


def _check_images(images: NDArray[Any]) -> None:
    if images.dtype != np.uint8:
        raise DataError(f"images: dtype {images.dtype} is not allowed: uint8")
    if images.ndim != 4 or images.shape[1] != images.shape[2] or images.shape[1] < MIN_SIDE or images.shape[3] != 3:
        raise DataError(f"images: shape {images.shape} is not allowed: (N, S, S, 3) with S >= {MIN_SIDE}")


def _checked_indices(indices: Sequence[int] | NDArray[Any] | None, count: int) -> NDArray[Any]:
    positions = np.arange(count) if indices is None else np.asarray(indices)
    if positions.shape != (count,) or (count > 0 and positions.dtype.kind not in "iu"):
        raise DataError(
            f"indices: {positions.dtype} of shape {positions.shape} is not allowed: {count} integers, one per image"
        )
    return positions
