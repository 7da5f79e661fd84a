"""pFedBBN's client: balanced BN, filtered distillation and consistency (arXiv 2511.18066; TRIBE, arXiv 2309.14949)."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.augment import strong
from fedtta_flwr.adaptation.balanced_norm import BalancedStatistics, ClassBatch
from fedtta_flwr.adaptation.base import Adapter, Draws, State, classifier
from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.layers import Normalise, normalised_by, require_plain_batch_norms, widened
from fedtta_flwr.adaptation.norms import affine_parameters
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import BBNOptions


class BBN(Adapter):
    r"""Normalise with class-balanced statistics; learn from what the teacher is sure of, near to the source.

    Teacher, student and source are one network with three sets of balanced statistics (`balanced_norm`). Teacher and
    student share the affine parameters; the source has its own, which never change.

    1. The teacher predicts x with its stored statistics. These logits are returned, and their classes are the
       pseudo-labels of all statistics.
    2. In one training pass each, in which their statistics move first: the teacher and the source see x, the student a
       strongly augmented view (TRIBE; eq. 5 of pFedBBN has teacher and student the other way round).
    3. With :math:`y^T, y^S, y^0` the logits of 2 and :math:`K' = \{b: H(p^T_b) < H_0 \ln K\}`, one step of Adam on

    .. math:: L = \mathrm{mean}_{b \in K'} \mathrm{CE}(y^S_b, \arg\max y^T_b)
        + \lambda\,\mathrm{mean}_{b \in K', k} (y^T_{bk} - y^0_{bk})^2 \qquad \text{(eqs. 5-6)}

    over the BatchNorm layers' affine parameters, which the gradient reaches through student, teacher and the
    statistics' own move. If no sample is kept there is no step; the statistics have moved all the same.

    Where the paper is silent or impossible, TRIBE's choice holds: the means of eqs. 2-3 are over pixels, not divided by
    the number of channels, and a class with :math:`n_k > 1/\eta` samples moves to their own statistics, not beyond;
    K_c of eq. 6 is K; the total loss is L above; the teacher is "updated" by sharing the student's parameters. With
    ``average = "batch"`` eqs. 5 and 6 are divided by B, and eq. 6 is over all samples, so that there is always a step.
    Scores after aggregation are the run's ``post``.

    The affine parameters and the student's statistics travel: the balanced ones, which tell domains apart, and those
    of every class, without which a mixture would last for one prediction only, since the next batch makes the
    balanced ones from those of the classes. A received mixture is balanced anew. ``share-class-stats = false`` keeps
    the latter at home, at a small fraction of the bytes; ``share-teacher = false`` the teacher's, with which `predict`
    normalises. The source's statistics and the moments stay at home.

    Parameters
    ----------
    model : nn.Module
        A source model with BatchNorm; its last linear layer tells the number of classes.
    options : BBNOptions
        The hyper-parameters.

    Raises
    ------
    ConfigError
        If the model has no BatchNorm layer that tracks statistics, or none with affine parameters.
    """

    def __init__(self, model: nn.Module, options: BBNOptions) -> None:
        super().__init__(model, options)
        self.options: BBNOptions = options
        self.optimizer = Optimizer(list(self.affine.values()), "adam", learning_rate=options.learning_rate)
        self.keep(self.optimizer.state | self._at_home)
        self.draws = Draws(self, "bbn")

    def select(self) -> State:
        """Return affine parameters and statistics of all BatchNorm layers, as far as they shall travel."""
        layers = require_plain_batch_norms(self.model, "bbn")
        self.classes = classifier(self.model, "bbn")[1].out_features
        self.affine = affine_parameters(self.model, "bbn", layers)
        self._source_affine = {name: p.detach().clone() for name, p in self.affine.items()}
        # The student comes last: the others copy the layers' statistics, it owns them.
        self.teacher, self.source, self.student = (
            BalancedStatistics(layers, self.classes, self.options.class_agnostic, self.options.unbiased, role)
            for role in ("teacher", "source", "")
        )
        adapted, self._at_home = dict(self.affine) | self.student.balanced, State()
        teacher, per_class = self.options.share_teacher, self.options.share_class_stats
        for travels, tensors in (
            (per_class, self.student.per_class),
            (teacher, self.teacher.balanced),
            (teacher and per_class, self.teacher.per_class),
        ):
            (adapted if travels else self._at_home).update(tensors)
        if self.options.source == "balanced":
            self._at_home |= self.source.balanced | self.source.per_class
        return adapted

    def load_adapted_state(self, state: Mapping[str, Tensor]) -> None:
        """Install a mixture of adapted states; where those of the classes are in it, balance them anew."""
        super().load_adapted_state(state)
        if self.options.share_class_stats:
            self.student.rebalance()
            if self.options.share_teacher:
                self.teacher.rebalance()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return the teacher's logits [B, K] with its stored statistics; changes nothing."""
        return self._forward(x, self.teacher.frozen())

    def step(self, x: Tensor) -> Tensor:
        """Take one step and return the teacher's logits [B, K] before it."""
        options, first = self.options, self.predict(x)
        batch = ClassBatch.of(first.argmax(dim=1), self.classes, options.momentum, widened(first).dtype)
        view = strong(x, self.draws.next(x.device))
        for_teacher, for_student = (view, x) if options.literal_views else (x, view)
        with torch.no_grad():
            anchor = self._forward_source(x, batch)
        with torch.enable_grad():
            teacher = self._forward(for_teacher, self.teacher.updating(batch))
            certain = teacher.detach()
            kept = entropy(certain) < options.entropy_threshold * math.log(self.classes)
            if options.average == "batch" or kept.any():
                # The two terms share no activation: those of one pass are freed before the other makes its own.
                pull = self._consistency(teacher, anchor, kept)
                pulled = torch.autograd.grad(pull, self.optimizer.parameters, materialize_grads=True, allow_unused=True)
                student = self._forward(for_student, self.student.updating(batch))
                gradients = self.optimizer.gradients(self._distillation(student, certain, kept))
                self.optimizer.apply(torch._foreach_add(gradients, pulled))
                return first
        with torch.no_grad():
            self._forward(for_student, self.student.updating(batch))
        return first

    def _consistency(self, teacher: Tensor, source: Tensor, kept: Tensor) -> Tensor:
        """Return lambda times the mean distance between logits [B, K], of what is kept, [B]."""
        if self.options.consistency_on == "probabilities":
            teacher, source = teacher.softmax(dim=1), source.softmax(dim=1)
        distance = (teacher - source).square().mean(dim=1)
        return self.options.consistency * (distance if self.options.average == "batch" else distance[kept]).mean()

    def _distillation(self, student: Tensor, teacher: Tensor, kept: Tensor) -> Tensor:
        """Return the mean cross-entropy of the teacher's classes under the student, logits [B, K]; `kept` is [B]."""
        distilled = F.cross_entropy(student, teacher.argmax(dim=1), reduction="none")
        return (distilled * kept).mean() if self.options.average == "batch" else distilled[kept].mean()

    def _forward(self, x: Tensor, normalise: Normalise) -> Tensor:
        with normalised_by(self.model, normalise):
            logits: Tensor = self.model(x)
        return logits

    def _forward_source(self, x: Tensor, batch: ClassBatch) -> Tensor:
        moving = self.options.source == "balanced"
        normalise = self.source.updating(batch) if moving else self.source.frozen()
        with normalised_by(self.model, normalise):
            logits: Tensor = torch.func.functional_call(self.model, self._source_affine, (x,))
        return logits
