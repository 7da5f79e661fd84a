"""TTA-grad: one gradient step on the prediction entropy over all parameters (FedTSA section 4.2, FedCTTA III)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.base import Adapter, State, batch_norms, statistics
from fedtta_flwr.adaptation.norms import batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import EntropyOptions


class Entropy(Adapter):
    r"""Minimise the mean entropy of the predictions by one gradient step on every parameter.

    .. math:: L = -\frac{1}{B} \sum_b \sum_k p_{bk} \log p_{bk}, \quad \theta \leftarrow \theta - \eta \nabla L

    as in the papers (SGD, :math:`\eta` = 1e-4), or as in their published code: ``loss = "hard-pl"``,

    .. math:: L = -\frac{1}{B} \sum_b \log \max_k p_{bk},

    with ``optimizer = "adam"``, ``learning-rate = 1e-5``. The forward pass normalises with batch statistics and moves
    the running ones with the layers' own momentum (0.1); `predict` uses the running ones, as the published protocol
    does. Dropout stays off.

    All parameters and the running statistics travel. Adam's moments stay at home, and stay what they are when the
    parameters under them are replaced by a mixture, as in the published code. So do the counters of layers without a
    momentum, whose statistics are plain means over all batches: they say what the next batch weighs.

    Parameters
    ----------
    model : nn.Module
        The source model.
    options : EntropyOptions
        The loss and the optimiser.
    """

    def __init__(self, model: nn.Module, options: EntropyOptions) -> None:
        super().__init__(model, options)
        self.loss = hard_pseudo_label if options.loss == "hard-pl" else entropy
        self.optimizer = Optimizer(
            list(self.model.parameters()), options.optimizer, learning_rate=options.learning_rate
        )
        self.keep(self.optimizer.state)
        counters = {
            f"{name}.num_batches_tracked": layer.num_batches_tracked
            for name, layer in batch_norms(self.model).items()
            if layer.momentum is None and layer.num_batches_tracked is not None
        }
        self.keep(counters)

    def select(self) -> State:
        """Return all parameters and the statistics of all BatchNorm layers."""
        return dict(self.model.named_parameters()) | statistics(self.model)

    @torch.enable_grad()
    def step(self, x: Tensor) -> Tensor:
        """Take one step and return the logits [B, K] of the forward pass that it was computed from."""
        with batch_statistics(self.model, track=True):
            logits: Tensor = self.model(x)
        self.optimizer.minimize(self.loss(logits).mean())
        return logits


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats, [B], of softmax(logits) for logits [B, K]."""
    log_p = F.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def hard_pseudo_label(logits: Tensor) -> Tensor:
    """Return the cross-entropy in nats, [B], of softmax(logits) with its own most probable class."""
    return -F.log_softmax(logits, dim=-1).amax(dim=-1)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of the mean of softmax(logits) over logits [A, K]."""
    log_mean = logits.log_softmax(dim=1).logsumexp(dim=0) - math.log(len(logits))
    return -(log_mean.exp() * log_mean).sum()
