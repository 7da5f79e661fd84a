"""MyAdapter: biases under which the predictions are certain."""

import torch
from fedtta_flwr.adaptation.base import Adapter, State
from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.norms import batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import Options
from torch import Tensor, nn


class MyAdapter(Adapter):
    r"""Minimise the mean entropy of the predictions over the biases, by one step of SGD a batch.

    .. math:: L = -\frac{1}{B} \sum_b \sum_k p_{bk} \log p_{bk}

    BatchNorm normalises with batch statistics, also in `predict`. The logits are those before the step. The biases
    travel; the optimiser's momentum stays at home.

    Parameters
    ----------
    model : nn.Module
        The source model.
    options : Options
        Empty: a method of your own has attributes, which ``adapter-options`` of the run config gives other values.

    Raises
    ------
    ConfigError
        If the model has no bias.
    """

    #: step size of SGD; ``adapter-options = "learning-rate=0.01"`` in the run config sets another
    learning_rate = 1e-3

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model, options)
        self.optimizer = Optimizer(list(self.biases.values()), "sgd", learning_rate=self.learning_rate, momentum=0.9)
        self.keep(self.optimizer.state)

    def select(self) -> State:
        """Return the biases, by name: what adaptation may change, and what therefore travels."""
        self.biases = {name: p for name, p in self.model.named_parameters() if name.endswith("bias")}
        return dict(self.biases)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return logits [B, K] for x [B, C, H, W]; changes nothing."""
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
        return logits

    @torch.enable_grad()
    def step(self, x: Tensor) -> Tensor:
        """Take one step and return the logits [B, K] before it."""
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
        self.optimizer.minimize(entropy(logits).mean())
        return logits
