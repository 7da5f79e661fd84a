"""RoTTA: robust test-time adaptation in dynamic scenarios (Yuan et al., CVPR 2023, arXiv 2303.13899)."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtta_flwr.adaptation.augment import strong
from fedtta_flwr.adaptation.base import Adapter, Draws, State, classifier, reshape_in_place, statistics
from fedtta_flwr.adaptation.cotta import soft_cross_entropy
from fedtta_flwr.adaptation.cstu import CSTU
from fedtta_flwr.adaptation.layers import (
    BatchNorm,
    Normalise,
    normalise_with,
    normalised_by,
    pooled,
    require_plain_batch_norms,
    sample_moments,
)
from fedtta_flwr.adaptation.norms import affine_parameters
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import RoTTAOptions


class RoTTA(Adapter):
    r"""Learn from a memory that is balanced, timely and certain, under statistics that move slowly.

    *Robust batch normalisation*: in training passes, for the batch's moments m, v (biased) of a layer's input,

    .. math:: \mu \leftarrow (1 - \alpha) \mu + \alpha m, \quad \sigma^2 \leftarrow (1 - \alpha) \sigma^2 + \alpha v

    and the layer normalises with :math:`\mu, \sigma^2`; gradients go through m and v. Student and teacher have their
    own. Only training passes, whose images come from the memory, change them.

    Every sample is predicted by the teacher, which normalises with its stored statistics; predicted class and entropy
    decide whether it enters the memory (`CSTU`). After every 64 samples, one step of Adam on the affine parameters
    of the BatchNorm layers, for the M images in memory with ages A relative to its capacity,

    .. math::
        L &= \frac{1}{M} \sum_i \frac{e^{-A_i}}{1 + e^{-A_i}}\,
            \mathrm{CE}\big(p_{\theta'}(x_i), p_\theta(\mathrm{aug}(x_i))\big) \\
        \theta' &\leftarrow (1 - \nu) \theta' + \nu \theta

    A batch is predicted at once, as the published code does, then goes into the memory in parts that end where a step
    falls due. The logits are the teacher's before these steps.

    The student's affine parameters and statistics travel, and the teacher's unless told otherwise: without them, what
    others learned reaches the predictions only as slowly as the teacher follows. Memory, moments and counts stay
    at home. An image of another size than those in the memory empties it.

    Parameters
    ----------
    model : nn.Module
        A source model with BatchNorm; its last linear layer tells the number of classes.
    options : RoTTAOptions
        The hyper-parameters.

    Raises
    ------
    ConfigError
        If the model has no BatchNorm layer that tracks statistics, or none with affine parameters.
    """

    def __init__(self, model: nn.Module, options: RoTTAOptions) -> None:
        super().__init__(model, options)
        self.options: RoTTAOptions = options
        self.optimizer = Optimizer(list(self.affine.values()), "adam", learning_rate=options.learning_rate)
        self._followers = [self.teacher[name] for name in self.affine]
        classes = classifier(model, "rotta")[1].out_features
        self.memory = CSTU(options.capacity, classes, options.age_weight, options.uncertainty_weight)
        #: samples since the last step
        self.waiting = torch.zeros(1, dtype=torch.int64)
        self.images = self._followers[0].new_zeros((options.capacity, 0))
        self.keep(self.optimizer.state | self.memory.state() | {"memory.waiting": self.waiting})
        self.keep({"memory.images": self.images}, growing=True)
        if not options.share_teacher:
            self.keep(self._named_teacher())
        self.draws = Draws(self, "rotta")

    def select(self) -> State:
        """Return affine parameters and statistics of all BatchNorm layers, and the teacher's if it travels."""
        layers = require_plain_batch_norms(self.model, "rotta")
        self.affine = affine_parameters(self.model, "rotta", layers)
        self._statistics = statistics(self.model)
        student = dict(self.affine) | self._statistics
        self.teacher = {name: t.detach().clone() for name, t in student.items()}
        return student | (self._named_teacher() if self.options.share_teacher else {})

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return the teacher's logits [B, K]; changes nothing."""
        return self._teach(x)

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """Predict, remember and, whenever it is due, learn; return the teacher's logits [B, K] before that."""
        logits = self._teach(x)
        p = logits.softmax(dim=1)
        labels, uncertainties = p.argmax(dim=1).cpu(), -(p * (p + 1e-6).log()).sum(dim=1).cpu()
        if self.images.shape[1:] != x.shape[1:]:
            reshape_in_place(self.images, (len(self.images), *x.shape[1:]))
            self.memory.clear()
        begin = 0
        while begin < len(x):
            end = min(len(x), begin + self.options.update_every - int(self.waiting))
            places = self.memory.insert(labels[begin:end], uncertainties[begin:end])
            if places:
                self.images[list(places)] = x[begin:end][list(places.values())].to(self.images)
            self.waiting += end - begin
            if self.waiting == self.options.update_every:
                self.waiting.zero_()
                self._learn()
            begin = end
        return logits

    def _learn(self) -> None:
        """Take one step on the memory; the teacher follows."""
        places = self.memory.occupied()
        images = self.images[places.to(self.images.device)]
        weights = (-self.memory.ages[places] / len(self.images)).sigmoid().to(images)
        with normalised_by(self.model, self._robust(self.teacher)):
            target = self._teach(images)
        view = strong(images, self.draws.next(images.device))
        with torch.enable_grad():
            with normalised_by(self.model, self._robust(self._statistics)):
                logits = self.model(view)
            self.optimizer.minimize((soft_cross_entropy(logits, target) * weights).mean())
        torch._foreach_lerp_(self._followers, self.optimizer.parameters, self.options.nu)

    def _robust(self, state: State) -> Normalise:
        """Return what takes the layers' place: statistics in `state` move towards the batch's, then normalise."""

        def normalise(name: str, layer: BatchNorm, h: Tensor) -> Tensor:
            of = f"{name}." if name else ""
            means, variances = state[f"{of}running_mean"], state[f"{of}running_var"]
            mean, var = pooled(*sample_moments(h))
            mean, var = means.lerp(mean, self.options.alpha), variances.lerp(var, self.options.alpha)
            means.copy_(mean.detach())
            variances.copy_(var.detach())
            return normalise_with(h, mean, var, layer)

        return normalise

    def _teach(self, x: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.model, self.teacher, (x,))
        return logits

    def _named_teacher(self) -> State:
        return {f"teacher.{name}": t for name, t in self.teacher.items()}
