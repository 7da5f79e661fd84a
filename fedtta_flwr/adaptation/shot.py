"""SHOT-IM: information maximisation under a fixed classifier (Liang et al., ICML 2020, arXiv 2002.08546)."""

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter, State, classifier
from fedtta_flwr.adaptation.entropy import entropy, marginal_entropy
from fedtta_flwr.adaptation.norms import batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import SHOTOptions


class SHOT(Adapter):
    r"""Make predictions certain one by one and diverse as a whole, by everything but the classifier.

    .. math:: L = \mathrm{mean}_b H(p_b) - \lambda\, H(\bar p), \quad \bar p = \mathrm{mean}_b\, p_b  \qquad
        \text{(eqs. 3-4)}

    with the entropy :math:`H`: that of the mean prediction is *maximised*. This is the online variant: one step of SGD
    (Nesterov momentum 0.9, weight decay 1e-3) on each batch as it comes, with batch statistics in BatchNorm, and the
    logits of a second forward pass after the step. The paper's pseudo-labels by nearest centroids need the whole
    target set before the first step and are left out; what remains is its SHOT-IM.

    All parameters but the last linear layer's travel; the momentum stays at home. Running statistics are neither used
    nor changed.

    Parameters
    ----------
    model : nn.Module
        The source model; its last linear layer is the classifier.
    options : SHOTOptions
        Optimiser and the weight of diversity.

    Raises
    ------
    ConfigError
        If there is no linear layer, or nothing but one.
    """

    def __init__(self, model: nn.Module, options: SHOTOptions) -> None:
        super().__init__(model, options)
        self.diversity_weight = options.diversity_weight
        self.optimizer = Optimizer(
            list(self.extractor.values()),
            "sgd",
            learning_rate=options.learning_rate,
            momentum=options.momentum,
            nesterov=options.momentum > 0,
            weight_decay=options.weight_decay,
        )
        self.keep(self.optimizer.state)

    def select(self) -> State:
        """Return all parameters but the classifier's."""
        fixed = {id(p) for p in classifier(self.model, "shot")[1].parameters()}
        self.extractor = {name: p for name, p in self.model.named_parameters() if id(p) not in fixed}
        return dict(self.extractor)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return logits [B, K] with the statistics of x [B, C, H, W]; changes nothing."""
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
        return logits

    @torch.enable_grad()
    def step(self, x: Tensor) -> Tensor:
        """Take one step and return the logits [B, K] after it."""
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
        self.optimizer.minimize(entropy(logits).mean() - self.diversity_weight * marginal_entropy(logits))
        return self.predict(x)
