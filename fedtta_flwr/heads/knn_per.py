"""kNN-Per: personalisation through local memorisation (Marfoq et al., ICML 2022, arXiv 2111.09360)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtta_flwr.heads.base import VALIDATION, Fitted, Predictor
from fedtta_flwr.options import KNNPerOptions

SHARES = [tenth / 10 for tenth in range(10)]  # of the neighbours, among which is chosen
AT_ONCE = 256  # images whose distances to all neighbours are in memory


class KNNPer(Predictor):
    r"""Mix the global head's prediction with the labels of the nearest training features.

    .. math:: p = \lambda\, p_{kNN} + (1 - \lambda)\, p_g, \quad
        p_{kNN} \propto \sum_{k \in \mathrm{nearest}} e^{-\lVert z - z_k \rVert / (D s)}\, \mathbf{1}_{y_k}

    (eqs. 7-8). :math:`\lambda` is, for each client, that of 0, 0.1, ..., 0.9 with which most of its validation part is
    predicted right, the smallest of equals. FedTHE's and BTFL's code exchange the two shares, mix logits with
    probabilities, and choose by the accuracy on the test set.

    Parameters
    ----------
    fitted : Fitted
        The client's training and validation features and labels.
    options : KNNPerOptions
        Neighbours, the distances' scale, and whether the share is tuned.

    Attributes
    ----------
    share : float
        :math:`\lambda`.
    """

    needs = frozenset({*VALIDATION, *VALIDATION.values()})

    def __init__(self, fitted: Fitted, options: KNNPerOptions) -> None:
        super().__init__(fitted, options)
        self.options: KNNPerOptions = options
        self._features = fitted.statistics["features"]
        classes = len(fitted.global_head)
        self._labels = F.one_hot(fitted.statistics["labels"].long(), classes).to(self._features.dtype)
        self.share = self._tuned() if options.tuned else options.share

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K]."""
        self.seen += len(x)
        return torch.lerp(*self._both(self.extractor(x)), self.share)

    @torch.no_grad()
    def _tuned(self) -> float:
        features, labels = (self.fitted.statistics[VALIDATION[own]] for own in ("features", "labels"))
        right = torch.zeros(len(SHARES), dtype=torch.int64)
        for z, y in zip(torch.split(features, AT_ONCE), torch.split(labels, AT_ONCE), strict=True):
            model, neighbours = self._both(z)
            right += torch.tensor([int((torch.lerp(model, neighbours, s).argmax(1) == y).sum()) for s in SHARES])
        return SHARES[int(right.argmax())]

    def _both(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the global head's probabilities and the neighbours', both [B, K], of features z [B, D]."""
        model = self.logits(z)[0].softmax(1)
        # Exact for each pair: torch's faster way for large batches loses digits, and differs with the batch size.
        distances = torch.cdist(z, self._features, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = distances.topk(min(self.options.neighbours, len(self._features)), largest=False)
        shares = (-nearest.values / (z.shape[1] * self.options.scale)).softmax(1)
        return model, (shares.unsqueeze(2) * self._labels[nearest.indices]).sum(1)
