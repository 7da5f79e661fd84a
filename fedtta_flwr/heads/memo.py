"""MEMO on the personal model (Zhang et al., NeurIPS 2022), as BTFL and FedTHE compare with it."""

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation import memo
from fedtta_flwr.heads.base import Fitted, Predictor
from fedtta_flwr.options import MEMOOptions


class MEMO(Predictor):
    """Predict every image by an extractor and a personal head that took their steps for it alone.

    The adapter of the same name does the work (`fedtta_flwr.adaptation.memo`), one image at a time. The comparisons'
    own values: ``memo.learning-rate = 5e-4``, ``memo.steps = 3`` (BTFL's code 2), ``memo.views = 32``.

    Parameters
    ----------
    fitted : Fitted
        Extractor and heads.
    options : MEMOOptions
        Step size, steps and views.
    """

    def __init__(self, fitted: Fitted, options: MEMOOptions) -> None:
        super().__init__(fitted, options)
        classes, width = fitted.personal_head.shape
        head = nn.Linear(width, classes, bias=False).to(fitted.personal_head)
        with torch.no_grad():
            head.weight.copy_(fitted.personal_head)
        self._adapter = memo.MEMO(nn.Sequential(self.extractor, head), options)

    def reset(self) -> None:
        """Draw views as at the first image."""
        super().reset()
        self._adapter.load_local_state({})

    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K]."""
        self._adapter.identity = self.identity
        self.seen += len(x)
        if not len(x):
            return self._adapter.predict(x)
        return torch.cat([self._adapter.adapt(image) for image in x.unsqueeze(1)]).softmax(1)
