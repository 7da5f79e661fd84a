"""Random augmentations of image batches, on the images' device, each sample with its own parameters.

Every random number comes from the generator that is given: parameters are drawn on its device and moved, so a CPU
generator gives the same views on every device. Nothing here loops over samples.
"""

from dataclasses import dataclass, replace
from math import pi
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Strength:
    """How far the strong augmentation goes; the defaults are those of CoTTA, RoTTA and TRIBE for small images.

    Attributes
    ----------
    brightness, contrast, saturation, gamma : float
        Factors (of gamma: exponents) are uniform in [1 - s, 1 + s].
    hue : float
        Shift of the hue in turns, uniform in [-s, s].
    rotation : float
        Degrees, uniform in [-s, s].
    translation : float
        Share of the image's height and width, uniform in [-s, s]. The published codes have 1/16, of an image that is
        padded to twice its side first.
    scale : float
        Uniform in [1 - s, 1 + s].
    blur : float
        Standard deviation in pixels of a Gaussian kernel of 5 pixels, uniform in (0, s].
    flip : float
        Probability of a horizontal flip.
    noise : float
        Standard deviation of additive Gaussian noise.
    outside : str
        What comes in from outside the image: ``border``, its border repeated, or ``reflection``.
    """

    brightness: float = 0.4
    contrast: float = 0.3
    saturation: float = 0.5
    hue: float = 0.06
    gamma: float = 0.3
    rotation: float = 15.0
    translation: float = 1 / 8
    scale: float = 0.1
    blur: float = 0.5
    flip: float = 0.5
    noise: float = 0.005
    outside: Literal["border", "reflection"] = "border"


STRONG = Strength()
#: ROID's: neither blur nor noise
SHARP = replace(STRONG, blur=0.0, noise=0.0, outside="reflection")


def strong(x: Tensor, generator: torch.Generator, strength: Strength = STRONG) -> Tensor:
    """Return one strongly augmented view of every image.

    In this order: clamp, colour jitter (brightness, contrast, saturation, hue, gamma), affine map, Gaussian blur,
    horizontal flip, Gaussian noise, clamp. The published code draws one set of parameters a batch and shuffles the
    order of the jitters; here every sample has parameters of its own and the order is fixed. A part of strength 0 is
    left out.

    Parameters
    ----------
    x : Tensor
        [B, C, H, W] in [0, 1]; saturation and hue need C = 3 and are left out otherwise.
    generator : torch.Generator
        Of all draws.
    strength : Strength
        How far.

    Returns
    -------
    Tensor
        [B, C, H, W] in [0, 1].
    """
    if len(x) == 0:
        return x
    x = _affine(_jitter(x.clamp(0, 1), generator, strength), generator, strength)
    if strength.blur:
        x = _blur(x, _uniform(x, generator, 0.001, strength.blur))
    if strength.flip:
        x = torch.where(_uniform(x, generator, 0, 1) < strength.flip, x.flip(-1), x)
    if strength.noise:
        noise = torch.randn(x.shape, generator=generator, device=generator.device).to(x)
        x = x + strength.noise * noise
    return x.clamp(0, 1)


