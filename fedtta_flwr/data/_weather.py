"""Weather corruptions (Hendrycks & Dietterich, ICLR 2019), on images x in [0, 1]."""

import numpy as np
from scipy import ndimage  # type: ignore[import-untyped, unused-ignore]

from fedtta_flwr.data._blur import smooth, streak, zoom_matrix
from fedtta_flwr.data._digital import from_hsv, to_hsv
from fedtta_flwr.data._frost import frost_photographs
from fedtta_flwr.data._recipe import Batch, Floats, Images, Recipe

_WATER = (175 / 255, 238 / 255, 238 / 255)
_MUD = (63 / 255, 42 / 255, 20 / 255)


def snow(
    batch: Batch,
    mean: float,
    std: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    mix: float,
) -> Floats:
    """Return x, whitened, under flakes that fall along a streak at an angle ~ U(-135, -45) degrees.

    The flakes are noise ~ N(mean, std), enlarged, cut below `threshold` and blurred. The result is
    mix x + (1 - mix) max(x, 1.5 grey + 0.5) + flakes + flakes rotated by 180 degrees.
    """
    x = batch.unit
    noise = batch.draw(lambda rng: rng.normal(mean, std, size=(batch.side, batch.side)))
    matrix = zoom_matrix(batch.side, zoom)
    flakes = matrix @ noise @ matrix.T
    flakes[flakes < threshold] = 0
    angles = batch.draw(lambda rng: rng.uniform(-135, -45, size=1))[:, 0]
    levels = (np.clip(flakes, 0, 1) * 255).astype(np.uint8)
    layer = streak(levels, angles, radius, sigma)[..., None] / 255
    grey = (0.299 * x[..., 0] + 0.587 * x[..., 1] + 0.114 * x[..., 2])[..., None]
    return mix * x + (1 - mix) * np.maximum(x, 1.5 * grey + 0.5) + layer + layer[:, ::-1, ::-1]


def frost(batch: Batch, image_weight: float, frost_weight: float) -> Images:
    """Return image_weight * image + frost_weight * a random crop of one of the five photographs."""
    photographs = frost_photographs(batch.frost_dir, batch.side)

    def crop(rng: np.random.Generator) -> Images:
        photograph = photographs[rng.integers(len(photographs))]
        top, left = (rng.integers(size - batch.side) for size in photograph.shape[:2])
        return photograph[top : top + batch.side, left : left + batch.side]

    mixed = image_weight * batch.images + frost_weight * batch.draw(crop)
    return np.clip(mixed, 0, 255).astype(np.uint8)


