"""TTT: test-time training with self-supervision (Sun et al., ICML 2020, arXiv 1909.13231), on the personal model."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.heads.base import Fitted, Predictor, Recipe
from fedtta_flwr.heads.training import turn
from fedtta_flwr.options import Options, TTTOptions


class TTT(Predictor):
    """Before each image is predicted, learn on it how images are rotated: extractor and rotation head take a step.

    A step's loss is the mean over the image as it stands and turned by one, two and three quarters, which the
    public code draws one of for each of 32 copies. An image that the rotation head knows to stand upright with the
    threshold's probability is not learned from. ``online`` steps last until `reset`; otherwise they are forgotten after
    their image. The personal head predicts, and stays as it is.

    In training a rotation loss is added to the shared part's, and its head is averaged with it.

    Parameters
    ----------
    fitted : Fitted
        Extractor, heads and the rotation head.
    options : TTTOptions
        Steps and threshold.
    """

    needs = frozenset({"rotation-head"})

    def __init__(self, fitted: Fitted, options: TTTOptions) -> None:
        super().__init__(fitted, options)
        self.options: TTTOptions = options
        self._rotation = nn.Parameter(fitted.statistics["rotation-head"].clone())
        tuned = [*self.extractor.parameters(), self._rotation]
        self._optimizer = Optimizer(tuned, "sgd", learning_rate=options.learning_rate)
        self._source = [p.detach().clone() for p in tuned]

    @classmethod
    def recipe(cls, options: Options) -> Recipe:
        """Return plain cross-entropy, with a rotation head."""
        del options
        return Recipe(rotation=True)

    @torch.no_grad()
    def reset(self) -> None:
        """Return to what training left."""
        super().reset()
        torch._foreach_copy_(self._optimizer.parameters, self._source)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K]; images are learned from in their order."""
        self.seen += len(x)
        rows = [self._one(image) for image in x.unsqueeze(1)] if len(x) else [self.extractor(x)]
        return F.linear(torch.cat(rows), self.fitted.personal_head).softmax(1)

    def _one(self, image: Tensor) -> Tensor:
        """Return the features [1, D] of one image [1, C, H, H] after its steps."""
        if not self.options.online:
            torch._foreach_copy_(self._optimizer.parameters, self._source)
        if image.isfinite().all() and not self._upright(image):
            turned, quarters = turn(image.expand(4, -1, -1, -1))
            for _ in range(self.options.steps):
                with torch.enable_grad():
                    loss = F.cross_entropy(F.linear(self.extractor(turned), self._rotation), quarters)
                self._optimizer.minimize(loss)
        z: Tensor = self.extractor(image)
        return z

    def _upright(self, image: Tensor) -> bool:
        """Return whether the rotation head is sure enough that the image stands upright."""
        if self.options.threshold == 1:
            return False  # nobody is that sure: no forward pass for it
        probabilities = F.linear(self.extractor(image), self._rotation).softmax(1)
        return bool(probabilities[0, 0] >= self.options.threshold)
