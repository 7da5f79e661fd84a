"""AugMix: random chains of mild operations, mixed with the image (Hendrycks et al. 2020, arXiv 1912.02781).

Written from the paper, as operations on whole batches: every sample has its own chains, depths, operations and
levels. All operations of a step are computed and each sample takes one, so nothing loops over samples.
"""

from math import pi

import torch
from torch import Tensor

from fedtta_flwr.adaptation.augment import warp

#: autocontrast, equalize, posterize, solarize; then one affine map that is a rotation, shear or translation
PIXEL, AFFINE = 4, 5


def augmix(x: Tensor, generator: torch.Generator, *, severity: float = 1.0, width: int = 3, depth: int = 3) -> Tensor:
    r"""Return one AugMix view of every image.

    .. math:: (1 - m)\,x + m \sum_{i=1}^{width} w_i\,\mathrm{chain}_i(x),
        \quad w \sim \mathrm{Dirichlet}(1), \quad m \sim \mathrm{Beta}(1, 1)

    A chain has 1 to `depth` operations of a level uniform in [0.1, severity]; levels grow to 10.

    Parameters
    ----------
    x : Tensor
        [B, C, H, W] in [0, 1].
    generator : torch.Generator
        Of all draws; parameters are drawn on its device and moved.
    severity : float
        The highest level, in [0.1, 10].
    width, depth : int
        Chains, and the most operations of each.

    Returns
    -------
    Tensor
        [B, C, H, W] in [0, 1].
    """
    if len(x) == 0:
        return x

    def draw(*shape: int) -> Tensor:
        return torch.rand((len(x), *shape), generator=generator, device=generator.device).to(x)

    # Exponential draws, normalised, are Dirichlet(1, ..., 1); 1 - u keeps the logarithm finite.
    weights = -(1 - draw(width)).clamp(min=1e-12).log()
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12)
    share = draw(1)
    mixed = torch.zeros_like(x)
    for i in range(width):
        lengths, chain = draw() * depth, x
        for step in range(depth):
            changed = _one_operation(chain, draw(), 0.1 + (severity - 0.1) * draw(), draw())
            chain = torch.where(_column(step < lengths), changed, chain)
        mixed = mixed + _column(weights[:, i]) * chain
    return ((1 - _column(share)) * x + _column(share) * mixed).clamp(0, 1)


def _column(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _one_operation(x: Tensor, choice: Tensor, level: Tensor, side: Tensor) -> Tensor:
    """Apply to each image the operation that `choice` in [0, 1) picks, at its level, to one side; [B] each."""
    picked = (choice * (PIXEL + AFFINE)).long()
    sign = torch.where(side < 0.5, -1.0, 1.0).to(x)
    zero, share = torch.zeros_like(level), sign * level / 10

    def where(number: int, amount: Tensor) -> Tensor:
        return torch.where(picked == PIXEL + number, amount, zero)

    out = warp(
        x,
        angle=where(0, share * 30 * pi / 180),
        shear=where(1, share * 0.3),
        shear_down=where(2, share * 0.3),
        right=where(3, share * 2 / 3),  # a third of the side, in halves of it
        down=where(4, share * 2 / 3),
    )
    operations = (_autocontrast(x), _equalize(x), _posterize(x, level), _solarize(x, level))
    for number, changed in enumerate(operations):
        out = torch.where(_column(picked == number), changed, out)
    return out


def _autocontrast(x: Tensor) -> Tensor:
    low, high = x.amin(dim=(-2, -1), keepdim=True), x.amax(dim=(-2, -1), keepdim=True)
    return torch.where(high > low, (x - low) / torch.where(high > low, high - low, 1.0), x)


def _equalize(x: Tensor) -> Tensor:
    """Make every channel's 256-bin histogram flat: a pixel becomes the share of pixels in lower bins, rescaled."""
    b, c, h, w = x.shape
    bins = (x * 255).round().long().clamp(0, 255).reshape(b * c, h * w)
    counts = torch.zeros((b * c, 256), dtype=torch.long, device=x.device).scatter_add_(1, bins, torch.ones_like(bins))
    below = (counts.cumsum(1) - counts).gather(1, bins)
    most = below.amax(dim=1, keepdim=True)  # 0 if the channel has one value only: it stays
    flat = torch.where(most > 0, below / most.clamp(min=1), x.reshape(b * c, h * w))
    return flat.to(x).view(b, c, h, w)


def _posterize(x: Tensor, level: Tensor) -> Tensor:
    """Keep the 4 highest of 8 bits, fewer at a high level."""
    size = 2.0 ** (4 + (level * 4 / 10).floor())  # grey values that become one
    return (((x * 255) / _column(size)).floor() * _column(size)) / 255


def _solarize(x: Tensor, level: Tensor) -> Tensor:
    """Invert what is brighter than a threshold, which falls with the level."""
    return torch.where(x > _column(1 - level / 10), 1 - x, x)
