"""The corruptions against slow oracles written from the equations, and their reference table."""

import colorsys
import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from fedtta_flwr.data import _frost, corruptions
from fedtta_flwr.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from fedtta_flwr.data.reference import COLUMNS, REFERENCE, compare
from fedtta_flwr.errors import DataError
from fedtta_flwr.seeding import numpy_rng

ALL = CORRUPTIONS + EXTRA_CORRUPTIONS
DETERMINISTIC = (
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
)
SEVERITIES = range(1, 6)
SEED = 7
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def shared_folder(name):
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"../shared/data/{name} is absent")
    return folder


def made_images(count, side=32, seed=0):
    """Return smooth coloured images with some pure black, white and grey pixels."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(-40, 300, size=(count, 8, 8, 3))
    images = ndimage.zoom(coarse, (1, side / 8, side / 8, 1), order=1)
    images = np.clip(images + rng.normal(0, 6, images.shape), 0, 255).astype(np.uint8)
    images[:, 0, :4] = 0
    images[:, 1, :4] = 255
    images[:, 2, :4] = 90
    return images


@pytest.fixture(scope="module")
def images():
    return made_images(6)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Return a folder of made-up frost photographs, of sizes that no factor of 5 divides."""
    folder = tmp_path_factory.mktemp("frost")
    rng = np.random.default_rng(1)
    for number, name in enumerate(_frost.FILES):
        pixels = rng.integers(0, 256, size=(201 + number, 303 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def made(images, photographs):
    """Return a function that corrupts the images, each result made once."""
    cache = {}

    def get(name, severity):
        if (name, severity) not in cache:
            cache[name, severity] = corrupt(images, name, severity, seed=SEED, frost_dir=photographs)
        return cache[name, severity]

    return get


def draws(name, severity, index=0):
    return numpy_rng(SEED, name, severity, index)


def to_byte(value):
    return int(min(max(value, 0.0), 1.0) * 255)


def as_bytes(x):
    return np.vectorize(to_byte, otypes=[np.uint8])(x)


def assert_close(actual, expected, differing=0.01):
    """Accept off-by-one where the last bit of a float decides the truncation, if rare."""
    gap = np.abs(actual.astype(int) - expected.astype(int))
    assert gap.max() <= 1
    assert (gap > 0).mean() <= differing


# Oracles


def blurred(x, sigma):
    """Blur (S, S, C) by explicit convolution of every row and column."""
    radius = int(4 * sigma + 0.5)
    kernel = np.array([math.exp(-(i**2) / (2 * sigma**2)) for i in range(-radius, radius + 1)])
    kernel /= kernel.sum()

    def line(values):
        return np.convolve(np.pad(values, radius, mode="edge"), kernel, mode="valid")

    return np.apply_along_axis(line, 1, np.apply_along_axis(line, 0, x))


def streaked(image, angle, radius, sigma):
    side = len(image)
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    result = np.zeros(image.shape)
    for row in range(side):
        for column in range(side):
            for i, weight in enumerate(weights):
                r = row + math.ceil(i * math.sin(math.radians(angle)) - 0.5)
                c = column + math.ceil(i * math.cos(math.radians(angle)) - 0.5)
                r, c = min(max(r, 0), side - 1), min(max(c, 0), side - 1)
                result[row, column] += weight / sum(weights) * image[r, c]
    return np.floor(result + 0.5)


def zoomed(x, factor):
    """Zoom the centre of (S, S, C) as published, with scipy's zoom."""
    side = len(x)
    crop = math.ceil(side / factor)
    top = (side - crop) // 2
    large = ndimage.zoom(x[top : top + crop, top : top + crop], (factor, factor, 1), order=1)
    trim = (len(large) - side) // 2
    return large[trim : trim + side, trim : trim + side]


def interpolated(x, row, column, fold):
    top, left = math.floor(row), math.floor(column)
    result = 0.0
    for r, wr in ((top, top + 1 - row), (top + 1, row - top)):
        for c, wc in ((left, left + 1 - column), (left + 1, column - left)):
            result = result + wr * wc * x[fold(r, len(x)), fold(c, len(x))]
    return result


def mirror(i, side):
    """Fold an index about the outermost pixels: 2 1 | 0 1 2."""
    i = abs(i) % (2 * side - 2)
    return min(i, 2 * side - 2 - i)


def reflect(i, side):
    """Fold an index about the outer edges: 1 0 | 0 1 2."""
    i %= 2 * side
    return min(i, 2 * side - 1 - i)


# Noise


def test_gaussian_noise_is_the_equation_on_the_samples_own_draws(images, made):
    noise = draws("gaussian_noise", 3, index=4).standard_normal((32, 32, 3))
    expected = as_bytes(images[4] / 255 + 0.08 * noise)
    np.testing.assert_array_equal(made("gaussian_noise", 3)[4], expected)


def test_shot_noise_has_poisson_mean_and_variance():
    grey = np.full((20, 32, 32, 3), 128, np.uint8)
    x = corrupt(grey, "shot_noise", 5, seed=SEED).astype(float)
    assert np.isin(x, [int(k / 50 * 255) for k in range(51)]).all()
    # A Poisson count of mean 50 x, divided by 50; truncation takes 0.4 of a level on average.
    assert x.mean() == pytest.approx(128, abs=1)
    assert x.std() / 255 == pytest.approx(math.sqrt(128 / 255 / 50), rel=0.03)


def test_impulse_noise_replaces_the_published_share_by_black_or_white():
    grey = np.full((20, 32, 32, 3), 100, np.uint8)
    for severity, amount in zip(SEVERITIES, (0.01, 0.02, 0.03, 0.05, 0.07), strict=True):
        x = corrupt(grey, "impulse_noise", severity, seed=SEED)
        assert np.isin(x, (0, 100, 255)).all()
        assert (x == 0).mean() == pytest.approx(amount / 2, rel=0.15)
        assert (x == 255).mean() == pytest.approx(amount / 2, rel=0.15)


def test_speckle_noise_grows_with_the_value(images, made):
    assert (made("speckle_noise", 5)[images == 0] == 0).all()
    grey = np.full((20, 32, 32, 3), 51, np.uint8)
    x = corrupt(grey, "speckle_noise", 1, seed=SEED) / 255
    assert x.std() == pytest.approx(0.06 * 0.2, rel=0.03)


@pytest.mark.parametrize("name", ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "contrast", "fog"])
def test_severity_is_monotone(images, made, name):
    distances = [np.abs(made(name, severity) - images.astype(float)).mean() for severity in SEVERITIES]
    assert distances == sorted(distances)


# Blur


@pytest.mark.parametrize(("severity", "radius", "sigma"), [(1, 0.3, 0.4), (4, 1, 0.2), (5, 1.5, 0.1)])
def test_defocus_blur_is_a_softened_disk(images, made, severity, radius, sigma):
    disk = np.zeros((19, 19))
    for dy in range(-8, 9):
        for dx in range(-8, 9):
            disk[dy + 9, dx + 9] = dy**2 + dx**2 <= radius**2
    taps = {d: math.exp(-(d**2) / (2 * sigma**2)) for d in (-1, 0, 1)}
    kernel = {}
    for dy in range(-8, 9):
        for dx in range(-8, 9):
            near = [(a, b) for a in taps for b in taps]
            kernel[dy, dx] = sum(taps[a] * taps[b] * disk[dy + 9 + a, dx + 9 + b] for a, b in near)
    total = sum(kernel.values())
    x = images[1, :, :, 0] / 255
    expected = np.zeros((32, 32))
    for row in range(32):
        for column in range(32):
            for (dy, dx), weight in kernel.items():
                if weight > 0:
                    expected[row, column] += weight / total * x[mirror(row + dy, 32), mirror(column + dx, 32)]
    assert_close(made("defocus_blur", severity)[1, :, :, 0], as_bytes(expected))


@pytest.mark.parametrize(("severity", "sigma", "iterations"), [(3, 0.4, 1), (4, 0.25, 2)])
def test_glass_blur_is_the_published_loop(images, made, severity, sigma, iterations):
    rng = draws("glass_blur", severity, index=2)
    x = (blurred(images[2] / 255, sigma) * 255).astype(np.uint8)
    for _ in range(iterations):
        down, right = rng.integers(-1, 1, size=(2, 30, 30))
        for row in range(31, 1, -1):
            for column in range(31, 1, -1):
                r = row + down[row - 2, column - 2]
                c = column + right[row - 2, column - 2]
                x[row, column], x[r, c] = x[r, c], x[row, column]
    expected = as_bytes(blurred(x / 255, sigma))
    assert_close(made("glass_blur", severity)[2], expected, differing=0.05)


@pytest.mark.parametrize(("severity", "radius", "sigma"), [(1, 6, 1), (5, 9, 2.5)])
def test_motion_blur_is_a_one_sided_streak(images, made, severity, radius, sigma):
    for index in range(2):
        angle = draws("motion_blur", severity, index).uniform(-45, 45)
        expected = streaked(images[index], angle, radius, sigma)
        np.testing.assert_array_equal(made("motion_blur", severity)[index], expected)


@pytest.mark.parametrize(("severity", "stop", "zooms"), [(1, 1.06, 7), (2, 1.11, 12), (5, 1.26, 26)])
def test_zoom_blur_is_the_mean_of_the_zooms(images, made, severity, stop, zooms):
    x = images[3] / 255
    factors = np.arange(1, stop, 0.01)
    assert len(factors) == zooms
    total = x + sum(zoomed(x, factor) for factor in factors)
    assert_close(made("zoom_blur", severity)[3], as_bytes(total / (zooms + 1)))


def test_gaussian_blur_replicates_the_edges(images, made):
    assert_close(made("gaussian_blur", 5)[0], as_bytes(blurred(images[0] / 255, 1)))


# Weather


@pytest.mark.parametrize("severity", [1, 4, 5])
def test_snow_is_whitening_and_two_layers_of_flakes(images, made, severity):
    mean, std, zoom, threshold, radius, sigma, mix = {
        1: (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        4: (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        5: (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    }[severity]
    rng = draws("snow", severity, index=1)
    flakes = zoomed(rng.normal(mean, std, size=(32, 32))[..., None], zoom)[..., 0]
    flakes = as_bytes(np.where(flakes < threshold, 0, flakes))
    layer = streaked(flakes, rng.uniform(-135, -45), radius, sigma) / 255
    turned = np.rot90(layer, 2)
    expected = np.zeros((32, 32, 3))
    for row in range(32):
        for column in range(32):
            pixel = images[1, row, column] / 255
            grey = 0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]
            for channel, value in enumerate(pixel):
                white = mix * value + (1 - mix) * max(value, 1.5 * grey + 0.5)
                expected[row, column, channel] = white + layer[row, column] + turned[row, column]
    assert_close(made("snow", severity)[1], as_bytes(expected))


@pytest.mark.parametrize(("severity", "weights"), [(2, (1, 0.3)), (5, (0.75, 0.45))])
def test_frost_mixes_a_crop_of_a_photograph(images, made, photographs, severity, weights):
    for index in range(len(images)):
        rng = draws("frost", severity, index)
        number = rng.integers(5)
        photograph = np.asarray(Image.open(photographs / _frost.FILES[number]).convert("RGB"))
        # 201..205 x 303..307 pixels at 0.2; pixel i of the small one is pixel 5 i + 2.
        height, width = round(photograph.shape[0] / 5), round(photograph.shape[1] / 5)
        top, left = rng.integers(height - 32), rng.integers(width - 32)
        expected = np.zeros((32, 32, 3), np.uint8)
        for row, column in np.ndindex(32, 32):
            cold = photograph[5 * (top + row) + 2, 5 * (left + column) + 2].astype(float)
            mixed = weights[0] * images[index, row, column] + weights[1] * cold
            expected[row, column] = np.minimum(mixed, 255).astype(np.uint8)
        np.testing.assert_array_equal(made("frost", severity)[index], expected)


@pytest.mark.parametrize(("severity", "amount", "decay"), [(1, 0.2, 3), (5, 1.5, 1.75)])
def test_fog_is_a_diamond_square_plasma(images, made, severity, amount, decay):
    uniforms = iter(draws("fog", severity, index=5).uniform(-1, 1, size=32 * 32 - 1))
    plasma = np.zeros((32, 32))
    step, wibble = 32, 100.0

    def fill(first_row, first_column, neighbours):
        for row in range(first_row, 32, step):
            for column in range(first_column, 32, step):
                near = [plasma[(row + dy) % 32, (column + dx) % 32] for dy, dx in neighbours]
                plasma[row, column] = sum(near) / 4 + wibble * (wibble * next(uniforms))

    while step >= 2:
        half = step // 2
        cross = [(-half, 0), (half, 0), (0, -half), (0, half)]
        fill(half, half, [(a, b) for a in (-half, half) for b in (-half, half)])
        fill(0, half, cross)
        fill(half, 0, cross)
        step, wibble = half, wibble / decay
    plasma = (plasma - plasma.min()) / (plasma.max() - plasma.min())
    x = images[5] / 255
    expected = (x + amount * plasma[..., None]) * x.max() / (x.max() + amount)
    assert_close(made("fog", severity)[5], as_bytes(expected))


def hsv_changed(image, change):
    result = np.zeros(image.shape)
    for row, column in np.ndindex(image.shape[:2]):
        hsv = colorsys.rgb_to_hsv(*(image[row, column] / 255))
        result[row, column] = colorsys.hsv_to_rgb(*change(*hsv))
    return as_bytes(result)


@pytest.mark.parametrize(("severity", "added"), [(1, 0.05), (2, 0.1), (5, 0.3)])
def test_brightness_raises_the_value_of_hsv(images, made, severity, added):
    expected = hsv_changed(images[0], lambda h, s, v: (h, s, min(v + added, 1)))
    assert_close(made("brightness", severity)[0], expected, differing=0.02)


@pytest.mark.parametrize(("severity", "factor", "added"), [(1, 0.3, 0), (3, 1.5, 0), (5, 2.5, 0.2)])
def test_saturate_changes_the_saturation_of_hsv(images, made, severity, factor, added):
    expected = hsv_changed(images[0], lambda h, s, v: (h, min(s * factor + added, 1), v))
    assert_close(made("saturate", severity)[0], expected, differing=0.05)


def test_water_brightens_and_mud_is_brown(images, made):
    for severity in (1, 2, 3):
        gap = made("spatter", severity).astype(int) - images
        assert gap.min() >= 0
        assert gap.max() > 0
    grey = np.full((20, 32, 32, 3), 200, np.uint8)
    for severity in (4, 5):
        muddy = corrupt(grey, "spatter", severity, seed=SEED)
        covered = (muddy != 200).any(axis=3)
        assert 0.02 < covered.mean() < 0.9
        np.testing.assert_allclose(muddy[covered].min(axis=0), (63, 42, 20), atol=1)


# Digital


@pytest.mark.parametrize(("severity", "factor"), [(1, 0.75), (5, 0.15)])
def test_contrast_is_about_the_mean_of_each_channel(images, made, severity, factor):
    expected = np.zeros((32, 32, 3), np.uint8)
    for channel in range(3):
        mean = math.fsum(images[2, :, :, channel].ravel() / 255) / 1024
        for row, column in np.ndindex(32, 32):
            value = images[2, row, column, channel] / 255
            expected[row, column, channel] = to_byte((value - mean) * factor + mean)
    assert_close(made("contrast", severity)[2], expected)


@pytest.mark.parametrize(
    ("severity", "alpha", "sigma", "affine"),
    [(1, 0, 0, 0.08), (2, 0.05, 0.2, 0.07), (5, 0.1, 0.03, 0.03)],
)
def test_elastic_transform_is_affine_then_displacement(images, made, severity, alpha, sigma, affine):
    rng = draws("elastic_transform", severity, index=3)
    before = np.array([[26.0, 26.0], [26.0, 6.0], [6.0, 6.0]])  # (x, y): 16 +- 10
    after = before + rng.uniform(-32 * affine, 32 * affine, size=(3, 2))
    noise = rng.uniform(-1, 1, size=(2, 32, 32))
    right, down = (
        32 * alpha * ndimage.gaussian_filter(field, 32 * sigma, mode="reflect", truncate=3) for field in noise
    )
    # The forward map before -> after from its two edge vectors, then inverted.
    edges = np.column_stack([before[0] - before[1], before[1] - before[2]])
    moved = np.column_stack([after[0] - after[1], after[1] - after[2]])
    inverse = np.linalg.inv(moved @ np.linalg.inv(edges))

    x = images[3] / 255
    turned, result = np.zeros_like(x), np.zeros_like(x)
    for row, column in np.ndindex(32, 32):
        source = before[0] + inverse @ (np.array([column, row]) - after[0])
        turned[row, column] = interpolated(x, source[1], source[0], mirror)
    for row, column in np.ndindex(32, 32):
        at = (row + down[row, column], column + right[row, column])
        result[row, column] = interpolated(turned, *at, reflect)
    assert_close(made("elastic_transform", severity)[3], as_bytes(result))


@pytest.mark.parametrize(("severity", "small"), [(1, 30), (2, 28), (3, 27), (4, 24), (5, 20)])
def test_pixelate_is_a_box_filter_down_and_up(images, made, severity, small):
    for image, result in zip(images, made("pixelate", severity), strict=True):
        down = Image.fromarray(image).resize((small, small), Image.Resampling.BOX)
        np.testing.assert_array_equal(result, down.resize((32, 32), Image.Resampling.BOX))


@pytest.mark.parametrize(("severity", "quality"), [(1, 80), (3, 58), (5, 40)])
def test_jpeg_compression_is_pillows(images, made, severity, quality):
    for image, result in zip(images, made("jpeg_compression", severity), strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, format="JPEG", quality=quality)
        np.testing.assert_array_equal(result, Image.open(file).convert("RGB"))


# What all of them promise


def test_names_are_the_published_ones():
    assert len(CORRUPTIONS) == 15
    assert len(set(ALL)) == 19


def test_importing_the_names_imports_neither_scipy_nor_pillow():
    code = "import sys, fedtta_flwr.data.corruptions\nsys.exit(bool({'scipy', 'PIL'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", ALL)
def test_shape_dtype_and_input_are_kept(images, made, name, severity):
    before = images.copy()
    result = made(name, severity)
    assert result.shape == images.shape
    assert result.dtype == np.uint8
    assert (result != images).any()
    np.testing.assert_array_equal(images, before)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=5, deadline=None)
@given(order=st.lists(st.integers(0, 5), min_size=1, max_size=8), severity=st.sampled_from([1, 5]))
def test_a_sample_depends_on_neither_batch_nor_order(images, made, photographs, name, order, severity):
    result = corrupt(images[order], name, severity, seed=SEED, indices=order, frost_dir=photographs)
    np.testing.assert_array_equal(result, made(name, severity)[order])


@pytest.mark.parametrize("name", ["gaussian_noise", "contrast", "elastic_transform", "fog"])
def test_a_sample_does_not_depend_on_the_size_of_the_batch(name):
    many = made_images(300, seed=3)
    whole = corrupt(many, name, 5, seed=SEED)
    tail = corrupt(many[290:], name, 5, seed=SEED, indices=np.arange(290, 300))
    np.testing.assert_array_equal(whole[290:], tail)


@pytest.mark.parametrize("name", ALL)
def test_only_the_seed_and_the_index_change_a_random_corruption(images, made, photographs, name):
    same = np.repeat(images[:1], 2, axis=0)
    first, second = corrupt(same, name, 5, seed=SEED, frost_dir=photographs)
    np.testing.assert_array_equal(first, made(name, 5)[0])
    other = corrupt(same[:1], name, 5, seed=SEED + 1, frost_dir=photographs)[0]
    assert np.array_equal(first, second) == (name in DETERMINISTIC)
    assert np.array_equal(first, other) == (name in DETERMINISTIC)


@pytest.mark.parametrize("name", [name for name in ALL if name != "frost"])
def test_larger_images_and_no_images_are_accepted(name):
    large = made_images(2, side=48)
    assert corrupt(large, name, 3, seed=SEED).shape == large.shape
    assert corrupt(large[:0], name, 3, seed=SEED).shape == (0, 48, 48, 3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("level", [0, 255])
def test_black_and_white_images_are_no_special_case(photographs, name, level):
    flat = np.full((1, 32, 32, 3), level, np.uint8)
    with np.errstate(all="raise", under="ignore"):
        for severity in SEVERITIES:
            corrupt(flat, name, severity, seed=SEED, frost_dir=photographs)


def test_the_result_is_truncated_not_rounded():
    grey = np.full((1, 32, 32, 3), 100, np.uint8)
    assert (corrupt(grey, "brightness", 2, seed=0) == 125).all()  # 100 + 25.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "rain"}, "'rain' is not known: one of gaussian_noise"),
        ({"severity": 0}, "severity: 0 is not allowed"),
        ({"severity": 6}, "severity: 6 is not allowed"),
        ({"severity": 2.5}, "severity: 2.5 is not allowed"),
        ({"images": np.zeros((2, 32, 32, 3))}, "dtype float64 is not allowed: uint8"),
        ({"images": np.zeros((32, 32, 3), np.uint8)}, r"shape \(32, 32, 3\) is not allowed"),
        ({"images": np.zeros((2, 3, 32, 32), np.uint8)}, "is not allowed"),
        ({"images": np.zeros((2, 28, 28, 3), np.uint8)}, "S >= 32"),
        ({"indices": [1]}, "2 integers, one per image"),
        ({"indices": [0.5, 1.5]}, "indices: float64"),
    ],
)
def test_what_is_not_allowed_is_one_line(change, message):
    arguments = {"images": made_images(2), "name": "contrast", "severity": 1, "seed": 0} | change
    with pytest.raises(DataError, match=message) as caught:
        corrupt(**arguments)
    assert "\n" not in str(caught.value)


