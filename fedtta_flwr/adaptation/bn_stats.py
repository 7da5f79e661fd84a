"""TTA-bn: BatchNorm statistics replaced by those of the batch (FedTSA section 4.2, FedCTTA section III)."""

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter, State, batch_norms, statistics
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import Options


class BNStats(Adapter):
    r"""Normalise every BatchNorm layer with its input's own statistics, and keep them as the running ones.

    For layer input :math:`h` of shape (B, C, H, W), per channel,

    .. math:: m = \mathrm{mean}_{B,H,W}(h), \quad v = \mathrm{mean}_{B,H,W}((h - m)^2)

    with no momentum, the affine parameters frozen and no gradient. One forward pass does both: a hook before each
    layer writes m and v into the running statistics with which the layer then normalises.

    Parameters
    ----------
    model : nn.Module
        A source model with BatchNorm.
    options : Options
        None are used.

    Raises
    ------
    ConfigError
        If the model has no BatchNorm layer that tracks statistics.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model, options)
        if not self._adapted:
            raise ConfigError(
                f"adapter = 'bn-stats': {type(model).__name__} has no BatchNorm layer with statistics; "
                f"choose a model with BatchNorm, or the adapter `source` or `entropy`"
            )

    def select(self) -> State:
        """Return the statistics of all BatchNorm layers."""
        return statistics(self.model)

    @torch.inference_mode()
    def step(self, x: Tensor) -> Tensor:
        """Take over the batch's statistics and return the logits [B, K] computed with them."""
        hooks = [layer.register_forward_pre_hook(_take_over) for layer in batch_norms(self.model).values()]
        try:
            logits: Tensor = self.model(x)
        finally:
            for hook in hooks:
                hook.remove()
        return logits


def moments(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean [C] and biased variance [C] of h (N, C, ...), in two passes.

    On the CPU several times faster than ``torch.var_mean``, which goes over strided channels element by element.
    """
    axes = [0, *range(2, h.dim())]
    mean = h.mean(dim=axes, keepdim=True)
    return mean.flatten(), (h - mean).square_().mean(dim=axes)


def _take_over(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Write the statistics of a layer's input (N, C, ...) into its running statistics."""
    h = inputs[0]
    if h.numel() == h.shape[1]:
        return  # one value per channel has no variance: keep the statistics that are there
    mean, variance = moments(h.float())
    layer.running_mean.copy_(mean)  # type: ignore[operator]
    layer.running_var.copy_(variance)  # type: ignore[operator]
