"""EATA: efficient test-time adaptation without forgetting (Niu et al., ICML 2022, arXiv 2204.02610)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.base import classifier
from fedtta_flwr.adaptation.entropy import entropy, hard_pseudo_label
from fedtta_flwr.adaptation.norms import AffineAdapter, batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import EATAOptions


class EATA(AffineAdapter):
    r"""Tent on samples that are reliable and not redundant, weighted by their certainty, near the source parameters.

    With the entropy :math:`H` of a prediction :math:`p`, the margin :math:`E_0 = 0.4 \ln K`, the mean prediction
    :math:`\bar p` of the samples used so far and the similarity margin :math:`\epsilon`,

    .. math::
        L = \mathrm{mean}_{b \in S}\; e^{E_0 - H_b} H_b
            + \beta \sum_i \omega_i (\theta_i - \theta^0_i)^2, \quad
        S = \{b : H_b < E_0,\; |\cos(p_b, \bar p)| < \epsilon\}

    (eqs. 2-8; the weight has no gradient). Then :math:`\bar p \leftarrow 0.9 \bar p + 0.1\,\mathrm{mean}_S\, p`; the
    first batch has no :math:`\bar p` and is filtered by entropy alone. No sample left: no step.

    The published :math:`\omega`, the diagonal of the Fisher information, is taken before deployment from 2000
    unlabelled images of the *source* domain with the model's own predictions as labels (eq. 9). A client here has
    none, so the default :math:`\beta = 0` is the paper's ETA. With :math:`\beta > 0` the same estimate is taken from
    the first ``fisher-samples`` images of the client's own stream, at its present parameters: the mean over batches of
    the squared gradient of the cross-entropy with the predicted classes. It weights the parameters by their influence
    on what the client sees rather than on what the source saw; that the anchor is the source holds either way.

    The affine parameters travel; moments, mean prediction and Fisher information stay at home.

    Parameters
    ----------
    model : nn.Module
        The source model; its last linear layer tells the number of classes.
    options : EATAOptions
        Optimiser, margins and the anti-forgetting term.

    Raises
    ------
    ConfigError
        If no normalisation layer has affine parameters.
    """

    name = "eata"

    def __init__(self, model: nn.Module, options: EATAOptions) -> None:
        super().__init__(model, options)
        self.options: EATAOptions = options
        parameters = list(self.affine.values())
        self.optimizer = Optimizer(parameters, options.optimizer, learning_rate=options.learning_rate, momentum=0.9)
        head = classifier(self.model, self.name)[1]
        #: sums to 0 as long as there was none
        self.mean_prediction = head.weight.detach().new_zeros(head.out_features)
        self.keep(self.optimizer.state | {"mean_prediction": self.mean_prediction})
        if options.fisher_weight:
            self.anchor = torch.cat([p.detach().flatten() for p in parameters])
            self.fisher = torch.zeros_like(self.anchor)
            self.fisher_counts = torch.zeros(2, dtype=torch.int64)  # batches and samples that went into it
            self.keep({"fisher": self.fisher, "fisher.counts": self.fisher_counts})

    @torch.enable_grad()
    def step(self, x: Tensor) -> Tensor:
        """Take one step on the samples that pass both filters; return the logits [B, K] before it."""
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
        if self.options.fisher_weight:
            self._learn_fisher(logits)
        margin = self.options.entropy_margin * math.log(logits.shape[1])
        values, p = entropy(logits), logits.detach().softmax(dim=1)
        kept = values.detach() < margin
        begun = bool(self.mean_prediction.any())
        if begun:
            similarity = F.cosine_similarity(self.mean_prediction.unsqueeze(0), p, dim=1)
            kept &= similarity.abs() < self.options.similarity_margin
        if not kept.any():
            return logits
        values, p = values[kept], p[kept]
        loss = ((margin - values.detach()).exp() * values).mean()
        if self.options.fisher_weight:
            moved = torch.cat([q.flatten() for q in self.optimizer.parameters]) - self.anchor
            loss = loss + self.options.fisher_weight * (self.fisher * moved.square()).sum()
        self.optimizer.minimize(loss)
        share = self.options.ema if begun else 0.0
        self.mean_prediction.mul_(share).add_(p.mean(dim=0), alpha=1 - share)
        return logits

    def _learn_fisher(self, logits: Tensor) -> None:
        """Let one more batch into the mean of squared gradients, if its time is not over."""
        if self.fisher_counts[1] >= self.options.fisher_samples:
            return
        gradients = torch.autograd.grad(
            hard_pseudo_label(logits).mean(),
            self.optimizer.parameters,
            retain_graph=True,
            materialize_grads=True,
            allow_unused=True,
        )
        squares = torch.cat([g.flatten() for g in gradients]).square()
        self.fisher_counts += torch.tensor([1, len(logits)])
        self.fisher.lerp_(squares, 1 / int(self.fisher_counts[0]))
