"""LAME: Laplacian adjusted maximum-likelihood estimation (Boudiaf et al., CVPR 2022, arXiv 2201.05718)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.base import Adapter, State, classifier, inputs_of
from fedtta_flwr.adaptation.layers import widened
from fedtta_flwr.options import LAMEOptions


class LAME(Adapter):
    r"""Smooth the predictions over the batch: neighbours in feature space shall be of one class.

    For predictions :math:`q_b` of the source model and affinities :math:`w`, the assignments :math:`z_b` minimise

    .. math:: \sum_b \mathrm{KL}(z_b \,\|\, q_b) - \frac{\lambda}{2} \sum_{b, c} w_{bc}\, z_b^\top z_c

    on the simplex. The second term is replaced by its tangent at the present :math:`z`, a bound where :math:`w` is
    positive semi-definite, whose minimum is

    .. math:: z_b \propto q_b \exp\Big(\lambda \sum_c w_{bc}\, z_c\Big)

    (eq. 5), repeated from :math:`z = q` until the objective no longer changes. The features are those that enter the
    classifier, of unit length; the affinities are 0/1 to the k nearest others (``knn``, made symmetric by the mean of
    both directions), :math:`\exp(-d^2 / 2\sigma^2)` with :math:`\sigma` relative to the mean distance to the k-th
    nearest other (``rbf``), or inner products (``linear``).

    The network stays as it is: nothing travels, nothing is kept. `predict` smooths as well; its logits are
    :math:`\ln z`.

    Parameters
    ----------
    model : nn.Module
        The source model; its last linear layer is the classifier.
    options : LAMEOptions
        Affinity and iteration.

    Raises
    ------
    ConfigError
        If there is no linear layer.
    """

    def __init__(self, model: nn.Module, options: LAMEOptions) -> None:
        super().__init__(model, options)
        self.options: LAMEOptions = options
        self.head = classifier(self.model, "lame")[1]

    def select(self) -> State:
        """Return nothing: no tensor changes."""
        return {}

    def step(self, x: Tensor) -> Tensor:
        """Return what `predict` returns."""
        return self.predict(x)

    def answer(self, x: Tensor) -> Tensor:
        """Return logits [B, K] that are not smoothed."""
        return super().predict(x)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return the logarithm [B, K] of the smoothed predictions of x [B, C, H, W]; changes nothing."""
        with inputs_of(self.head) as seen:
            log_q = F.log_softmax(self.model(x), dim=1)
        if len(x) < 2 or not self.options.bound_weight:
            return log_q
        features = F.normalize(widened(seen[-1]).flatten(1), dim=1)
        return self._smooth(log_q, self.options.bound_weight * self._affinity(features))

    def _affinity(self, features: Tensor) -> Tensor:
        """Return the affinities [B, B] of features [B, D]; none of a sample with itself but in ``linear``."""
        if self.options.affinity == "linear":
            return features @ features.T
        distances = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        distances.fill_diagonal_(torch.inf)
        nearest = distances.topk(min(self.options.neighbours, len(features) - 1), largest=False)
        if self.options.affinity == "rbf":
            sigma = self.options.sigma * nearest.values[:, -1].mean()
            # Identical features have no distance to be relative to: each is as near as can be.
            return (-distances.square() / (2 * sigma.square()).clamp(min=torch.finfo(sigma.dtype).tiny)).exp()
        directed = torch.zeros_like(distances).scatter_(1, nearest.indices, 1.0)
        return (directed + directed.T) / 2

    def _smooth(self, log_q: Tensor, w: Tensor) -> Tensor:
        """Iterate to the fixed point from predictions log_q [B, K] with weighted affinities w [B, B]."""
        log_z, z = log_q, log_q.exp()
        pull = w @ z
        before = -(z * pull).sum() / 2
        for _ in range(self.options.max_steps):
            log_z = F.log_softmax(log_q + pull, dim=1)
            z = log_z.exp()
            pull = w @ z
            objective = (z * (log_z - log_q)).sum() - (z * pull).sum() / 2
            if not (objective - before).abs() > self.options.tolerance * before.abs():
                break
            before = objective
        return log_z