# The frost photographs


def test_frost_reads_the_real_photographs(images):
    folder = shared_folder("frost")
    result = corrupt(images, "frost", 5, seed=SEED, frost_dir=folder)
    assert result.mean() > (images * 0.75).mean() + 20


def test_frost_finds_its_folder_in_the_environment(images, made, photographs, monkeypatch):
    monkeypatch.setenv("FEDTTA_FROST_DIR", str(photographs))
    np.testing.assert_array_equal(corrupt(images, "frost", 5, seed=SEED), made("frost", 5))


def test_frost_finds_the_package_without_importing_it(images, made, photographs, tmp_path, monkeypatch):
    package = tmp_path / "imagecorruptions"
    (package / "frost").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    record = tmp_path / "imagecorruptions_imaug-1.1.5.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: imagecorruptions-imaug\nVersion: 1.1.5\n")
    lines = ["imagecorruptions/__init__.py,,"]
    for name in _frost.FILES:
        (package / "frost" / name).write_bytes((photographs / name).read_bytes())
        lines.append(f"imagecorruptions/frost/{name},,")
    (record / "RECORD").write_text("\n".join(lines))
    monkeypatch.delenv("FEDTTA_FROST_DIR", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    np.testing.assert_array_equal(corrupt(images, "frost", 5, seed=SEED), made("frost", 5))


def test_frost_without_photographs_says_what_to_do(images, monkeypatch):
    monkeypatch.delenv("FEDTTA_FROST_DIR", raising=False)
    monkeypatch.setattr(_frost, "PACKAGE", "no-such-distribution")
    with pytest.raises(DataError, match=r"install .*frost1\.png.*FEDTTA_FROST_DIR.* --frost-dir"):
        corrupt(images, "frost", 1, seed=0)


def test_frost_names_the_photograph_it_cannot_read(images, photographs, tmp_path):
    with pytest.raises(DataError, match=r"cannot read the photograph .*frost1\.png"):
        corrupt(images, "frost", 1, seed=0, frost_dir=tmp_path)
    (tmp_path / "frost1.png").write_text("<html>")
    with pytest.raises(DataError, match=r"cannot read the photograph .*frost1\.png"):
        corrupt(images, "frost", 1, seed=0, frost_dir=tmp_path)


def test_frost_refuses_images_larger_than_its_photographs(photographs):
    with pytest.raises(DataError, match="larger than the photographs allow: below 40"):
        corrupt(made_images(1, side=40), "frost", 1, seed=0, frost_dir=photographs)


# The reference table


def test_the_reference_means_are_the_published_ones():
    means = [np.mean([REFERENCE[name][column] for name in CORRUPTIONS]) for column in COLUMNS]
    np.testing.assert_allclose(means, (51.86, 64.87, 69.64, 70.68), atol=0.01)


def test_compare_judges_each_corruption_and_the_mean():
    measured = {name: REFERENCE[name]["bn50"] + 1 for name in CORRUPTIONS}
    measured["fog"] += 1.5
    *rows, mean = compare(measured, "bn50")
    assert [row.name for row in rows] == list(CORRUPTIONS)
    assert [row.name for row in rows if not row.within] == ["fog"]
    assert mean.name == "mean"
    assert mean.difference == pytest.approx(1.1)
    assert not mean.within


def test_compare_leaves_clean_out_of_the_mean():
    clean, fog, mean = compare({"fog": 66.5, "clean": 80})
    assert not clean.within
    assert fog.within
    assert mean == ("mean", 66.5, 66.02, pytest.approx(0.48), True)
    assert [row.name for row in compare({"clean": 91.73})] == ["clean"]
    assert not compare({"fog": math.nan})[0].within


def test_compare_refuses_what_has_no_reference():
    with pytest.raises(DataError, match="'bn1' is not known"):
        compare({}, "bn1")
    with pytest.raises(DataError, match="'spatter' has no reference"):
        compare({"spatter": 70.0})


def test_how_many_are_made_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
    for name in ("gaussian_noise", "glass_blur", "fog", "elastic_transform"):
        whole = corrupt(images, name, 4, seed=2)
        with monkeypatch.context() as patch:
            patch.setattr(corruptions, "_PIXELS", 2 * 64 * 64)
            np.testing.assert_array_equal(corrupt(images, name, 4, seed=2), whole)


def test_photographs_may_lie_at_home(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(photographs.parent))
    monkeypatch.setenv("FEDTTA_FROST_DIR", f"~/{photographs.name}")
    images = made_images(2)
    at_home = corrupt(images, "frost", 3, seed=1)
    np.testing.assert_array_equal(at_home, corrupt(images, "frost", 3, seed=1, frost_dir=photographs))
