"""What methods with a BatchNorm of their own share: how it takes the place of the model's, and how it normalises."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.base import batch_norms
from fedtta_flwr.errors import ConfigError

BatchNorm = nn.modules.batchnorm._BatchNorm
#: the adapters that ask for no normalisation layer, in words
UNNORMALISED = "`source`, `entropy`, `shot`, `memo`, `lame` or `cotta`"
#: (name of the layer, layer, its input [N, C, ...]) -> its output
Normalise = Callable[[str, BatchNorm, Tensor], Tensor]


@contextmanager
def normalised_by(model: nn.Module, normalise: Normalise) -> Iterator[None]:
    """Let `normalise` compute what the model's BatchNorm layers return.

    Only the layers' forward function changes, and only inside the context: no module, parameter or buffer is
    exchanged, and the layers' own normalisation costs nothing. What else a layer's own function does is left out
    (`more_than_batch_norm`).
    """
    layers = batch_norms(model)
    before = {name: vars(layer).get("forward") for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.forward = partial(normalise, name, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, layer in layers.items():
            if (outer := before[name]) is None:
                del layer.forward
            else:
                layer.forward = outer  # type: ignore[method-assign]


def normalise_with(h: Tensor, mean: Tensor, variance: Tensor, layer: BatchNorm) -> Tensor:
    """Normalise h [N, C, ...] with given moments [C] and the layer's affine map; gradients reach all of them."""
    weight = torch.ones_like(mean) if layer.weight is None else layer.weight
    bias = torch.zeros_like(mean) if layer.bias is None else layer.bias
    out: Tensor = _Normalisation.apply(h, mean, variance, weight, bias, layer.eps)
    return out


def sample_moments(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and biased variance of each sample's channels, [B, C] each, over the pixels of h [B, C, ...]."""
    h = widened(h)
    if h.dim() == 2:
        return h, torch.zeros_like(h)
    mean, variance = _SampleMoments.apply(h)
    return mean, variance


def mean_and_variance(h: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    """Return the mean over some axes, which stay with length 1, and the biased variance, without them; in two passes.

    On CPUs many times as fast as ``torch.var_mean``, which goes over strided channels element by element.
    """
    mean = h.mean(dim=axes, keepdim=True)
    return mean, (h - mean).square_().mean(dim=axes)


def pooled(sample_mean: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """Return the batch's mean and biased variance [C] from those of its samples, [B, C] each."""
    between, mean = torch.var_mean(sample_mean, dim=0, correction=0)
    return mean, within.mean(dim=0) + between


def widened(h: Tensor) -> Tensor:
    """Return h in a dtype that statistics can be taken in: float32 at least, whatever the autocast."""
    return h if h.dtype == torch.float64 else h.float()


def require_batch_norms(model: nn.Module, adapter: str) -> dict[str, BatchNorm]:
    """Return the BatchNorm layers that track statistics, by name.

    Raises
    ------
    ConfigError
        If there are none; `adapter` is the name in the message.
    """
    found = batch_norms(model)
    if not found:
        raise ConfigError(
            f"adapter = {adapter!r}: {type(model).__name__} has no BatchNorm layer with statistics; "
            f"choose a model with BatchNorm, or the adapter {UNNORMALISED}; where there is a GroupNorm or LayerNorm, "
            f"also `tent`, `eata`, `sar` or `roid`"
        )
    return found


def require_plain_batch_norms(model: nn.Module, adapter: str) -> dict[str, BatchNorm]:
    """Return what `require_batch_norms` does, for an adapter that puts a normalisation of its own in their place.

    Raises
    ------
    ConfigError
        Also if one of them does more than normalise.
    """
    found = require_batch_norms(model, adapter)
    if more := more_than_batch_norm(found):
        raise ConfigError(
            f"adapter = {adapter!r}: {more}; choose another adapter, or a network whose BatchNorm layers are torch's"
        )
    return found


def more_than_batch_norm(layers: Mapping[str, BatchNorm]) -> str | None:
    """Return what is lost of the first layer whose forward function is not torch's: it may have an activation in it."""
    plain = (BatchNorm.forward, nn.SyncBatchNorm.forward)
    for name, layer in layers.items():
        if type(layer).forward not in plain:
            return f"{name} is a {type(layer).__name__}, and what it does beside would be left out"
    return None


class _Normalisation(torch.autograd.Function):
    """Batch normalisation by torch's own kernels, with the gradients for the moments that these leave out."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(h, mean, variance, weight)
        ctx.eps = eps
        return F.batch_norm(h, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, mean, variance, weight = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], True, True]
        # out = weight (h - mean) r + bias with r = 1 / sqrt(variance + eps): the gradients for bias and weight are the
        # sums over g and over g (h - mean) r, of which those for the moments are multiples.
        r = (variance + ctx.eps).rsqrt()
        # The moments twice: some CUDA kernels take them as those that the forward pass has saved.
        for_h, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
            g, h, weight, mean, variance, mean, r, False, ctx.eps, needed
        )
        return for_h, -weight * r * for_bias, -weight * r.square() / 2 * for_weight, for_weight, for_bias, None


class _SampleMoments(torch.autograd.Function):
    """Mean and biased variance over the pixels, with one tensor for the backward pass instead of autograd's two."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = mean_and_variance(h, list(range(2, h.dim())))
        ctx.save_for_backward(h, mean)
        return mean.flatten(1), variance

    @staticmethod
    def backward(ctx: Any, for_mean: Tensor, for_variance: Tensor) -> Tensor:
        h, mean = ctx.saved_tensors
        slope = (2 * mean.numel() / h.numel()) * for_variance.view_as(mean)
        offset = (mean.numel() / h.numel()) * for_mean.view_as(mean) - slope * mean
        gradient: Tensor = (h * slope).add_(offset)
        return gradient
