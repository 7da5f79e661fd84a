"""The augmentations: ranges, determinism, identities, and single operations against plain loops."""

import colorsys
import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtta_flwr.adaptation.augment import SHARP, STRONG, crop_and_flip, strong, warp
from fedtta_flwr.adaptation.augmix import _autocontrast, _equalize, _posterize, _solarize, augmix

PARTS = [field.name for field in fields(STRONG) if field.name != "outside"]
NONE = replace(STRONG, **dict.fromkeys(PARTS, 0.0))
every_augmentation = pytest.mark.parametrize("augment", [strong, augmix, crop_and_flip])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def only(part: str, strength: float):
    return replace(NONE, **{part: strength})


@every_augmentation
@settings(max_examples=15, deadline=None)
@given(batch=st.integers(0, 5), channels=st.sampled_from([1, 3]), h=st.integers(1, 9), w=st.integers(1, 9))
def test_shape_and_range_stay(augment, batch: int, channels: int, h: int, w: int) -> None:
    x = torch.rand(batch, channels, h, w, generator=rng())
    for images in (x, x.double(), torch.zeros_like(x), torch.ones_like(x)):
        before = images.clone()
        y = augment(images, rng(1))
        assert y.shape == x.shape
        assert y.dtype == images.dtype
        assert bool(y.isfinite().all())
        assert bool(((y >= 0) & (y <= 1)).all())
        assert torch.equal(images, before)


@every_augmentation
def test_only_the_generator_decides(augment, images) -> None:
    x = images(4)
    torch.manual_seed(1)
    first = augment(x, rng(3))
    torch.manual_seed(2)
    assert torch.equal(first, augment(x, rng(3)))
    assert not torch.equal(first, augment(x, rng(4)))


@every_augmentation
def test_equal_images_get_views_of_their_own(augment, images) -> None:
    y = augment(images(1).expand(8, -1, -1, -1), rng())
    assert len({tuple(view.flatten().tolist()) for view in y}) > 4


def test_no_strength_is_the_identity(images) -> None:
    assert torch.equal(strong(images(5), rng(), NONE), images(5))
    assert torch.equal(strong(images(5) * 3 - 1, rng(), NONE), (images(5) * 3 - 1).clamp(0, 1))


@pytest.mark.parametrize("part", PARTS)
def test_every_part_does_something_and_vanishes_with_its_strength(images, part: str) -> None:
    x = images(6, size=8)
    assert float((strong(x, rng(), only(part, getattr(STRONG, part) or 5.0)) - x).abs().max()) > 0.01
    if part != "flip":
        assert float((strong(x, rng(), only(part, 1e-7)) - x).abs().max()) < 1e-4


def test_presets() -> None:
    assert (SHARP.blur, SHARP.noise) == (0.0, 0.0)
    assert replace(SHARP, blur=0.5, noise=0.005, outside="border") == STRONG


def test_images_move_by_an_eighth_of_their_side_at_most() -> None:
    """As in the published codes: a sixteenth of an image that is padded to twice its side."""
    x = torch.zeros(400, 1, 32, 32)
    x[:, :, 15:17, 15:17] = 1
    y = strong(x, rng(), only("translation", STRONG.translation))
    columns = (y.sum(dim=(1, 2)) * torch.arange(32)).sum(dim=1) / y.sum(dim=(1, 2, 3)) - 15.5
    assert 3.8 < float(columns.abs().max()) <= 4 + 1e-4


def test_what_comes_in_from_outside() -> None:
    x = torch.arange(8.0).view(1, 1, 1, 8) / 8
    shift = {"angle": torch.zeros(1), "right": torch.full((1,), 0.5), "down": torch.zeros(1)}
    assert warp(x, **shift)[0, 0, 0].mul(8).tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert warp(x, **shift, outside="reflection")[0, 0, 0].mul(8).tolist() == [1, 0, 0, 1, 2, 3, 4, 5]


def test_brightness_contrast_and_saturation_factors_are_in_their_range() -> None:
    grey = torch.full((400, 3, 2, 2), 0.5)
    factors = strong(grey, rng(), only("brightness", 0.4))[:, 0, 0, 0] / 0.5
    assert 0.6 <= float(factors.min()) < 0.65
    assert 1.35 < float(factors.max()) <= 1.4 + 1e-6
    assert torch.allclose(strong(grey, rng(), only("contrast", 0.3)), grey, atol=1e-6)  # its mean is what it is
    assert torch.allclose(strong(grey, rng(), only("saturation", 0.5)), grey, atol=1e-6)  # it has no colour


def test_gamma() -> None:
    y = strong(torch.full((300, 1, 1, 1), 0.25), rng(), only("gamma", 0.3)).flatten()
    exponents = y.log() / math.log(0.25)
    assert 0.7 - 1e-5 <= float(exponents.min()) < 0.75
    assert 1.25 < float(exponents.max()) <= 1.3 + 1e-5


def test_hue_is_that_of_the_colour_wheel(images) -> None:
    from fedtta_flwr.adaptation.augment import _turn_hue

    x = torch.cat(
        [images(3, size=4), torch.tensor([0.0, 1.0, 0.3, 0.3]).view(1, 1, 2, 2).expand(1, 3, 2, 2).repeat(1, 1, 2, 2)]
    )
    turns = torch.tensor([0.3, -0.2, 0.0, 0.25]).view(4, 1, 1, 1)
    y = _turn_hue(x, turns)
    for b in range(4):
        for i in range(4):
            for j in range(4):
                hue, saturation, value = colorsys.rgb_to_hsv(*x[b, :, i, j].tolist())
                expected = colorsys.hsv_to_rgb((hue + float(turns[b])) % 1.0, saturation, value)
                assert y[b, :, i, j].tolist() == pytest.approx(expected, abs=1e-5)