def plasma(uniforms: Floats, decay: float) -> Floats:
    """Return plasma fractals from the diamond-square algorithm on a torus, scaled to [0, 1].

    Each level sets the centres of the squares, then those of the diamonds, to the mean of their
    four neighbours plus w^2 u with u ~ U(-1, 1). w is 100 on the first level and shrinks by the
    factor `decay` from each level to the next. (The square is published: there the draw from
    U(-w, w) is multiplied by w once more.)

    Parameters
    ----------
    uniforms : ndarray, shape (N, M * M - 1)
        Draws from U(-1, 1), as many as there are pixels to set; M is a power of two.
    decay : float
        Above 1; larger is smoother.

    Returns
    -------
    ndarray, shape (N, M, M)
    """
    count, draws = uniforms.shape
    side = round((draws + 1) ** 0.5)
    maps = np.zeros((count, side, side))
    step, wibble, used = side, 100.0, 0
    while step >= 2:
        half = step // 2
        corners = maps[:, ::step, ::step]
        centres = maps[:, half::step, half::step]
        tops = maps[:, ::step, half::step]
        lefts = maps[:, half::step, ::step]
        cells = (side // step) ** 2
        noise = wibble**2 * uniforms[:, used : used + 3 * cells].reshape(count, 3, *corners.shape[1:])

        pairs = corners + np.roll(corners, -1, axis=1)
        centres[...] = (pairs + np.roll(pairs, -1, axis=2)) / 4 + noise[:, 0]
        above = centres + np.roll(centres, 1, axis=1)
        tops[...] = (above + corners + np.roll(corners, -1, axis=2)) / 4 + noise[:, 1]
        beside = centres + np.roll(centres, 1, axis=2)
        lefts[...] = (beside + corners + np.roll(corners, -1, axis=1)) / 4 + noise[:, 2]

        used += 3 * cells
        step, wibble = half, wibble / decay
    maps -= maps.min(axis=(1, 2), keepdims=True)
    maps /= maps.max(axis=(1, 2), keepdims=True)
    return maps


def fog(batch: Batch, amount: float, decay: float) -> Floats:
    """Return (x + amount * plasma) * m / (m + amount) with m the image's largest value."""
    x = batch.unit
    map_side = 1 << (batch.side - 1).bit_length()
    uniforms = batch.draw(lambda rng: rng.uniform(-1, 1, size=map_side**2 - 1))
    haze = plasma(uniforms, decay)[:, : batch.side, : batch.side, None]
    largest: Floats = x.max(axis=(1, 2, 3), keepdims=True)
    return (x + amount * haze) * largest / (largest + amount)


def brightness(batch: Batch, added: float) -> Floats:
    """Return x with `added` to the value of HSV, at most 1."""
    hue, saturation, value = to_hsv(batch.unit)
    return from_hsv(hue, saturation, np.minimum(value + added, 1))


def spatter(
    batch: Batch,
    mean: float,
    std: float,
    sigma: float,
    threshold: float,
    strength: float,
    mud: bool,
) -> Floats:
    """Return x under drops of water or mud: noise ~ N(mean, std), blurred, cut at `threshold`."""
    noise = smooth(batch.draw(lambda rng: rng.normal(mean, std, size=(batch.side, batch.side))), sigma)
    if mud:
        cover = smooth((noise > threshold).astype(float), strength)
        cover[cover < 0.8] = 0
        return batch.unit * (1 - cover[..., None]) + cover[..., None] * _MUD
    levels = (np.clip(np.where(noise < threshold, 0, noise), 0, 1) * 255).astype(np.uint8)
    drops = np.stack([_drops(level) for level in levels])
    return batch.unit + strength * drops[..., None] * _WATER


def _drops(levels: Images) -> Floats:
    """Return how strongly water covers each pixel, shape (S, S), 0 to 1.

    The published code uses OpenCV. Two of its steps are approximated: the Canny edges by the drops'
    outermost pixels (a drop stands at least 0.6 above the ground, so the steep edge is its rim),
    and the 5 x 5 chamfer distance by the exact one.
    """
    wet = levels > 0
    if not wet.any():
        return np.zeros(levels.shape)
    rim = wet & ~ndimage.binary_erosion(wet, np.ones((3, 3)), border_value=1)
    if not rim.any():  # all wet: no edge anywhere, every distance is beyond the cut
        distance = np.full(levels.shape, 20.0)
    else:
        distance = np.minimum(ndimage.distance_transform_edt(~rim), 20)
    relief = _equalised(ndimage.uniform_filter(distance, 3, mode="mirror").astype(np.uint8))
    emboss = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    relief = np.clip(ndimage.correlate(relief.astype(float), emboss, mode="mirror"), 0, 255)
    depth: Floats = levels * np.rint(ndimage.uniform_filter(relief, 3, mode="mirror"))
    deepest = depth.max()
    return depth / deepest if deepest > 0 else depth


def _equalised(levels: Images) -> Images:
    """Return the image with its histogram equalised: its darkest level 0, its brightest 255."""
    cumulative = np.cumsum(np.bincount(levels.ravel(), minlength=256))
    darkest = cumulative[levels.min()]
    if darkest == levels.size:
        return levels
    shares = np.clip((cumulative - darkest) / (levels.size - darkest), 0, 1)
    equalised: Images = np.rint(shares * 255).astype(np.uint8)[levels]
    return equalised


RECIPES = {
    "snow": Recipe(
        snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": Recipe(frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": Recipe(fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": Recipe(brightness, ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,))),
    "spatter": Recipe(
        spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, False),
            (0.65, 0.1, 0.8, 0.7, 0.5, False),
            (0.65, 0.3, 1, 0.69, 0.5, False),
            (0.65, 0.1, 0.7, 0.69, 0.6, True),
            (0.65, 0.1, 0.5, 0.68, 0.6, True),
        ),
    ),
}
