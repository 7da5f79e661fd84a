"""Tent: entropy minimisation on affine parameters (Wang et al., ICLR 2021, arXiv 2006.10726)."""

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.norms import AffineAdapter, batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import TentOptions


class Tent(AffineAdapter):
    r"""Minimise the mean entropy of the predictions over the scales and shifts of the normalisation layers.

    .. math:: L = -\frac{1}{B} \sum_b \sum_k p_{bk} \log p_{bk}   \qquad \text{(eq. 1)}

    by one step of Adam a batch. BatchNorm normalises with batch statistics, also in `predict`. The logits are those
    before the step, of the same forward pass.

    The affine parameters travel; the optimiser's moments stay at home.

    Parameters
    ----------
    model : nn.Module
        The source model.
    options : TentOptions
        The optimiser.

    Raises
    ------
    ConfigError
        If no normalisation layer has affine parameters.
    """

    name = "tent"

    def __init__(self, model: nn.Module, options: TentOptions) -> None:
        super().__init__(model, options)
        self.optimizer = Optimizer(
            list(self.affine.values()), options.optimizer, learning_rate=options.learning_rate, momentum=0.9
        )
        self.keep(self.optimizer.state)

    @torch.enable_grad()
    def step(self, x: Tensor) -> Tensor:
        """Take one step and return the logits [B, K] before it."""
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
        self.optimizer.minimize(entropy(logits).mean())
        return logits
