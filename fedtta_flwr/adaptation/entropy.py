"""TTA-grad: one gradient step on the prediction entropy over all parameters (FedTSA section 4.2, FedCTTA III)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.base import Adapter, State, batch_norms, statistics
from fedtta_flwr.options import EntropyOptions


class Entropy(Adapter):
    r"""Minimise the mean entropy of the predictions by one SGD step on every parameter.

    .. math:: L = -\frac{1}{B} \sum_b \sum_k p_{bk} \log p_{bk}, \quad \theta \leftarrow \theta - \eta \nabla L

    The forward pass normalises with batch statistics and moves the running ones with the layers' own momentum (0.1);
    `predict` uses the running ones, as the published protocol does. Dropout stays off.

    Parameters
    ----------
    model : nn.Module
        The source model.
    options : EntropyOptions
        The step size.
    """

    def __init__(self, model: nn.Module, options: EntropyOptions) -> None:
        super().__init__(model, options)
        self.model.requires_grad_(True)
        self.learning_rate = options.learning_rate
        self._parameters: list[Tensor] = list(self.model.parameters())

    def select(self) -> State:
        """Return all parameters and the statistics of all BatchNorm layers."""
        return dict(self.model.named_parameters()) | statistics(self.model)

    @torch.enable_grad()
    def step(self, x: Tensor) -> Tensor:
        """Take one step and return the logits [B, K] of the forward pass that it was computed from."""
        norms = list(batch_norms(self.model).values())
        hooks = [norm.register_forward_pre_hook(_train_if_possible) for norm in norms]
        try:
            logits: Tensor = self.model(x)
        finally:
            for hook in hooks:
                hook.remove()
            for norm in norms:
                norm.eval()
        loss = entropy(logits).mean()
        # A parameter that this network does not use gets a gradient of zero.
        gradients = torch.autograd.grad(loss, self._parameters, materialize_grads=True, allow_unused=True)
        with torch.no_grad():
            torch._foreach_add_(self._parameters, gradients, alpha=-self.learning_rate)
        return logits


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats, [B], of softmax(logits) for logits [B, K]."""
    log_p = F.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def _train_if_possible(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Let a layer use batch statistics where there are any: one value per channel has no variance."""
    norm.training = inputs[0].numel() > inputs[0].shape[1]
