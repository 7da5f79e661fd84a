"""ROID: universal test-time adaptation (Marsden et al., WACV 2024, arXiv 2306.00650)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.augment import SHARP, strong
from fedtta_flwr.adaptation.base import Draws, classifier
from fedtta_flwr.adaptation.cotta import soft_cross_entropy
from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.norms import AffineAdapter, batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import ROIDOptions


class ROID(AffineAdapter):
    r"""Raise likelihood ratios of diverse and certain samples, stay near the source, correct for the class prior.

    For probabilities p of the batch, clipped at 0.99 in the first line, and the moving mean prediction
    :math:`\bar p`, with every weight rescaled to [0, 1] over the batch,

    .. math::
        L_{SLR} &= -\frac{1}{B} \sum_b w_b \sum_k p_{bk} \log \frac{p_{bk}}{1 - p_{bk}} \\
        w_b &= \exp(w^{div}_b w^{cert}_b / \tau) \text{ if } w^{div}_b \ge \mathrm{mean}_b\,w^{div} \text{ else } 0, \\
        w^{div}_b &= 1 - \cos(p_b, \bar p), \quad w^{cert}_b = -H(p_b) \\
        L_{SCE} &= \frac{1}{2B} \sum_b w_b \big(\mathrm{CE}(p_b, \tilde p_b) + \mathrm{CE}(\tilde p_b, p_b)\big) \\
        \theta &\leftarrow 0.99\,\theta + 0.01\,\theta_0

    where :math:`\tilde p` are the predictions on augmented views of the samples with a weight, and gradients reach both
    of its arguments. One step of Adam on the affine parameters of the normalisation layers; BatchNorm normalises with
    batch statistics. Finally :math:`\bar p` moves towards the batch's mean prediction by 0.1.

    *Prior correction*: logits are multiplied by the batch's class prior :math:`(\hat p + s) / (1 + s K)`, with
    :math:`\hat p` its mean prediction and :math:`s = \max(1/B, 1/K) / \max_k \hat p_k`, here relative to the largest
    class's. That changes no prediction, and leaves them as sure as they are: the prior itself, of some 1/K, would make
    all probabilities nearly alike. The logits, and those of `predict`, are the corrected ones, before the step.

    Weights that are equal for all samples, as of a batch of one, cannot be rescaled: they become 0, so that each sample
    counts once. The affine parameters travel; moments, mean prediction and count of draws stay at home.

    Parameters
    ----------
    model : nn.Module
        The source model; its last linear layer tells the number of classes.
    options : ROIDOptions
        The hyper-parameters.

    Raises
    ------
    ConfigError
        If no normalisation layer has affine parameters.
    """

    name = "roid"

    def __init__(self, model: nn.Module, options: ROIDOptions) -> None:
        super().__init__(model, options)
        self.options: ROIDOptions = options
        self.optimizer = Optimizer(list(self.affine.values()), "adam", learning_rate=options.learning_rate)
        self._source = [p.detach().clone() for p in self.affine.values()]
        classes = classifier(model, self.name)[1].out_features
        self.mean_prediction = self._source[0].new_full((classes,), 1 / classes)
        self.keep(self.optimizer.state | {"mean_prediction": self.mean_prediction})
        self.draws = Draws(self, self.name)

    def answer(self, x: Tensor) -> Tensor:
        """Return logits [B, K] that are not corrected, with the statistics of x [B, C, H, W]; changes nothing."""
        return super().predict(x)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return corrected logits [B, K] with the statistics of x [B, C, H, W]; changes nothing."""
        return self._corrected(self.answer(x))

    @torch.enable_grad()
    def step(self, x: Tensor) -> Tensor:
        """Take one step and return the corrected logits [B, K] before it."""
        generator = self.draws.next(x.device)
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
            weights = self._weights(logits)
            kept = weights > 0
            if not kept.any():  # NaN in the batch
                return logits
            losses = likelihood_ratio(logits[kept], self.options.clip)
            if self.options.consistency:
                losses = losses + symmetric(self.model(strong(x[kept], generator, SHARP)), logits[kept])
        self.optimizer.minimize((weights[kept] * losses).sum() / len(x))
        with torch.no_grad():
            torch._foreach_lerp_(self.optimizer.parameters, self._source, 1 - self.options.source_momentum)
        return self._corrected(logits.detach())

    @torch.no_grad()
    def _weights(self, logits: Tensor) -> Tensor:
        """Return the samples' weights [B]; let the mean prediction follow."""
        p = logits.softmax(dim=1)
        if not self.options.weighting:
            return torch.ones_like(p[:, 0])
        diversity = _rescaled(1 - F.cosine_similarity(self.mean_prediction[None], p, dim=1))
        certainty = _rescaled(-entropy(logits))
        self.mean_prediction.lerp_(p.mean(dim=0), 1 - self.options.prior_momentum)
        weights = (diversity * certainty / self.options.temperature).exp()
        return torch.where(diversity < diversity.mean(), 0.0, weights)

    def _corrected(self, logits: Tensor) -> Tensor:
        if not self.options.prior_correction or len(logits) == 0:
            return logits
        samples, classes = logits.shape
        prior = logits.softmax(dim=1).mean(dim=0)
        smooth = max(1 / samples, 1 / classes) / prior.max()
        return logits * ((prior + smooth) / (prior.max() + smooth))


def likelihood_ratio(logits: Tensor, clip: float = 0.99) -> Tensor:
    """Return the soft likelihood ratio loss [B] of logits [B, K], with probabilities clipped from above."""
    p = logits.softmax(dim=1).clamp(max=clip)
    return -(p * (p / (1 - p) + 1e-5).log()).sum(dim=1)


def symmetric(a: Tensor, b: Tensor) -> Tensor:
    """Return the symmetric cross-entropy [B] of two sets of logits [B, K]: half of each direction."""
    return (soft_cross_entropy(a, b) + soft_cross_entropy(b, a)) / 2


def _rescaled(values: Tensor) -> Tensor:
    """Map values [B] to [0, 1]; equal values, whose range cannot be divided by, to 0."""
    low, high = values.aminmax()
    return (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
