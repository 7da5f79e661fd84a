"""TTA-bn: BatchNorm statistics replaced by those of the batch (FedTSA section 4.2, FedCTTA section III).

With a momentum: FedCTTA's eqs. 3-4. With a share of the source's: alpha-BN (You et al. 2021, arXiv 2110.04065), NORM
(Schneider et al. 2020, 2006.16971).
"""

from functools import partial

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter, State, batch_norms, statistics
from fedtta_flwr.adaptation.layers import mean_and_variance, require_batch_norms, widened
from fedtta_flwr.options import BNStatsOptions, Options


class BNStats(Adapter):
    r"""Normalise every BatchNorm layer with its input's own statistics, and keep them as the running ones.

    For layer input :math:`h` of shape (B, C, H, W), per channel,

    .. math:: m = \mathrm{mean}_{B,H,W}(h), \quad v = \mathrm{mean}_{B,H,W}((h - m)^2)

    with the affine parameters frozen and no gradient. One forward pass does both: a hook before each layer writes m and
    v into the running statistics with which the layer then normalises.

    With a ``momentum`` :math:`\alpha` below 1 it moves them there by that share instead (FedCTTA, eqs. 3-4),

    .. math:: \mu \leftarrow (1 - \alpha)\,\mu + \alpha\, m, \quad
        \sigma^2 \leftarrow (1 - \alpha)\,\sigma^2 + \alpha\, v

    from where they are: as received, or as the batch before left them. The paper does not give alpha; its slides and
    its code replace, as the default does.

    With a source share :math:`\alpha` above 0 it writes

    .. math:: \alpha\, m^{source} + (1 - \alpha)\, m, \quad \alpha\, v^{source} + (1 - \alpha)\, v

    instead, where alpha is ``source-share`` (alpha-BN), or N / (N + B) for ``prior`` = N and a batch of B (NORM). The
    source's are those of the model as it was built, whatever came from the server since.

    The running statistics travel; nothing stays at home.

    Parameters
    ----------
    model : nn.Module
        A source model with BatchNorm.
    options : BNStatsOptions
        Momentum, or the share of the source; `NoOptions` is as good as the defaults.

    Raises
    ------
    ConfigError
        If the model has no BatchNorm layer that tracks statistics.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model, options)
        layers = require_batch_norms(self.model, "bn-stats")
        self.shares = options if isinstance(options, BNStatsOptions) else BNStatsOptions()
        mixes = self.shares.source_share or self.shares.prior
        #: mean and variance by layer; none if they are not needed
        self._source = {
            name: (layer.running_mean.clone(), layer.running_var.clone())  # type: ignore[union-attr]
            for name, layer in (layers if mixes else {}).items()
        }

    def select(self) -> State:
        """Return the statistics of all BatchNorm layers."""
        return statistics(self.model)

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """Take over the batch's statistics and return the logits [B, K] computed with them."""
        options = self.shares
        # At most one of the three is above 0.
        share = options.source_share or options.prior / (options.prior + len(x)) or 1 - options.momentum
        hooks = [
            layer.register_forward_pre_hook(partial(_take_over, share=share, source=self._source.get(name)))
            for name, layer in batch_norms(self.model).items()
        ]
        try:
            logits: Tensor = self.model(x)
        finally:
            for hook in hooks:
                hook.remove()
        return logits


def moments(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean [C] and biased variance [C] of h (N, C, ...)."""
    mean, variance = mean_and_variance(h, [0, *range(2, h.dim())])
    return mean.flatten(), variance


def _take_over(
    layer: nn.Module, inputs: tuple[Tensor, ...], share: float, source: tuple[Tensor, Tensor] | None
) -> None:
    """Write the statistics of a layer's input (N, C, ...) into its running ones; a share is the source's, or theirs."""
    h = widened(inputs[0])
    if h.numel() == h.shape[1]:
        return  # one value per channel has no variance: keep the statistics that are there
    running: tuple[Tensor, Tensor] = (layer.running_mean, layer.running_var)  # type: ignore[assignment]
    for there, new, other in zip(running, moments(h), source or running, strict=True):
        there.copy_(torch.lerp(new, other.to(new), share) if share else new)
