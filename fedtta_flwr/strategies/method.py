"""What a method can override: who is asked for what, and what is made of the answers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter
from fedtta_flwr.config import RunConfig, Scalar
from fedtta_flwr.descriptors import form_of
from fedtta_flwr.errors import FederationError
from fedtta_flwr.strategies.robust import cap_weights, clip_changes
from fedtta_flwr.strategies.roster import Roster
from fedtta_flwr.strategies.rounds import Round
from fedtta_flwr.strategies.updates import State, Update, Updates, check_row_stochastic, mix, mix_


class Method(ABC):
    """What distinguishes a method: what clients are asked for, and the states that it makes of what they sent.

    `PersonalizedStrategy` does all else, and is what a method subclasses.

    Attributes
    ----------
    descriptor : str
        What clients are asked for beside their state: one of `fedtta_flwr.workbench.DESCRIPTORS`, or ``""``.
    descriptor_options : dict
        Sent along with the request; ``lagged`` asks for it as of before a client adapts.
    objectives : dict
        Terms that clients add to the loss of an adapter that takes gradient steps, e.g. ``{"fedprox.mu": 1.0}``
        (`fedtta_flwr.adaptation.objectives`).
    finetune : bool
        Whether clients adapt once more, to the same batch, when their mixture has come, before it is scored.
    selective : bool
        Whether W is meant to say who resembles whom, so that one that does not is worth a warning.
    one_for_all : bool
        Whether `personalize` returns one model for all, whatever W says; ``weight-cap`` is then refused.
    source : dict of Tensor
        The adapted state of the source model, from which clients begin.
    network : nn.Module
        The source model itself; only its forms count.
    roster : Roster
        Which client is on which node, and how many classes there are.
    """

    descriptor: str = ""
    descriptor_options: Mapping[str, Scalar] = MappingProxyType({})
    objectives: Mapping[str, Scalar] = MappingProxyType({})
    finetune: bool = False
    selective: bool = True
    one_for_all: bool = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.source: State = {}
        self.network: nn.Module = nn.Identity()
        self.roster = Roster()
        self._round = Round(0)

    @abstractmethod
    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N], row-stochastic: client i receives ``sum_j W_ij theta_j``."""

    def personalize(self, updates: Updates) -> State:
        """Return the clients' new states, each [N, *shape].

        If the updates are expendable, the mixture takes their memory, and ``updates.state`` is empty afterwards.

        Raises
        ------
        FederationError
            If the collaboration matrix is not row-stochastic.
        """
        before = {name: (t, t._version) for name, t in updates.state.items()}
        weights = self.collaboration_matrix(updates)
        now = {name: (t, t._version) for name, t in updates.state.items()}
        if changed := [n for n in before | now if before.get(n) is None or not _same(before[n], now.get(n))]:
            raise FederationError(
                f"round {updates.round}: {type(self).__name__}.collaboration_matrix changed {changed[0]} of "
                f"updates.state; work on a copy: it is what is mixed"
            )
        if (fault := check_row_stochastic(weights, len(updates))) is not None:
            raise FederationError(f"round {updates.round}: {type(self).__name__}'s collaboration matrix: {fault}")
        weights = weights.detach().cpu().double().clamp_min(0)
        weights /= weights.sum(dim=1, keepdim=True)  # what a row is off by would grow from round to round
        weights = cap_weights(weights, self.config.weight_cap)
        if self._round.clients in ((), updates.clients):  # not of a part, which a method of one's own mixes by itself
            self._round.weights = weights
        mixing = mix_ if updates.expendable else mix
        return mixing(weights, updates.state, moments=self.config.bn_pooling == "moments")

    def unmixed(self, updates: Updates) -> tuple[State, str]:
        """Return the clients' new states, each [N, *shape], where fewer than the quorum took part, and so in words."""
        return updates.state, "each keeps its own state"

    def bounded(self, updates: Updates) -> Updates:
        """Return the updates as they are mixed: with ``clip-updates``, changes that are far too large scaled down."""
        if not self.config.clip_updates:
            return updates
        state, clipped = clip_changes(updates.state, updates.began, self.source, self.config.clip_updates)
        self._round.clipped = tuple(c for c, too_large in zip(updates.clients, clipped, strict=True) if too_large)
        return replace(updates, state=state)

    def largest_slot(self) -> int:
        """Return how many samples a client can have in a slot; a stream of one's own has as many as it has."""
        return int(torch.iinfo(torch.int32).max) if self.config.stream else self.config.batch_size

    def memory(self) -> State:
        """Return what the method remembers from round to round, tensors by name; for checkpoints."""
        return {}

    def load_memory(self, memory: Mapping[str, Tensor]) -> None:  # noqa: B027 - most remember nothing
        """Install what `memory` returned."""

    def metrics(self) -> Mapping[str, float]:
        """Return numbers of the method's own on the round that has just been mixed, for its log and trackers."""
        return {}

    def measured(self) -> dict[str, float | None]:
        """Return what `metrics` returns; None for a number that is not finite.

        Raises
        ------
        FederationError
            If it is something else than numbers by name.
        """
        found: object = self.metrics()
        where = f"{self.where()}{type(self).__name__}.metrics returned"
        if not isinstance(found, Mapping):
            raise FederationError(f"{where} {type(found).__name__}, expected numbers by name: return a dict")
        numbers = dict[str, float | None]()
        for name, value in found.items():
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError):  # of a tensor of several numbers
                raise FederationError(
                    f"{where} {type(value).__name__} for {name!r}, expected numbers by name; make it one, e.g. by "
                    f"float()"
                ) from None
            numbers[str(name)] = number if math.isfinite(number) else None
        return numbers

    def remembered(self) -> State:
        """Return what `memory` returns.

        Raises
        ------
        FederationError
            If that cannot be written.
        """
        found: object = self.memory()
        where = f"{self.where()}{type(self).__name__}"
        if not isinstance(found, Mapping):
            raise FederationError(
                f"{where}.memory returned {type(found).__name__}, expected tensors by name: return a dict"
            )
        for name, t in found.items():
            if not isinstance(t, Tensor) or t.layout != torch.strided:
                kind = t.layout if isinstance(t, Tensor) else type(t).__name__
                raise FederationError(
                    f"{where}.memory returned {kind} for {name!r}, expected tensors by name; make it one, e.g. with "
                    f"torch.tensor or to_dense"
                )
        if found and type(self).load_memory is Method.load_memory:
            raise FederationError(
                f"{where} has a memory and no load_memory, so that a resumed run would go on without it; add "
                f"load_memory(memory), which installs what memory() returned"
            )
        return dict(found)

    def where(self) -> str:
        """Return the beginning of a line on what has gone wrong: in which round."""
        return f"round {self._round.number}: " if self._round.number else ""

    def prepare(self, adapter: Adapter) -> None:
        """Learn how every client begins, before the run; a method that needs to know more of the network overrides it.

        Parameters
        ----------
        adapter : Adapter
            One as every client has it at the start.

        Raises
        ------
        ConfigError
            If the method cannot work with this network.
        """
        self.source = {name: t.clone() for name, t in adapter.adapted_state().items()}  # whatever the adapter does then
        self.network = adapter.model

    def expected(self) -> Update:
        """Return an update of the form that every client's has in this round; its values do not count."""
        return Update(self.source, form_of(self.descriptor, self.network, self.roster.classes), 0)

    def required_descriptor(self, updates: Updates) -> Tensor:
        """Return the round's descriptors [N, *shape].

        Raises
        ------
        FederationError
            If the clients sent none, or were not asked.
        """
        if not self.descriptor:
            raise FederationError(
                f"round {updates.round}: {type(self).__name__} names no descriptor; set its class attribute "
                f"`descriptor`, e.g. to 'noise-logits' (docs/strategies.md has all)"
            )
        if updates.descriptor is None:
            raise FederationError(f"round {updates.round}: the clients sent no {self.descriptor!r} descriptor")
        return updates.descriptor


def _same(before: tuple[Tensor, int], now: tuple[Tensor, int] | None) -> bool:
    """Whether a tensor is the one that it was, and has not been changed."""
    return now is not None and now[0] is before[0] and now[1] == before[1]
