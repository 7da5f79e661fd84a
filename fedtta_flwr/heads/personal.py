"""FedAvg+FT: the personal head alone, tuned by the client on the frozen global extractor."""

import torch
from torch import Tensor

from fedtta_flwr.heads.base import Predictor


class Personal(Predictor):
    """Predict by the shared extractor and the client's own head."""

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K]."""
        self.seen += len(x)
        return self.logits(self.extractor(x))[1].softmax(1)
