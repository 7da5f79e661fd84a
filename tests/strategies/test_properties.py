"""What holds for every strategy by name, with adapters of every kind. A new name in the registry is tested at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtta_flwr.adaptation.base import Adapter, statistics
from fedtta_flwr.config import RunConfig
from fedtta_flwr.registry import STRATEGIES
from fedtta_flwr.server import make_strategy
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.rounds import Round
from fedtta_flwr.strategies.updates import State, Update, Updates, check_row_stochastic, is_variance, stack_updates
from fedtta_flwr.workbench import make_adapter
from tests.adaptation.conftest import Tiny

#: what travels: nothing, statistics, parameters, both
KINDS = ("source", "bn-stats", "tent", "entropy")
#: options that only save time
QUICK: dict[str, Any] = {"fedtsa.steps": 3}
#: where a method draws for a client by its place in the order, what it does without these draws is compared
WITHOUT_DRAWS: dict[str, dict[str, Any]] = {"fedtsa": {"fedtsa.variant": "ts-sim"}}
#: who takes part in rounds 1, 2, ...
PRESENT = ("abcdef", "abdf", "bcdefg", "abcdefg")

Result = tuple[Tensor | None, State]


class Federation:
    """A strategy and what its clients have received; their updates are drawn."""

    def __init__(self, config: RunConfig, dtype: torch.dtype = torch.float32) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            adapter: Adapter = make_adapter(config, Tiny().to(dtype))
        self.strategy: PersonalizedStrategy = make_strategy(config)
        self.strategy.prepare(adapter)
        self.width = sum(t.numel() for t in statistics(adapter.model).values())  # of a descriptor
        self.personal: dict[str, State] = {}

    def reply(self, seed: int, scale: float = 1.0) -> Update:
        """Return what one client uploads; without scale, the source model."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(like: Tensor) -> Tensor:
            return scale * torch.randn(like.shape, generator=generator, dtype=torch.float64)

        state = {name: (t + drawn(t)).to(t.dtype) for name, t in self.strategy.source.items()}
        state |= {name: t.abs() for name, t in state.items() if is_variance(name)}
        descriptor = drawn(torch.empty(self.width)).float() if self.strategy.descriptor else None
        return Update(state, descriptor, 5 + seed % 3)

    def updates(self, round_: int, replies: dict[str, Update]) -> Updates:
        return stack_updates(round_, replies, (), self.personal, self.strategy.source)

    def aggregate(self, updates: Updates) -> Result:
        """Return W, if there is one, and the personal states, which the clients receive."""
        self.strategy._round = Round(updates.round)
        states = self.strategy.personalize(updates)
        for i, client in enumerate(updates.clients):
            self.personal[client] = {name: t[i].clone() for name, t in states.items()}
        return self.strategy._round.weights, states

    def go(self, rounds: Sequence[int], name_of: Callable[[str], str] = str) -> list[Result]:
        """Go through rounds of `PRESENT`, with clients under other names."""
        results = []
        for round_ in rounds:
            who = PRESENT[round_ - 1]
            results.append(self.aggregate(self.updates(round_, {name_of(c): self.reply(ord(c) + round_) for c in who})))
        return results


every = pytest.mark.parametrize("name", STRATEGIES)
with_every_kind = pytest.mark.parametrize("kind", KINDS)


def federation(tiny_config: Callable[..., RunConfig], name: str, kind: str, **known: Any) -> Federation:
    dtype = known.pop("dtype", torch.float32)
    return Federation(tiny_config(strategy=name, adapter=kind, **(QUICK | known)), dtype)


def check(result: Result, updates: Updates) -> None:
    """W is row-stochastic, and the states are what clients can go on with."""
    weights, states = result
    assert weights is None or check_row_stochastic(weights, len(updates)) is None
    assert list(states) == list(updates.state)
    for name, t in states.items():
        sent = updates.state[name]
        assert (t.shape, t.dtype) == (sent.shape, sent.dtype)
        assert t.isfinite().all()
        assert not is_variance(name) or (t >= 0).all()


