"""FedTHE+: FedTHE, then tuning of the whole network for each image (Jiang, Lin, ICLR 2023, arXiv 2205.10920)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.augment import crop_and_flip
from fedtta_flwr.adaptation.augmix import augmix
from fedtta_flwr.adaptation.entropy import marginal_entropy
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.heads.base import Fitted
from fedtta_flwr.heads.fedthe import FedTHE
from fedtta_flwr.options import FedTHEPlusOptions


class FedTHEPlus(FedTHE):
    """Find an image's weights as FedTHE does, hold them, and make the mixture certain over views of that image.

    For every image: steps of SGD on the entropy of the mean prediction over augmented views, drawn anew for each step,
    over extractor and both heads; predict; forget. So does the published code; the weights come first. The n-th images
    of all test sets of a client have the same draws.

    Parameters
    ----------
    fitted : Fitted
        As FedTHE's.
    options : FedTHEPlusOptions
        FedTHE's, and the steps'.
    """

    def __init__(self, fitted: Fitted, options: FedTHEPlusOptions) -> None:
        super().__init__(fitted, options)
        self.options: FedTHEPlusOptions = options
        self._heads = [nn.Parameter(head.clone()) for head in (fitted.global_head, fitted.personal_head)]
        tuned = [*self.extractor.parameters(), *self._heads]
        self._optimizer = Optimizer(tuned, "sgd", learning_rate=options.tune_rate)
        self._source = [p.detach().clone() for p in tuned]

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K]."""
        first = self.seen
        probabilities = super().predict(x)
        if not len(x) or self.weights is None:
            return probabilities
        try:
            pairs = zip(x.unsqueeze(1), self.weights, strict=True)
            rows = [self._one(image, weight, first + i) for i, (image, weight) in enumerate(pairs)]
        finally:
            torch._foreach_copy_(self._optimizer.parameters, self._source)
        return torch.cat(rows).softmax(1)

    def _one(self, image: Tensor, weight: Tensor, place: int) -> Tensor:
        """Return the logits [1, K] of one image [1, C, H, W], the place-th of its test set, after its steps."""
        torch._foreach_copy_(self._optimizer.parameters, self._source)
        generator = self.generator("fedthe-plus", place)
        repeated = image.nan_to_num(0.0, 1.0, 0.0).expand(self.options.views, -1, -1, -1)
        for _ in range(self.options.tune_steps):
            views = augmix(crop_and_flip(repeated, generator), generator)
            with torch.enable_grad():
                loss = marginal_entropy(self._mixture(views, weight))
            self._optimizer.minimize(loss)
        return self._mixture(image, weight)

    def _mixture(self, x: Tensor, weight: Tensor) -> Tensor:
        z = self.extractor(x)
        shared, own = (F.linear(z, head) for head in self._heads)
        return torch.lerp(own, shared, weight)
