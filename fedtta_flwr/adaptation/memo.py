"""MEMO: marginal entropy minimisation with one test point (Zhang et al., NeurIPS 2022, arXiv 2110.09506)."""

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.augment import crop_and_flip
from fedtta_flwr.adaptation.augmix import augmix
from fedtta_flwr.adaptation.base import Adapter, Draws, State
from fedtta_flwr.adaptation.entropy import marginal_entropy
from fedtta_flwr.options import MEMOOptions


class MEMO(Adapter):
    r"""For every image by itself: one step that makes its views' mean prediction certain, predict, forget the step.

    With views :math:`\tilde x_1 \dots \tilde x_A` of an image (crop and flip, then AugMix),

    .. math::
        \bar p = \frac{1}{A} \sum_a p_\theta(\cdot \mid \tilde x_a), \quad
        \theta' = \theta - \eta \nabla H(\bar p)   \qquad \text{(eqs. 2-3)}

    over all parameters by SGD; the logits of the image are those of :math:`\theta'`. BatchNorm normalises with the
    running statistics, as the paper's CIFAR-10 experiments do; AugMix is this package's, on whole batches.

    Episodic: nothing is left after an image, so nothing travels and `predict` is the source model's. What MEMO
    predicts is the score ``tta``. Only the count of draws stays at home.

    Parameters
    ----------
    model : nn.Module
        The source model.
    options : MEMOOptions
        Step size, steps and views.
    """

    def __init__(self, model: nn.Module, options: MEMOOptions) -> None:
        super().__init__(model, options)
        self.options: MEMOOptions = options
        self.parameters = [p.requires_grad_(True) for p in self.model.parameters()]
        self.source = [p.detach().clone() for p in self.parameters]
        self.draws = Draws(self, "memo")

    def select(self) -> State:
        """Return nothing: no change outlives an image."""
        return {}

    def step(self, x: Tensor) -> Tensor:
        """Return the logits [B, K], each row of a model that adapted to its image alone."""
        generator = self.draws.next()
        try:
            return torch.cat([self._one(image.unsqueeze(0), generator) for image in x])
        finally:
            self._restore()

    def views(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Return views [A, C, H, W] of one image [1, C, H, W]."""
        repeated = image.expand(self.options.views, -1, -1, -1)
        return augmix(crop_and_flip(repeated, generator), generator)

    def _one(self, image: Tensor, generator: torch.Generator) -> Tensor:
        self._restore()
        views = self.views(image.nan_to_num(0.0, 1.0, 0.0), generator)  # bad pixels show in the logits, not here
        for _ in range(self.options.steps):
            with torch.enable_grad():
                loss = marginal_entropy(self.model(views))
                gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True, allow_unused=True)
            with torch.no_grad():
                torch._foreach_add_(self.parameters, gradients, alpha=-self.options.learning_rate)
        return self.predict(image)

    @torch.no_grad()
    def _restore(self) -> None:
        torch._foreach_copy_(self.parameters, self.source)
