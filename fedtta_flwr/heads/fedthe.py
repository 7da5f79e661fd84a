"""FedTHE: test-time head ensemble (Jiang, Lin, ICLR 2023, arXiv 2205.10920)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.heads.base import Fitted, Predictor, Recipe
from fedtta_flwr.options import FedTHEOptions, Options

#: a sample's weights are left alone from where its gradient is shorter than this
FLAT = 1e-5
AT_ONCE = 1024  # samples whose averages are made at once, each of all before it


class FedTHE(Predictor):
    r"""Weigh the heads' logits so that the mixture is certain and the better known features' head counts.

    For features :math:`h` of a sample, their moving average :math:`\bar h \leftarrow \alpha h + (1 - \alpha) \bar h`
    and :math:`\psi = \beta h + (1 - \beta) \bar h`, the weights :math:`w = \mathrm{softmax}(e)` minimise

    .. math:: s\, H(w_g y_g + w_l y_l) + (1 - s) \big(w_g \lVert \psi - h_g \rVert + w_l \lVert \psi - h_l \rVert\big),
        \quad s = \cos(p_g, p_l)

    (eqs. 2-5) by Adam from equal weights, each sample by itself: all samples of a batch at once, none seeing another.

    The published code's average leaves out the first sample of every batch but the first and goes into :math:`\psi`
    again at every step, and a batch's samples stop together; here the batches do not matter. In training the global
    head's loss is the balanced softmax.

    Parameters
    ----------
    fitted : Fitted
        Mean features h_l of the client's training part, and h_g of all clients'.
    options : FedTHEOptions
        The two averages and the steps.
    """

    needs = frozenset({"feature-personal", "feature-global"})

    def __init__(self, fitted: Fitted, options: FedTHEOptions) -> None:
        super().__init__(fitted, options)
        self.options: FedTHEOptions = options
        found = fitted.statistics
        self._means = torch.stack([found["feature-global"], found["feature-personal"]])
        self._history: Tensor | None = None

    @classmethod
    def recipe(cls, options: Options) -> Recipe:
        """Return balanced softmax."""
        del options
        return Recipe(loss="balanced")

    def reset(self) -> None:
        """Forget the average of the features."""
        super().reset()
        self._history = None

    @torch.no_grad()  # not inference mode: the weights are found by gradients
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K]."""
        z = self.extractor(x)
        shared, own = self.logits(z)
        self.weights = self.ensemble(z, shared, own)
        self.seen += len(x)
        return torch.lerp(own, shared, self.weights.unsqueeze(1)).softmax(1)

    def averages(self, features: Tensor) -> Tensor:
        r"""Return the moving averages, [B, D], after each of the features [B, D]; the first begins as itself.

        Features that are not finite leave the average as it is.
        """
        return torch.cat([self._averages(part) for part in torch.split(features, AT_ONCE)])

    def _averages(self, features: Tensor) -> Tensor:
        keep, known = 1 - self.options.history, features.isfinite().all(dim=1)
        if self._history is None:
            if not known.any():
                return features
            self._history = features[known][0]
        n = known.cumsum(0) - 1
        age = n.unsqueeze(1) - n
        shares = torch.where(
            known & (age >= 0), self.options.history * keep ** age.clamp(min=0).to(features.dtype), 0.0
        )
        past = (keep ** (n + 1).to(features.dtype)).unsqueeze(1) * self._history
        averages: Tensor = shares @ features.where(known.unsqueeze(1), 0.0) + past
        self._history = averages[-1].clone()
        return averages

    @torch.no_grad()
    def ensemble(self, features: Tensor, shared: Tensor, own: Tensor) -> Tensor:
        """Return the global head's weights, [B].

        Parameters
        ----------
        features : Tensor
            [B, D], of samples in the order of the stream; their average moves on.
        shared, own : Tensor
            The global and the personal head's logits, [B, K].
        """
        if not len(features):
            return features.new_zeros(0)
        psi = torch.lerp(self.averages(features), features, self.options.present)
        distances = (psi.unsqueeze(1) - self._means).norm(dim=2)
        similarity = F.cosine_similarity(shared.softmax(1), own.softmax(1), dim=1)
        e = torch.ones(len(features), 2, dtype=features.dtype, device=features.device, requires_grad=True)
        optimizer = Optimizer([e], "adam", learning_rate=self.options.learning_rate)
        moving = torch.ones(len(e), 1, dtype=torch.bool, device=e.device)
        for _ in range(self.options.steps):
            with torch.enable_grad():
                loss = objective(e, shared, own, distances, similarity).sum()
                (gradient,) = torch.autograd.grad(loss, [e])
            moving &= gradient.norm(dim=1, keepdim=True) >= FLAT
            if not moving.any():
                break
            before = e.detach().clone()
            optimizer.apply([gradient])
            e.copy_(torch.where(moving, e, before))  # Adam's momentum would carry on without a gradient
        return e.softmax(1)[:, 0]


def objective(e: Tensor, shared: Tensor, own: Tensor, distances: Tensor, similarity: Tensor) -> Tensor:
    """Return FedTHE's loss, [B].

    Parameters
    ----------
    e : Tensor
        [B, 2], logits of the weights of the global and the personal head.
    shared, own : Tensor
        The heads' logits, [B, K].
    distances : Tensor
        [B, 2], from the sample's features to the mean features of all and of the client.
    similarity : Tensor
        [B], cosine of the heads' probabilities.
    """
    w = e.softmax(1)
    certainty = entropy(w[:, :1] * shared + w[:, 1:] * own)
    return similarity * certainty + (1 - similarity) * (w * distances).sum(1)