def crop_and_flip(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Return images [B, C, H, W] shifted by up to `padding` pixels (zeros come in) and flipped at random."""
    b, _, h, w = x.shape
    padded = F.pad(x, (padding,) * 4)
    rows, columns = (torch.arange(n, device=x.device) for n in (h, w))
    top, left = (_uniform(x, generator, 0, 2 * padding + 1).long().view(b, 1) for _ in range(2))
    columns = torch.where(_uniform(x, generator, 0, 1).view(b, 1) < 0.5, columns, columns.flip(0))
    sample = torch.arange(b, device=x.device).view(b, 1, 1)
    # Indices apart from each other bring their axes to the front: [B, H, W, C].
    return padded[sample, :, (rows + top)[:, :, None], (columns + left)[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _uniform(x: Tensor, generator: torch.Generator, low: float, high: float) -> Tensor:
    """Draw one number a sample, [B, 1, 1, 1]."""
    draws = torch.rand((len(x), 1, 1, 1), generator=generator, device=generator.device).to(x)
    return low + (high - low) * draws


def _jitter(x: Tensor, generator: torch.Generator, strength: Strength) -> Tensor:
    def factor(s: float) -> Tensor:
        return _uniform(x, generator, 1 - s, 1 + s)

    colour = x.shape[1] == 3
    if strength.brightness:
        x = (x * factor(strength.brightness)).clamp(0, 1)
    if strength.contrast:
        x = _mix(x, _grey(x).mean(dim=(-3, -2, -1), keepdim=True), factor(strength.contrast))
    if strength.saturation and colour:
        x = _mix(x, _grey(x), factor(strength.saturation))
    if strength.hue and colour:
        x = _turn_hue(x, _uniform(x, generator, -strength.hue, strength.hue))
    if strength.gamma:
        x = (x.log() * factor(strength.gamma)).exp()  # x to this power, 0 for 0; torch's pow is slower
    return x


def _mix(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (other + factor * (x - other)).clamp(0, 1)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return (x * x.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(dim=1, keepdim=True)


def _turn_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Shift the hue of RGB images, in turns: to the HSV hexagon and back."""
    r, g, b = x.unbind(1)
    value, chroma = x.amax(1), x.amax(1) - x.amin(1)
    safe = torch.where(chroma > 0, chroma, 1.0)
    sixths = torch.where(value == r, (g - b) / safe, torch.where(value == g, (b - r) / safe + 2, (r - g) / safe + 4))
    sixths = sixths + 6 * turns.squeeze(1)
    # Channel n is `value` within one sixth of its own hue, `value - chroma` opposite to it, linear between.
    distances = torch.stack([5 + sixths, 3 + sixths, 1 + sixths], dim=1)
    distances -= 6 * (distances / 6).floor()  # modulo 6; torch's remainder is slower
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(distances, 4 - distances).clamp(0, 1)


def _affine(x: Tensor, generator: torch.Generator, strength: Strength) -> Tensor:
    s = strength
    if not (s.rotation or s.translation or s.scale):
        return x

    def draw(middle: float, extent: float) -> Tensor:
        return _uniform(x, generator, middle - extent, middle + extent).flatten()

    return warp(
        x,
        angle=draw(0, s.rotation * pi / 180),
        scale=draw(1, s.scale),
        right=draw(0, 2 * s.translation),
        down=draw(0, 2 * s.translation),
        outside=s.outside,
    )


def warp(
    x: Tensor,
    *,
    angle: Tensor,
    right: Tensor,
    down: Tensor,
    shear: Tensor | float = 0.0,
    shear_down: Tensor | float = 0.0,
    scale: Tensor | float = 1.0,
    outside: str = "border",
) -> Tensor:
    """Map every image [B, C, H, W] affinely about its middle, bilinearly.

    Parameters
    ----------
    x : Tensor
        [B, C, H, W].
    angle, scale : Tensor
        [B]: rotation in radians, magnification.
    shear, shear_down : Tensor
        [B]: tangents of the shear along the width and along the height.
    right, down : Tensor
        [B]: shift in halves of the width and of the height.
    outside : str
        As of `Strength`.
    """
    aspect = x.shape[-2] / x.shape[-1]  # rotation and shear are of pixels, the grid's units halves of the sides
    cos, sin = angle.cos() / scale, angle.sin() / scale
    across = torch.stack([cos, (sin + shear) * aspect, -right], dim=1)
    along = torch.stack([(shear_down - sin) / aspect, cos, -down], dim=1)
    grid = F.affine_grid(torch.stack([across, along], dim=1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=outside, align_corners=False)


def _blur(x: Tensor, sigma: Tensor, reach: int = 2) -> Tensor:
    """Convolve every image with its own separable Gaussian of 2 reach + 1 pixels; the border repeats outside."""
    offsets = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    weights = torch.softmax(-((offsets / sigma) ** 2) / 2, dim=-1)  # [B, 1, 1, 2 reach + 1]
    for axis in (-2, -1):
        pads = (reach, reach, 0, 0) if axis == -1 else (0, 0, reach, reach)
        padded, length = F.pad(x, pads, mode="replicate"), x.shape[axis]
        shifted = [padded.narrow(axis, i, length) for i in range(2 * reach + 1)]
        x = weights[..., reach, None] * shifted[reach]
        for i in range(reach):  # the kernel is symmetric
            x += weights[..., i, None] * (shifted[i] + shifted[-1 - i])
    return x
