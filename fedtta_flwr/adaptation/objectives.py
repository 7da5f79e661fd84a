"""Local objectives: terms that a federated strategy adds to the loss of any adapter that takes gradient steps.

Pure functions of tensors first; then the terms that a strategy asks for; then `Objectives`, which adds them::

    Objectives(adapter, [FedProx(0.01)])

A term that compares the present parameters with the received ones (FedProx, FedAMP, pFedGraph) has a gradient of
exactly zero where they are equal: with one step a round it changes nothing, bit for bit. It acts from a round's second
step on (a batch of more than 64 samples may bring one with `rotta` and `note`), and at once with `sar`, whose gradient
is taken beside the parameters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedtta_flwr.adaptation.base import Adapter, classifier, inputs_of
from fedtta_flwr.adaptation.norms import batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models.base import last_linear

#: features [B, D] and logits [B, K]
Outputs = tuple[Tensor, Tensor]


def squared_distance(current: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squared differences of two lists of tensors."""
    norms = torch._foreach_norm(torch._foreach_sub(list(current), list(reference)))
    return torch.stack([norm.square() for norm in norms]).sum()


def cosine_distance(current: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """Return 1 - cos of the angle between two lists of tensors, each taken as one vector.

    Written as half the squared distance of the unit vectors, whose gradient at equal vectors is exactly zero.
    """
    a, b = (F.normalize(torch.cat([t.flatten() for t in tensors]), dim=0) for tensors in (current, reference))
    return (a - b).square().sum() / 2


def contrast(z: Tensor, attracting: Tensor, repelling: Tensor, temperature: float) -> Tensor:
    """Return MOON's contrastive loss of features [B, D], a mean over the batch.

    -log(exp(cos(z, a) / T) / (exp(cos(z, a) / T) + exp(cos(z, r) / T))).
    """
    cosines = [F.cosine_similarity(z, other, dim=-1) / temperature for other in (attracting, repelling)]
    return F.softplus(cosines[1] - cosines[0]).mean()


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(logits / T)) of logits [B, K], a mean over the batch."""
    log_p, log_q = (F.log_softmax(t / temperature, dim=-1) for t in (logits, teacher))
    return temperature**2 * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


class Present(Protocol):
    """What a term may look at."""

    parameters: list[Tensor]
    received: list[Tensor]

    def outputs(self, parameters: Sequence[Tensor]) -> Outputs:
        """Return features and logits of the present batch under given parameters."""

    @property
    def previous(self) -> list[Tensor]:
        """The client's own parameters at the end of the last round."""


@dataclass(frozen=True)
class FedProx:
    """FedProx (Li et al. 2020, arXiv 1812.06127, eq. 2): mu / 2 ||theta - received||^2."""

    mu: float = 1.0

    def __call__(self, now: Present) -> Tensor:
        """Return the term."""
        return self.mu / 2 * squared_distance(now.parameters, now.received)


@dataclass(frozen=True)
class FedAMP:
    """FedAMP (Huang et al. 2021, arXiv 2007.03797): weight / (2 alpha) ||theta - u||^2 for its cloud model u."""

    weight: float = 1.0
    alpha: float = 1.0

    def __call__(self, now: Present) -> Tensor:
        """Return the term."""
        return self.weight / (2 * self.alpha) * squared_distance(now.parameters, now.received)


@dataclass(frozen=True)
class PFedGraph:
    """pFedGraph (Ye et al. 2023, ICML): weight (1 - cos(theta, received)), the pull towards the client's cluster."""

    weight: float = 0.01

    def __call__(self, now: Present) -> Tensor:
        """Return the term."""
        return self.weight * cosine_distance(now.parameters, now.received)


@dataclass(frozen=True)
class Moon:
    """MOON (Li et al. 2021, arXiv 2103.16257): features towards the received model's, off the previous one's."""

    mu: float = 1.0
    temperature: float = 0.5

    def __call__(self, now: Present) -> Tensor:
        """Return the term."""
        received, previous = (now.outputs(p)[0].detach() for p in (now.received, now.previous))
        return self.mu * contrast(now.outputs(now.parameters)[0], received, previous, self.temperature)


@dataclass(frozen=True)
class PFedSD:
    """pFedSD (Jin et al. 2022, IEEE TPDS): distil the client's own previous model; weight T^2 KL(p_previous || p)."""

    weight: float = 1.0
    temperature: float = 1.0

    def __call__(self, now: Present) -> Tensor:
        """Return the term."""
        previous = now.outputs(now.previous)[1].detach()
        return self.weight * distillation(now.outputs(now.parameters)[1], previous, self.temperature)


Term = Callable[[Present], Tensor]
#: terms that need the client's own parameters of the last round
NEED_PREVIOUS = (Moon, PFedSD)
#: how a strategy names them
TERMS: dict[str, type[FedProx | FedAMP | PFedGraph | Moon | PFedSD]] = {
    "fedprox": FedProx,
    "fedamp": FedAMP,
    "pfedgraph": PFedGraph,
    "moon": Moon,
    "pfedsd": PFedSD,
}


def takes_gradient_steps(adapter: Adapter) -> bool:
    """Return whether an adapter has a loss that terms can be added to.

    Raises
    ------
    ConfigError
        As `optimizer_of`.
    """
    return optimizer_of(adapter) is not None


