"""kNN-Per: personalisation through local memorisation (Marfoq et al., ICML 2022, arXiv 2111.09360)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtta_flwr.heads.base import Fitted, Predictor
from fedtta_flwr.options import KNNPerOptions


class KNNPer(Predictor):
    r"""Mix the global head's prediction with the labels of the nearest training features.

    .. math:: p = \lambda\, p_{kNN} + (1 - \lambda)\, p_g, \quad
        p_{kNN} \propto \sum_{k \in \mathrm{nearest}} e^{-\lVert z - z_k \rVert / (D s)}\, \mathbf{1}_{y_k}

    (eqs. 7-8). FedTHE's and BTFL's code exchange the two shares, mix logits with probabilities, and choose
    :math:`\lambda` for every client by its test accuracy; here it is one of the options.

    Parameters
    ----------
    fitted : Fitted
        The client's training features and labels.
    options : KNNPerOptions
        Neighbours, their share and the distances' scale.
    """

    needs = frozenset({"features", "labels"})

    def __init__(self, fitted: Fitted, options: KNNPerOptions) -> None:
        super().__init__(fitted, options)
        self.options: KNNPerOptions = options
        self._features = fitted.statistics["features"]
        classes = len(fitted.global_head)
        self._labels = F.one_hot(fitted.statistics["labels"].long(), classes).to(self._features.dtype)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K]."""
        self.seen += len(x)
        z = self.extractor(x)
        model = self.logits(z)[0].softmax(1)
        # Exact for each pair: torch's faster way for large batches loses digits, and differs with the batch size.
        distances = torch.cdist(z, self._features, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = distances.topk(min(self.options.neighbours, len(self._features)), largest=False)
        shares = (-nearest.values / (z.shape[1] * self.options.scale)).softmax(1)
        neighbours = (shares.unsqueeze(2) * self._labels[nearest.indices]).sum(1)
        return torch.lerp(model, neighbours, self.options.share)
