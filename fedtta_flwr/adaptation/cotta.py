"""CoTTA: continual test-time adaptation (Wang et al., CVPR 2022, arXiv 2203.13591)."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedtta_flwr.adaptation.augment import strong
from fedtta_flwr.adaptation.base import Adapter, Draws, State
from fedtta_flwr.adaptation.norms import batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import CoTTAOptions


class CoTTA(Adapter):
    r"""Follow a slow teacher, let it look at many views where the source is unsure, and restore weights at random.

    For student :math:`\theta`, teacher :math:`\theta'` and source :math:`\theta_0`, all with batch statistics,

    .. math::
        \tilde y &= \begin{cases} f_{\theta'}(x) & \mathrm{mean}_b \max_k p_{\theta_0}(k \mid x_b) \ge p_{th} \\
            \frac{1}{N} \sum_i f_{\theta'}(\mathrm{aug}_i(x)) & \text{otherwise} \end{cases} \\
        L &= -\frac{1}{B} \sum_b \sum_k \tilde p_{bk} \log p_{\theta}(k \mid x_b) \\
        \theta' &\leftarrow \alpha \theta' + (1 - \alpha) \theta \\
        \theta &\leftarrow M \odot \theta_0 + (1 - M) \odot \theta, \quad M \sim \mathrm{Bernoulli}(p)

    over all parameters by Adam. As in the published code, logits are averaged, not probabilities, and the threshold is
    held against the batch's mean confidence. The logits returned, and those of `predict`, are the teacher's before the
    step; `predict` never averages views.

    The student's parameters travel, and the teacher's unless told otherwise: without them, what others learned
    reaches the predictions only as slowly as the teacher follows. Moments, the count of draws and a teacher that does
    not travel stay at home. Running statistics are neither used nor changed; the source's parameters are constants.

    Parameters
    ----------
    model : nn.Module
        The source model.
    options : CoTTAOptions
        The hyper-parameters.
    """

    def __init__(self, model: nn.Module, options: CoTTAOptions) -> None:
        super().__init__(model, options)
        self.options: CoTTAOptions = options
        self._teacher = list(self.teacher.values())
        self.source = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._source = list(self.source.values())
        self.optimizer = Optimizer(list(self.model.parameters()), "adam", learning_rate=options.learning_rate)
        self.keep(self.optimizer.state)
        if not options.share_teacher:
            self.keep(self._named_teacher())
        self.draws = Draws(self, "cotta")

    def select(self) -> State:
        """Return all parameters, and those of the teacher if it travels."""
        student = dict(self.model.named_parameters())
        self.teacher = {name: p.detach().clone() for name, p in student.items()}
        return student | (self._named_teacher() if self.options.share_teacher else {})

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return the teacher's logits [B, K] for x as it is; changes nothing."""
        with batch_statistics(self.model):
            return self._forward(self.teacher, x)

    def step(self, x: Tensor) -> Tensor:
        """Take one step and return the teacher's logits [B, K] before it."""
        generator = self.draws.next(x.device)
        with batch_statistics(self.model):
            target = self._target(x, generator)
            with torch.enable_grad():
                logits = self.model(x)
        with torch.enable_grad():
            self.optimizer.minimize(soft_cross_entropy(logits, target).mean())
        with torch.no_grad():
            torch._foreach_lerp_(self._teacher, self.optimizer.parameters, 1 - self.options.teacher_momentum)
        self._restore(generator)
        return target

    @torch.no_grad()
    def _target(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return the teacher's logits [B, K], averaged over views if the source is unsure of the batch."""
        confidence = self._forward(self.source, x).softmax(dim=1).amax(dim=1).mean()
        if not confidence < self.options.confidence:
            return self._forward(self.teacher, x)
        # View by view, not at once: each has batch statistics of its own.
        total = self._forward(self.teacher, strong(x, generator))
        for _ in range(self.options.augmentations - 1):
            total = total + self._forward(self.teacher, strong(x, generator))
        return total / self.options.augmentations

    @torch.no_grad()
    def _restore(self, generator: torch.Generator) -> None:
        """Set every weight back to the source's with the probability p: one draw for all of them."""
        if not self.options.restore:
            return
        parameters = self.optimizer.parameters
        first = parameters[0]
        count = sum(p.numel() for p in parameters)
        mask = torch.rand(count, generator=generator, device=generator.device) < self.options.restore
        masks = torch.split_with_sizes(mask.to(first), [p.numel() for p in parameters])
        # A lerp by exactly 0 or 1 is exact.
        torch._foreach_lerp_(parameters, self._source, [m.view_as(p) for m, p in zip(masks, parameters, strict=True)])

    def _forward(self, parameters: State, x: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.model, parameters, (x,))
        return logits

    def _named_teacher(self) -> State:
        return {f"teacher.{name}": t for name, t in self.teacher.items()}


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy [B] of softmax(logits) with softmax(target), for logits [B, K] both."""
    return -(target.softmax(dim=1) * F.log_softmax(logits, dim=1)).sum(dim=1)