def optimizer_of(adapter: Adapter) -> Optimizer | None:
    """Return the optimiser that adds terms to its losses, an adapter's ``optimizer``; None if it takes no step.

    Raises
    ------
    ConfigError
        If the adapter has another optimiser, or under another name, whose steps would be without the terms.
    """
    found = getattr(adapter, "optimizer", None)
    if isinstance(found, Optimizer):
        return found
    for name, value in vars(adapter).items():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for other in several:
            if isinstance(other, Optimizer | torch.optim.Optimizer):
                verb, kind = "is" if other is value else "holds", f"{type(other).__module__}.{type(other).__name__}"
                raise ConfigError(
                    f"{type(adapter).__name__}.{name} {verb} a {kind}: a strategy's local terms need a "
                    f"{Optimizer.__module__}.Optimizer as self.optimizer; make it one"
                )
    return None


def terms_from(named: Mapping[str, Any]) -> list[Term]:
    """Return the terms that a strategy names with their settings: ``{"moon.mu": 1.0, "moon.temperature": 0.5}``.

    Raises
    ------
    ConfigError
        If there is no such term or setting, it is no number, or nothing is named at all, as by a method.
    """
    if not isinstance(named, Mapping):
        raise ConfigError(f'objectives is a {type(named).__name__}; allowed: a mapping, {{"fedprox.mu": 0.1}}')
    allowed = [f"{term}.{setting.name}" for term, kind in TERMS.items() for setting in fields(kind)]
    settings: dict[str, dict[str, float]] = {}
    for key, value in named.items():
        if key not in allowed:
            raise ConfigError(f"objectives: {key!r} is unknown; allowed: {', '.join(allowed)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"objectives: {key} = {value!r}; allowed: a finite number")
        term, _, setting = key.partition(".")
        settings.setdefault(term, {})[setting] = value
    return [TERMS[term](**given) for term, given in settings.items()]


def check_terms(terms: Sequence[Term], model: nn.Module) -> None:
    """Find out whether a model has the features that terms are about.

    Raises
    ------
    ConfigError
        If not.
    """
    if any(isinstance(term, Moon) for term in terms):
        classifier(model, "moon")


class Objectives:
    """Terms that the adapter's optimiser adds to every loss that it is given.

    `Adapter.load_adapted_state` begins a round: what it installs becomes ``received``, and what the client had at the
    end of its last step ``previous``. Both are local state. Terms on outputs run the model once more for each set of
    parameters, on the batch as it is and with the batch's own statistics.

    Parameters
    ----------
    adapter : Adapter
        With an `Optimizer` as its ``optimizer``; it is changed to pursue the terms. Before its first step.
    terms : sequence of Term
        What is added.

    Raises
    ------
    ConfigError
        If the adapter takes no gradient step, or not by its ``optimizer``; or the model has no features.
    """

    def __init__(self, adapter: Adapter, terms: Sequence[Term]) -> None:
        check_terms(terms, adapter.model)
        optimizer = optimizer_of(adapter)
        if optimizer is None:
            names = ", ".join(type(term).__name__ for term in terms)
            raise ConfigError(
                f"objectives {names}: {type(adapter).__name__} takes no gradient step; choose one that does"
            )
        self.terms = tuple(terms)
        self.parameters: list[Tensor] = optimizer.parameters
        self._model = adapter.model
        self._head = last_linear(adapter.model)
        self._batch: Tensor | None = None
        own = {id(p): name for name, p in adapter.model.named_parameters()}
        #: of those that are learned beside the model, too
        self._names = [own.get(id(p), f"beside.{i}") for i, p in enumerate(self.parameters)]
        self._own = set(own.values())
        needy = [type(term).__name__ for term in terms if isinstance(term, NEED_PREVIOUS)]
        if needy and not self._own.issuperset(self._names):
            raise ConfigError(
                f"objectives {', '.join(needy)}: {type(adapter).__name__} learns tensors that are none of the model's, "
                f"which the term would predict without; choose another strategy"
            )
        self.received = [p.detach().clone() for p in self.parameters]
        adapter.keep(self._named("received", self.received))
        self._previous: list[Tensor] = []
        self._last: list[Tensor] = []
        if any(isinstance(term, NEED_PREVIOUS) for term in terms):
            self._previous, self._last = ([t.clone() for t in self.received] for _ in range(2))
            adapter.keep(self._named("previous", self._previous) | self._named("last", self._last))
        adapter.objectives = self
        optimizer.added = self.loss

    @property
    def previous(self) -> list[Tensor]:
        """The client's own parameters at the end of the last round."""
        return self._previous

    def begin_round(self) -> None:
        """Take over what has just been received."""
        with torch.no_grad():
            torch._foreach_copy_(self.received, self.parameters)
            if self._last:
                torch._foreach_copy_(self._previous, self._last)

    def begin_step(self, x: Tensor) -> None:
        """Remember the batch [B, C, H, W] that the next losses are about."""
        self._batch = x

    def end_step(self) -> None:
        """Remember what the step led to."""
        self._batch = None
        if self._last:
            with torch.no_grad():
                torch._foreach_copy_(self._last, self.parameters)

    def loss(self) -> Tensor:
        """Return the sum of all terms for the present batch."""
        return torch.stack([term(self) for term in self.terms]).sum()

    def outputs(self, parameters: Sequence[Tensor]) -> Outputs:
        """Return features [B, D] and logits [B, K] of the present batch under given parameters.

        Where no linear layer makes the logits, they are taken for the features, too.
        """
        if self._batch is None:
            raise RuntimeError("outputs are asked for outside a step")
        named = {name: p for name, p in zip(self._names, parameters, strict=True) if name in self._own}
        with inputs_of(self._head and self._head[1]) as features, batch_statistics(self._model):
            logits: Tensor = functional_call(self._model, named, (self._batch,))
        return features[-1] if features else logits, logits

    def _named(self, kind: str, tensors: list[Tensor]) -> dict[str, Tensor]:
        return {f"{kind}.{name}": t for name, t in zip(self._names, tensors, strict=True)}