@every
@with_every_kind
def test_the_order_of_the_clients_does_not_matter(name: str, kind: str, tiny_config: Callable[..., RunConfig]) -> None:
    moved = str.maketrans("abcdefg", "dgbface")
    options = WITHOUT_DRAWS.get(name, {})
    one, other = (federation(tiny_config, name, kind, **options) for _ in range(2))
    plain, renamed = one.go([1, 2, 3, 4]), other.go([1, 2, 3, 4], lambda client: client.translate(moved))
    for who, (weights, states), (weights_, states_) in zip(PRESENT, plain, renamed, strict=True):
        now = sorted(client.translate(moved) for client in who)
        rows = torch.tensor([now.index(client.translate(moved)) for client in who])
        assert (weights is None) == (weights_ is None)
        if weights is not None and weights_ is not None:
            torch.testing.assert_close(weights_[rows][:, rows], weights, rtol=1e-5, atol=1e-6)
        for key, t in states.items():
            torch.testing.assert_close(states_[key][rows], t, rtol=1e-4, atol=1e-5)


@every
@with_every_kind
def test_a_new_instance_goes_on_from_the_memory_of_another(
    name: str, kind: str, tiny_config: Callable[..., RunConfig]
) -> None:
    before = federation(tiny_config, name, kind)
    before.go([1, 2])
    after = federation(tiny_config, name, kind)
    after.personal = {client: dict(state) for client, state in before.personal.items()}
    after.strategy.load_memory({key: t.clone() for key, t in before.strategy.memory().items()})
    for (weights, states), (weights_, states_) in zip(before.go([3, 4]), after.go([3, 4]), strict=True):
        assert (weights is None and weights_ is None) or torch.equal(weights, weights_)  # type: ignore[arg-type]
        assert states.keys() == states_.keys()
        assert all(torch.equal(t, states_[key]) for key, t in states.items())


@every
@with_every_kind
def test_what_was_received_is_not_changed(name: str, kind: str, tiny_config: Callable[..., RunConfig]) -> None:
    here = federation(tiny_config, name, kind)
    here.go([1, 2])
    updates = here.updates(3, {client: here.reply(ord(client)) for client in PRESENT[2]})
    given = [updates.state, here.strategy.source, *updates.began]
    given.append({"examples": updates.examples})
    given += [{"descriptor": updates.descriptor}] if updates.descriptor is not None else []
    before = [{key: t.clone() for key, t in state.items()} for state in given]
    check(here.aggregate(updates), updates)
    for state, old in zip(given, before, strict=True):
        assert state.keys() == old.keys()
        assert all(torch.equal(t, old[key]) for key, t in state.items())


@every
def test_double_precision_stays(name: str, tiny_config: Callable[..., RunConfig]) -> None:
    here = federation(tiny_config, name, "entropy", dtype=torch.float64)
    updates = here.updates(1, {client: here.reply(ord(client)) for client in PRESENT[0]})
    assert {t.dtype for t in updates.state.values()} == {torch.float64}
    check(here.aggregate(updates), updates)


#: clients, how far they are from the source model, and whether all are the same
DEGENERATE = {
    "one client": (1, 1.0, False),
    "identical clients": (6, 1.0, True),
    "nobody has moved": (6, 0.0, True),
    "tiny": (6, 1e-38, False),
    "huge": (6, 1e37, False),
    "five hundred": (500, 1.0, False),
}


@every
@with_every_kind
@pytest.mark.parametrize(("clients", "scale", "same"), DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_rounds(
    name: str, kind: str, clients: int, scale: float, same: bool, tiny_config: Callable[..., RunConfig]
) -> None:
    here = federation(tiny_config, name, kind)
    for round_ in (1, 2):
        replies = {f"client-{i:03d}": here.reply(0 if same else i, scale) for i in range(clients)}
        updates = here.updates(round_, replies)
        check(here.aggregate(updates), updates)


@every
def test_where_the_mixture_takes_the_memory_of_the_states_it_is_the_same(
    name: str, tiny_config: Callable[..., RunConfig]
) -> None:
    """For those that are W @ theta; the others are never given what they may not look at afterwards."""
    one, other = (federation(tiny_config, name, "entropy") for _ in range(2))
    if type(one.strategy).personalize is not PersonalizedStrategy.personalize:
        pytest.skip("makes its states itself")
    replies = {client: one.reply(ord(client)) for client in PRESENT[0]}
    _, expected = one.aggregate(one.updates(1, replies))
    expendable = replace(other.updates(1, replies), expendable=True)
    _, found = other.aggregate(expendable)
    assert expendable.state == {}
    assert list(found) == list(expected)
    assert all(torch.equal(t, expected[key]) for key, t in found.items())
