"""What the strategies have in common: whose memory holds the personal states."""

import random
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import FederationError
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.models import build
from fedtta_flwr.models.checkpoints import save
from fedtta_flwr.server import federation
from fedtta_flwr.strategies.fedavg import FedAvg
from fedtta_flwr.strategies.updates import BLOCK, State, Updates
from tests.conftest import TINY

Config = Callable[..., RunConfig]


def stacked(clients: int, value: float) -> State:
    return {"w": torch.full((clients, 5), value), "s": torch.full((clients,), value)}


def held(state: State) -> int:
    """Bytes that a client's state keeps in memory."""
    return sum(t.untyped_storage().nbytes() for t in state.values())


def test_who_is_absent_does_not_hold_the_states_of_a_whole_round(tiny_config: Config) -> None:
    strategy = FedAvg(tiny_config())
    strategy._keep(("a", "b", "c", "d"), stacked(4, 1.0))
    assert held(strategy.personal["c"]) == 4 * 24  # views of what the others hold, too
    strategy._keep(("a", "b"), stacked(2, 2.0))
    own = strategy.personal["c"]
    assert held(own) == held(strategy.personal["d"]) == 24
    strategy._keep(("a", "d"), stacked(2, 3.0))
    assert all(t is strategy.personal["c"][name] for name, t in own.items())  # copied once
    found = {client: (state["w"].tolist(), state["s"].item()) for client, state in strategy.personal.items()}
    assert found == {client: ([v] * 5, v) for client, v in {"a": 3.0, "b": 2.0, "c": 1.0, "d": 3.0}.items()}


def test_nothing_that_travels_is_nothing_to_hold(tiny_config: Config) -> None:
    strategy = FedAvg(tiny_config())
    strategy._keep(("a", "b"), {})
    strategy._keep(("b",), {})
    assert strategy.personal == {"a": {}, "b": {}}


@pytest.mark.parametrize(("name", "expendable"), [("fedavg", True), ("fedprox", True), ("fedavgm", False)])
def test_states_are_mixed_in_place_where_nobody_looks_at_them_again(
    name: str, expendable: bool, run_local: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Updates] = []
    plain = FedAvg.collaboration_matrix
    monkeypatch.setattr(
        FedAvg, "collaboration_matrix", lambda self, updates: seen.append(updates) or plain(self, updates)
    )
    run_local(strategy=name, rounds=1, scores="")
    (updates,) = seen
    assert updates.expendable == expendable
    assert (updates.state == {}) == expendable


class Inexact(FedAvg):
    """One whose rows are off by as much as is let pass."""

    def collaboration_matrix(self, updates: Updates) -> torch.Tensor:
        return 1.00009 * super().collaboration_matrix(updates)


def test_what_a_row_is_off_by_does_not_grow(run_local: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", Inexact.__module__.partition(".")[0])
    run = run_local(strategy=f"{Inexact.__module__}:Inexact", rounds=1)
    with np.load(run.path / "collaboration.npz") as file:
        np.testing.assert_allclose(file["weights"].sum(axis=2), 1, rtol=0, atol=1e-6)


class Hasty(FedAvg):
    """One that changes what is about to be mixed."""

    def collaboration_matrix(self, updates: Updates) -> torch.Tensor:
        updates.state["w"].sub_(updates.state["w"].mean(dim=0))
        return super().collaboration_matrix(updates)


def test_a_matrix_is_made_without_a_change_of_what_is_mixed(tiny_config: Config) -> None:
    updates = Updates(1, ("a", "b"), stacked(2, 1.0), None, torch.ones(2))
    with pytest.raises(FederationError, match=r"changed w of updates\.state; work on a copy"):
        Hasty(tiny_config()).personalize(updates)


class Gossip(FedAvg):
    """One that draws from all global generators, as methods do that were written elsewhere."""

    drawn: ClassVar[list[list[float]]] = []

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.drawn.append([float(torch.rand(()))])

    def collaboration_matrix(self, updates: Updates) -> torch.Tensor:
        self.drawn[-1] += [random.random(), float(np.random.random()), float(torch.rand(()))]
        return torch.eye(len(updates))[torch.randperm(len(updates))]


def test_a_run_of_a_method_that_draws_comes_out_the_same_again(
    run_local: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", Gossip.__module__.partition(".")[0])
    for seed in (0, 0, 1):
        run_local(strategy=f"{Gossip.__module__}:Gossip", rounds=2, scores="", seed=seed)
        torch.rand(seed + 1)
    first, again, other = Gossip.drawn
    assert len(set(first)) == 7  # each round draws anew
    assert first == again
    assert not set(first) & set(other)


def test_the_replies_are_gone_when_states_are_mixed(
    apps: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[weakref.ref[Message]] = []
    alive: list[int] = []
    plain = FedAvg.collaboration_matrix

    def counting(self: FedAvg, updates: Updates) -> torch.Tensor:
        alive.append(sum(message() is not None for message in sent))
        return plain(self, updates)

    class Watched(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            sent.extend(map(weakref.ref, messages))
            return super().push_messages(messages)

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            sent.extend(map(weakref.ref, replies))
            return replies

    monkeypatch.setattr(FedAvg, "collaboration_matrix", counting)
    flat = TINY | {"strategy": "fedavg", "output-dir": str(tmp_path / "run")}
    with federation(flat) as strategy:
        strategy.start(Watched(apps[1], RunConfig.from_flat(flat).to_flat(), 2))
    assert len(alive) == 4
    assert max(alive) == 0 < len(sent)


class Keeper(FedAvg):
    """A strategy of one's own that remembers what was uploaded, for the next round."""

    uploaded: ClassVar[list[tuple[State, State]]] = []  # as it was given, and copies

    def collaboration_matrix(self, updates: Updates) -> torch.Tensor:
        self.uploaded.append((dict(updates.state), {name: t.clone() for name, t in updates.state.items()}))
        return super().collaboration_matrix(updates)


def test_what_a_strategy_of_ones_own_keeps_is_no_mixture_in_large_layers_either(
    run_local: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", Keeper.__module__.partition(".")[0])
    name, source = "resnet8-fedtsa", tmp_path / "source.safetensors"
    save(build(name, 10), source, {"architecture": name, "classes": "10"})
    strategy = f"{Keeper.__module__}:Keeper"
    run_local(strategy=strategy, adapter="entropy", model=name, checkpoint=str(source), scores="", rounds=1)
    ((kept, copies),) = Keeper.uploaded
    assert max(t[0].numel() for t in kept.values()) > BLOCK
    assert all(torch.equal(t, copies[name]) for name, t in kept.items())