def test_blur_is_a_convolution_with_a_gaussian(images) -> None:
    from fedtta_flwr.adaptation.augment import _blur

    x, sigmas = images(2, size=5, dtype=torch.float64), [0.4, 1.1]
    y = _blur(x, torch.tensor(sigmas, dtype=torch.float64).view(2, 1, 1, 1))
    for b, sigma in enumerate(sigmas):
        kernel = [math.exp(-0.5 * (d / sigma) ** 2) for d in range(-2, 3)]
        kernel = [k / sum(kernel) for k in kernel]
        for i in range(5):
            for j in range(5):
                expected = sum(
                    kernel[u + 2] * kernel[v + 2] * x[b, :, min(max(i + u, 0), 4), min(max(j + v, 0), 4)]
                    for u in range(-2, 3)
                    for v in range(-2, 3)
                )
                torch.testing.assert_close(y[b, :, i, j], expected)


def affinely(x: Tensor, **amounts: float) -> Tensor:
    defaults = {"angle": 0.0, "shear": 0.0, "right": 0.0, "down": 0.0, "scale": 1.0}
    return warp(x, **{k: torch.full((len(x),), v, dtype=x.dtype) for k, v in (defaults | amounts).items()})


def test_warps_that_move_pixels_onto_pixels(images) -> None:
    x = images(2, size=6, dtype=torch.float64)
    torch.testing.assert_close(affinely(x), x)
    torch.testing.assert_close(affinely(x, right=2 / 6)[..., 1:], x[..., :-1])
    torch.testing.assert_close(affinely(x, down=4 / 6)[..., 2:, :], x[..., :-2, :])
    quarter = affinely(x, angle=math.pi / 2)
    assert torch.allclose(quarter, x.rot90(1, (2, 3))) or torch.allclose(quarter, x.rot90(-1, (2, 3)))
    torch.testing.assert_close(affinely(x, angle=math.pi), x.flip(2, 3))
    oblong = x[..., :4, :]
    torch.testing.assert_close(affinely(oblong, angle=math.pi), oblong.flip(2, 3))


def test_the_border_repeats_outside(images) -> None:
    y = affinely(images(1, size=4, dtype=torch.float64), right=1.0)
    torch.testing.assert_close(y[..., 0], images(1, size=4, dtype=torch.float64)[..., 0])


def test_flips_are_as_often_as_asked() -> None:
    x = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2).expand(1000, 1, 1, 2)
    flipped = strong(x, rng(), only("flip", 0.5))[:, 0, 0, 0].mean()
    assert 0.45 < float(flipped) < 0.55
    assert torch.equal(strong(x, rng(), only("flip", 1.0)), x.flip(-1))


def test_noise_has_its_strength() -> None:
    y = strong(torch.full((50, 3, 20, 20), 0.5), rng(), only("noise", 0.05))
    assert float((y - 0.5).std()) == pytest.approx(0.05, rel=0.02)


def test_crops_are_windows_of_the_padded_image_or_of_its_mirror(images) -> None:
    x = images(20, size=5)
    y = crop_and_flip(x, rng(), padding=2)
    for image, view in zip(x, y, strict=True):
        padded = torch.zeros(3, 9, 9)
        padded[:, 2:7, 2:7] = image
        windows = [padded[:, i : i + 5, j : j + 5] for i in range(5) for j in range(5)]
        assert any(torch.equal(view, w) or torch.equal(view, w.flip(-1)) for w in windows)
    assert torch.equal(crop_and_flip(x, rng(), padding=0)[..., 0, 0].sum(), crop_and_flip(x, rng(), 0)[..., 0, 0].sum())


def test_pixel_operations_of_augmix(images) -> None:
    x = images(2, size=4)
    stretched = _autocontrast(x * 0.5 + 0.2)
    assert torch.allclose(stretched.amin(dim=(2, 3)), torch.zeros(2, 3))
    assert torch.allclose(stretched.amax(dim=(2, 3)), torch.ones(2, 3))
    flat = torch.full((1, 3, 4, 4), 0.3)
    assert torch.equal(_autocontrast(flat), flat)
    assert torch.equal(_equalize(flat), flat)
    ramp = torch.arange(16.0).view(1, 1, 4, 4) ** 2 / 255
    assert torch.allclose(_equalize(ramp).flatten(), torch.arange(16.0) / 15)
    values = (_posterize(x, torch.tensor([1.0, 1.0])) * 255).round()
    assert bool((values % 16 == 0).all())
    solarized = _solarize(x, torch.tensor([2.0, 0.0]))
    assert torch.equal(solarized[0], torch.where(x[0] > 0.8, 1 - x[0], x[0]))
    assert torch.equal(solarized[1], x[1])


def test_augmix_stays_near_the_image_at_low_severity() -> None:
    """Geometry is mild; equalize and autocontrast hardly change a smooth image that uses all values."""
    ramp = torch.linspace(0, 1, 32).view(1, 1, 1, 32).expand(40, 3, 32, 32).contiguous()
    near = (augmix(ramp, rng(), severity=1.0) - ramp).abs().mean()
    assert 0 < float(near) < 0.05
