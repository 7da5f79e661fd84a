"""Digital corruptions (Hendrycks & Dietterich, ICLR 2019), on images x in [0, 1]."""

import io

import numpy as np
from PIL import Image
from scipy import ndimage  # type: ignore[import-untyped, unused-ignore]

from fedtta_flwr.data._recipe import Batch, Floats, Images, Recipe


def to_hsv(x: Floats) -> tuple[Floats, Floats, Floats]:
    """Return hue, saturation and value such that x = value * (1 - saturation * hue).

    The hue is not an angle but what the angle stands for: how far each channel lies below the
    largest, as a share of the spread, shape (..., 3). A grey pixel has the hue of red, (0, 1, 1).
    The other two have shape (..., 1).
    """
    value = x.max(axis=-1, keepdims=True)
    spread = value - x.min(axis=-1, keepdims=True)
    coloured = spread > 0
    hue = np.where(coloured, (value - x) / np.where(coloured, spread, 1), (0.0, 1.0, 1.0))
    return hue, spread / np.where(value > 0, value, 1), value


def from_hsv(hue: Floats, saturation: Floats, value: Floats) -> Floats:
    """Return the RGB image, shape (..., 3), of what `to_hsv` returns."""
    return value * (1 - saturation * hue)


def saturate(batch: Batch, factor: float, added: float) -> Floats:
    """Return x with the saturation of HSV changed to saturation * factor + added, within [0, 1]."""
    hue, saturation, value = to_hsv(batch.unit)
    return from_hsv(hue, np.clip(saturation * factor + added, 0, 1), value)


def contrast(batch: Batch, factor: float) -> Floats:
    """Return m + factor * (x - m) with m each image's mean per channel."""
    # Summed as integers: exact, so that the mean does not depend on the order in which numpy adds.
    sums = batch.images.sum(axis=(1, 2), keepdims=True, dtype=np.int64)
    mean: Floats = sums / (255 * batch.side**2)
    return (batch.unit - mean) * factor + mean


def elastic_transform(batch: Batch, alpha: float, sigma: float, affine: float) -> Floats:
    """Return x under a random affine map and then a smooth random displacement.

    The affine map moves three points, S // 3 from the centre along each axis, by
    U(-affine, affine); edges are mirrored about the outermost pixel. The displacement is alpha
    times noise ~ U(-1, 1) under a Gaussian of `sigma`, cut at 3 sigma; edges are mirrored with the
    outermost pixel repeated. Both interpolate linearly. The three lengths are shares of the image's
    side S.
    """
    side = batch.side
    rows, columns = np.mgrid[:side, :side].astype(float)
    centre, reach = side // 2, side // 3
    corners = centre + reach * np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    moved = corners + batch.draw(lambda rng: rng.uniform(-affine * side, affine * side, size=(3, 2)))
    noise = batch.draw(lambda rng: rng.uniform(-1, 1, size=(2, side, side)))
    width = sigma * side
    shift = alpha * side * ndimage.gaussian_filter(noise, (0, 0, width, width), mode="reflect", truncate=3)

    warped = []
    for image, points, (right, down) in zip(batch.unit, moved, shift, strict=True):
        # From the moved points back to the corners: where each pixel of the result comes from.
        back = np.linalg.solve(np.column_stack([points, np.ones(3)]), corners)
        source_column, source_row = (columns * a + rows * b + c for a, b, c in back.T)
        turned = _sampled(image, source_row, source_column, "mirror")
        warped.append(_sampled(turned, rows + down, columns + right, "reflect"))
    return np.stack(warped)


def _sampled(image: Floats, rows: Floats, columns: Floats, mode: str) -> Floats:
    """Return the image, shape (S, S, 3), at `rows` and `columns`, each (S, S), interpolated."""
    channels = np.moveaxis(image, 2, 0)
    return np.stack(
        [ndimage.map_coordinates(channel, (rows, columns), order=1, mode=mode) for channel in channels],
        axis=2,
    )


def pixelate(batch: Batch, factor: float) -> Images:
    """Return the images shrunk to int(factor * S) pixels and enlarged to S, with box filters."""
    small = int(batch.side * factor)

    def resized(image: Images) -> Images:
        down = Image.fromarray(image).resize((small, small), Image.Resampling.BOX)
        return np.asarray(down.resize((batch.side, batch.side), Image.Resampling.BOX))

    return np.stack([resized(image) for image in batch.images])


def jpeg_compression(batch: Batch, quality: int) -> Images:
    """Return the images after JPEG compression at `quality`, with Pillow's other defaults."""

    def compressed(image: Images) -> Images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file))

    return np.stack([compressed(image) for image in batch.images])


RECIPES = {
    "contrast": Recipe(contrast, ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,))),
    "elastic_transform": Recipe(
        elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": Recipe(pixelate, ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,))),
    "jpeg_compression": Recipe(jpeg_compression, ((80,), (65,), (58,), (50,), (40,))),
    "saturate": Recipe(saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
}
