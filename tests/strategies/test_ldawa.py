"""L-DAWA: its cosines and means with Python floats, where there is no angle, the warm-up, checkpoints."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.fedavg import FedAvg
from fedtta_flwr.strategies.ldawa import LDAWA, cosines
from fedtta_flwr.strategies.updates import State, Update, Updates, stack_updates
from tests.test_client import metrics, personal_states

Config = Callable[..., RunConfig]
SHAPES = {"conv.weight": (2, 1, 3), "conv.bias": (4,), "scale": (), "one": (1,)}
STATISTICS = {"bn.running_mean": (2,), "bn.running_var": (2,)}


def draw(clients: str, seed: int, near: float = math.inf, dtype: torch.dtype = torch.float64) -> dict[str, Update]:
    """States of clients, ``1 + noise / near`` if `near` is finite; client i has i + 1 samples."""
    g = torch.Generator().manual_seed(seed)

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=g, dtype=torch.float64)
        return (noise if near == math.inf else 1 + noise / near).to(dtype)

    return {
        client: Update(
            {n: tensor(s) for n, s in SHAPES.items()} | {n: tensor(s).abs() for n, s in STATISTICS.items()}, None, i + 1
        )
        for i, client in enumerate(clients)
    }


def one_state(seed: int, near: float = math.inf, dtype: torch.dtype = torch.float64) -> State:
    return draw("s", seed, near, dtype)["s"].state


def cosine(u: list[float], v: list[float]) -> float:
    """At least 0; 1 where there is no angle."""
    norms = math.hypot(*u) * math.hypot(*v)
    if len(u) == 1 or norms == 0:
        return 1.0
    return max(0.0, sum(a * b for a, b in zip(u, v, strict=True)) / norms)


def by_hand(updates: dict[str, Update], previous: dict[str, list[float]], renormalise: bool) -> dict[str, list[float]]:
    """The next global state, value by value."""
    total = sum(u.examples for u in updates.values())
    found = {}
    for name, reference in previous.items():
        thetas = [u.state[name].flatten().tolist() for u in updates.values()]
        plain = [u.examples / total for u in updates.values()]
        shares = plain
        if name not in STATISTICS:
            shares = [p * cosine(theta, reference) for p, theta in zip(plain, thetas, strict=True)]
            if renormalise:
                whole = sum(shares)
                shares = [s / whole for s in shares] if whole else plain
        found[name] = [
            sum(s * theta[k] for s, theta in zip(shares, thetas, strict=True)) for k in range(len(reference))
        ]
    return found


def values(state: State) -> dict[str, list[float]]:
    return {name: t.flatten().tolist() for name, t in state.items()}


def strategy_for(source: State, **options: Any) -> LDAWA:
    strategy = LDAWA(RunConfig.from_flat({f"ldawa.{key.replace('_', '-')}": v for key, v in options.items()}))
    strategy.source = source
    return strategy


@settings(max_examples=60, deadline=None)
@given(
    present=st.lists(st.sampled_from(["a", "ab", "c", "abcd", "bd"]), min_size=1, max_size=4),
    near=st.sampled_from([math.inf, 3.0, 100.0]),
    renormalise=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_the_mean_is_that_of_the_equations(present: list[str], near: float, renormalise: bool, seed: int) -> None:
    source = one_state(seed, near)
    strategy = strategy_for(source, warmup_rounds=0, renormalise=renormalise)
    expected = values(source)
    for number, clients in enumerate(present, start=1):
        updates = draw(clients, seed + number, near)
        expected = by_hand(updates, expected, renormalise)
        mixed = strategy.personalize(stack_updates(number, dict(reversed(updates.items())), ()))
        for name, t in mixed.items():
            assert t.shape == (len(clients), *source[name].shape)
            for row in t:
                assert row.flatten().tolist() == pytest.approx(expected[name], rel=1e-10, abs=1e-12)


def test_cosines() -> None:
    root = math.sqrt(0.5)
    layer = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0], [-1.0, 1.0], [0.0, 0.0]])
    assert cosines(layer, torch.tensor([5.0, 0.0])).tolist() == pytest.approx([1, root, 0, 0, 1])
    assert cosines(layer, torch.zeros(2)).tolist() == [1.0] * 5
    assert cosines(torch.tensor([[-3.0], [0.0]]), torch.tensor([2.0])).tolist() == [1.0, 1.0]
    assert cosines(layer, torch.ones(2)).dtype == torch.float64


@pytest.mark.parametrize("scale", [1e-38, 1e-10, 1e10, 3e37])
def test_cosines_do_not_depend_on_the_scale(scale: float) -> None:
    layer = torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    found = cosines(layer * scale, layer[0] * scale)
    expected = [cosine(row, layer[0].tolist()) for row in layer.tolist()]
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert ((found >= 0) & (found <= 1)).all()


def test_a_layer_shrinks_by_its_mean_cosine_unless_renormalised() -> None:
    """Two clients at 60 degrees on either side of the global model: the mean is half as long, then a quarter."""
    east, side = torch.tensor([1.0, 0.0], dtype=torch.float64), math.sqrt(0.75)
    for renormalise, lengths in ((False, [0.25, 0.25]), (True, [0.5, 0.5])):
        strategy = strategy_for({"w": east}, warmup_rounds=0, renormalise=renormalise)
        for number, length in enumerate(lengths, start=1):
            sent = {
                "a": Update({"w": torch.tensor([0.5, side], dtype=torch.float64)}, None, 5),
                "b": Update({"w": torch.tensor([0.5, -side], dtype=torch.float64)}, None, 5),
            }
            mixed = strategy.personalize(stack_updates(number, sent, ()))["w"]
            assert mixed.tolist() == [pytest.approx([length, 0.0])] * 2


@pytest.mark.parametrize("renormalise", [False, True])
def test_clients_that_all_turn_away(renormalise: bool) -> None:
    """Nothing is left of the layer; renormalised, it is the plain mean."""
    strategy = strategy_for({"w": torch.tensor([1.0, 0.0])}, warmup_rounds=0, renormalise=renormalise)
    sent = {client: Update({"w": torch.tensor([-1.0, 0.5])}, None, 5) for client in "ab"}
    mixed = strategy.personalize(stack_updates(1, sent, ()))["w"]
    assert mixed.tolist() == [[-1.0, 0.5] if renormalise else [0.0, 0.0]] * 2
    mixed = strategy.personalize(stack_updates(2, sent, ()))["w"]  # and from zero there is no angle
    assert mixed.tolist() == [[-1.0, 0.5]] * 2


@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_the_first_rounds_are_fedavg_and_their_mean_is_the_reference(tiny_config: Config, warmup: int) -> None:
    source = one_state(0)
    strategy, plain = strategy_for(source, warmup_rounds=warmup), FedAvg(tiny_config())
    previous = source
    for number in range(1, 5):
        sent = draw("abc", number)
        updates = stack_updates(number, sent, ())
        mixed, average = strategy.personalize(updates), plain.personalize(updates)
        if number <= warmup:
            assert all(torch.equal(t, average[name]) for name, t in mixed.items())
            assert strategy._round.weights is not None
        else:
            expected = by_hand(sent, values(previous), False)
            assert {n: t[2].flatten().tolist() for n, t in mixed.items()} == {
                n: pytest.approx(v) for n, v in expected.items()
            }
            assert not torch.allclose(mixed["conv.weight"], average["conv.weight"])
            assert strategy._round.weights is None
        assert all(torch.equal(mixed[name], average[name]) for name in STATISTICS)
        previous = {name: t[0] for name, t in mixed.items()}


def test_identical_clients_keep_what_they_have() -> None:
    source = one_state(5, dtype=torch.float32)
    strategy = strategy_for(source, warmup_rounds=0)
    same = {f"client-{i:03d}": Update(source, None, 5) for i in range(500)}
    for name, t in strategy.personalize(stack_updates(1, same, ())).items():
        torch.testing.assert_close(t, source[name].expand_as(t), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_kept_and_each_client_has_its_own(dtype: torch.dtype) -> None:
    strategy = strategy_for(one_state(6, dtype=dtype), warmup_rounds=0)
    mixed = strategy.personalize(stack_updates(1, draw("abc", 7, dtype=dtype), ()))
    assert {t.dtype for t in mixed.values()} == {dtype}
    mixed["conv.bias"][0] += 1
    assert not torch.equal(mixed["conv.bias"][0], mixed["conv.bias"][1])
    assert torch.equal(strategy.memory()["conv.bias"], mixed["conv.bias"][1])


def test_a_new_instance_continues_from_the_memory() -> None:
    source = one_state(8, near=3.0)

    def updates(number: int) -> Updates:
        return stack_updates(number, draw("abcd"[number % 3 :], 10 + number, near=3.0), ())

    first, second, fresh = (strategy_for(source, warmup_rounds=1) for _ in range(3))
    for number in (1, 2, 3):
        first.personalize(updates(number))
    second.personalize(updates(7))  # to be forgotten
    second.load_memory({key: t.clone() for key, t in first.memory().items()})
    for number in (4, 5):
        one, other, none = (s.personalize(updates(number)) for s in (first, second, fresh))
        assert all(torch.equal(t, other[name]) for name, t in one.items())
        assert not torch.equal(one["conv.weight"], none["conv.weight"])
    assert set(second.memory()) == set(SHAPES)
    assert all(torch.equal(t, second.memory()[key]) for key, t in first.memory().items())


@pytest.mark.parametrize("adapter", ["bn-stats", "source"])
def test_without_parameters_it_is_fedavg_bit_for_bit(run_local: Any, adapter: str) -> None:
    alone = {"adapter": adapter, "ldawa.warmup-rounds": 0}
    assert metrics(run_local(strategy="ldawa", **alone)) == metrics(run_local(strategy="fedavg", **alone))


def test_a_run_warms_up_and_then_shrinks_a_little(run_local: Any) -> None:
    few = {"adapter": "entropy", "entropy.learning-rate": 0.01}
    run, average = run_local(strategy="ldawa", **few), run_local(strategy="fedavg", **few)
    found, plain = personal_states(run), personal_states(average)
    for t in (2, 3):
        assert found[t, "client-00"] == plain[t, "client-00"]
    for key, sent in found[4, "client-00"].items():
        ours, theirs = (np.frombuffer(b, np.float32).astype(np.float64) for b in (sent, plain[4, "client-00"][key]))
        if key.endswith(("_mean", "_var")):
            assert sent == plain[4, "client-00"][key]
        else:
            assert ours == pytest.approx(theirs, rel=0.05, abs=1e-3)
            assert np.linalg.norm(ours) <= np.linalg.norm(theirs)
    assert found[4, "client-00"] != plain[4, "client-00"]
    assert all(found[t, "client-00"] == found[t, "client-03"] for t in (2, 3, 4, 5))
    with np.load(run.path / "collaboration.npz") as arrays:
        assert arrays["rounds"].tolist() == [1, 2]
