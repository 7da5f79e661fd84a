"""FedAvg: the global head alone (McMahan et al., AISTATS 2017)."""

import torch
from torch import Tensor

from fedtta_flwr.heads.base import Predictor


class Global(Predictor):
    """Predict by the extractor and the head that all clients share."""

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K]."""
        self.seen += len(x)
        return self.logits(self.extractor(x))[0].softmax(1)
