"""Blur corruptions (Hendrycks & Dietterich, ICLR 2019), on images x in [0, 1]."""

import functools
import math

import numpy as np
from scipy import ndimage  # type: ignore[import-untyped, unused-ignore]

from fedtta_flwr.data._recipe import Batch, Floats, Images, Recipe


def smooth(x: Floats, sigma: float) -> Floats:
    """Return x, shape (N, S, S, ...), under a Gaussian of `sigma` pixels.

    It is cut at 4 sigma; edges are replicated.
    """
    sigmas = (0, sigma, sigma) + (0,) * (x.ndim - 3)
    blurred: Floats = ndimage.gaussian_filter(x, sigmas, mode="nearest", truncate=4)
    return blurred


def gaussian_blur(batch: Batch, sigma: float) -> Floats:
    """Return x under a Gaussian of `sigma` pixels."""
    return smooth(batch.unit, sigma)


def disk_kernel(radius: float, alias_sigma: float) -> Floats:
    """Return a disk of `radius` pixels on a 17 x 17 grid, softened by a 3 x 3 Gaussian, sum 1."""
    offsets = np.arange(-8, 9)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype(float)
    tap = np.exp(-np.array([1.0, 0.0, 1.0]) / (2 * alias_sigma**2))
    soft: Floats = ndimage.correlate(disk, np.outer(tap, tap), mode="constant")
    soft /= soft.sum()
    return soft


def defocus_blur(batch: Batch, radius: float, alias_sigma: float) -> Floats:
    """Return x under a disk; edges mirrored about the outermost pixel."""
    kernel = disk_kernel(radius, alias_sigma)[None, :, :, None]
    blurred: Floats = ndimage.correlate(batch.unit, kernel, mode="mirror")
    return blurred


def glass_blur(batch: Batch, sigma: float, iterations: int) -> Floats:
    """Return x blurred, its pixels displaced at random `iterations` times, and blurred again.

    The published loop runs from the last pixel to the third of each axis and means to swap each
    with the pixel at (dy, dx) in {-1, 0}^2 from it. On a numpy array that swap only copies the
    neighbour onto the pixel. A neighbour comes later in the loop than the pixel, so each copy reads
    an untouched pixel, and one gather equals the loop. (The largest shift is 1 at every severity.)
    """
    pixels = (smooth(batch.unit, sigma) * 255).astype(np.uint8)
    moved = np.arange(2, batch.side)
    sample = np.arange(len(pixels))[:, None, None]
    for _ in range(iterations):
        shift = batch.draw(lambda rng: rng.integers(-1, 1, size=(2, len(moved), len(moved))))
        pixels[:, 2:, 2:] = pixels[sample, moved[:, None] + shift[:, 0], moved + shift[:, 1]]
    return smooth(pixels / 255, sigma)


def streak(images: Images, angles: Floats, radius: int, sigma: float) -> Images:
    """Return the images under a one-sided Gaussian streak, as ImageMagick's motion blur makes it.

    With k_i ~ exp(-i^2 / 2 sigma^2) for i = 0 .. 2 radius, summing to 1, and an angle a, the pixel
    at (row, column) becomes sum_i k_i x[row + ceil(i sin a - 1/2), column + ceil(i cos a - 1/2)],
    edges replicated, rounded.

    Parameters
    ----------
    images : ndarray of uint8, shape (N, S, S) or (N, S, S, C)
        Images, 0 to 255.
    angles : ndarray, shape (N,)
        The direction of each image's streak in degrees.
    radius : int
        Half of the streak's length in pixels.
    sigma : float
        Decay along the streak in pixels.

    Returns
    -------
    ndarray of uint8, shape of `images`
    """
    taps = np.arange(2 * radius + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights /= weights.sum()
    radians = np.deg2rad(angles)[:, None]
    down = np.ceil(taps * np.sin(radians) - 0.5).astype(int)
    right = np.ceil(taps * np.cos(radians) - 0.5).astype(int)

    last = images.shape[1] - 1
    grid = np.arange(last + 1)
    sample = np.arange(len(images))[:, None, None]
    total = np.zeros(images.shape)
    for tap, weight in enumerate(weights):
        rows = np.clip(grid + down[:, tap, None], 0, last)
        columns = np.clip(grid + right[:, tap, None], 0, last)
        total += weight * images[sample, rows[:, :, None], columns[:, None, :]]
    return np.rint(total).astype(np.uint8)


def motion_blur(batch: Batch, radius: int, sigma: float) -> Images:
    """Return the images under a streak at an angle ~ U(-45, 45) degrees."""
    angles = batch.draw(lambda rng: rng.uniform(-45, 45, size=1))[:, 0]
    return streak(batch.images, angles, radius, sigma)


@functools.cache
def zoom_matrix(side: int, zoom: float) -> Floats:
    """Return Z, shape (side, side): Z x Z' is the centre of x enlarged linearly by `zoom`.

    The crop of ceil(side / zoom) pixels is stretched corner to corner to its size times `zoom`, and
    the middle `side` pixels of that are kept.
    """
    crop = math.ceil(side / zoom)
    enlarged = round(crop * zoom)
    first = (side - crop) // 2
    kept = np.arange(side) + (enlarged - side) // 2
    position = kept * (crop - 1) / (enlarged - 1)
    weights: Floats = np.maximum(0, 1 - np.abs(first + position[:, None] - np.arange(side)))
    return weights


def zoom_blur(batch: Batch, stop: float) -> Floats:
    """Return the mean of x and of its zooms by 1, 1.01, 1.02, ... up to `stop`.

    The factors are those of numpy's arange, as published, because its rounding shows: it includes
    `stop` at severities 1 and 2 only, and severity 5 ends a hair above 1.25, where a crop of 26
    pixels becomes 33, not 32.
    """
    planes = np.moveaxis(batch.unit, 3, 1)
    total = planes.copy()
    factors = np.arange(1, stop, 0.01)
    for factor in factors:
        matrix = zoom_matrix(batch.side, float(factor))
        total += matrix @ planes @ matrix.T
    return np.moveaxis(total / (len(factors) + 1), 1, 3)


RECIPES = {
    "defocus_blur": Recipe(defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": Recipe(glass_blur, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))),
    "motion_blur": Recipe(motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": Recipe(zoom_blur, ((1.06,), (1.11,), (1.16,), (1.21,), (1.26,))),
    "gaussian_blur": Recipe(gaussian_blur, ((0.4,), (0.6,), (0.7,), (0.8,), (1,))),
}
