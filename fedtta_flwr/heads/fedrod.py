"""FedRoD: a generic and a personalised predictor on one extractor (Chen, Chao, ICLR 2022, arXiv 2107.00778)."""

import torch
from torch import Tensor

from fedtta_flwr.heads.base import Predictor, Recipe
from fedtta_flwr.options import Options


class FedRoD(Predictor):
    """Predict by the sum of both heads' logits, the personalised predictor.

    In training (``heads = "fedrod"``) the generic head and the extractor minimise the balanced softmax loss, and the
    personal head the cross-entropy of the sum, through which nothing but itself learns (section 4).
    """

    @classmethod
    def recipe(cls, options: Options) -> Recipe:
        """Return balanced softmax, the personal head beside it."""
        del options
        return Recipe(loss="balanced", heads="fedrod")

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K]."""
        self.seen += len(x)
        shared, own = self.logits(self.extractor(x))
        return (shared + own).softmax(1)
