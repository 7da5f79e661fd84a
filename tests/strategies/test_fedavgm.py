"""FedAvgM: the recursions with Python floats, what has no momentum, clients that come and go, checkpoints."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.fedavgm import FedAvgM
from fedtta_flwr.strategies.updates import Update, Updates, check_row_stochastic, stack_updates
from tests.test_client import metrics, personal_states

Config = Callable[..., RunConfig]
#: one round's uploads: client -> (values, samples)
Round = dict[str, tuple[list[float], int]]
RULES = ["hsu", "ema"]


def by_hand(rounds: list[Round], source: list[float], beta: float, rate: float, rule: str) -> list[list[float]]:
    """x after every round, value by value."""
    x, v, history = list(source), [0.0] * len(source), []
    for number, uploads in enumerate(rounds):
        total = sum(n for _, n in uploads.values())
        for k in range(len(x)):
            delta = x[k] - sum(n * values[k] for values, n in uploads.values()) / total
            if rule == "hsu":
                v[k] = beta * v[k] + delta
            else:
                v[k] = delta if number == 0 else beta * v[k] + (1 - beta) * delta
            x[k] -= rate * v[k]
        history.append(list(x))
    return history


def draw(seed: int, present: list[str], size: int = 3, scale: float = 1.0) -> list[Round]:
    """Random uploads of the clients named in each round."""
    g = torch.Generator().manual_seed(seed)
    return [
        {
            name: ((scale * torch.randn(size, generator=g, dtype=torch.float64)).tolist(), 1 + i)
            for i, name in enumerate(names)
        }
        for names in present
    ]


def stacked(number: int, uploads: Round, name: str = "weight", dtype: torch.dtype = torch.float64) -> Updates:
    made = {c: Update({name: torch.tensor(v, dtype=dtype)}, None, n) for c, (v, n) in uploads.items()}
    return stack_updates(number, made, ())


def strategy_for(config: RunConfig, **source: Tensor) -> FedAvgM:
    strategy = FedAvgM(config)
    strategy.source = source
    return strategy


@settings(max_examples=60, deadline=None)
@given(
    present=st.lists(st.sampled_from(["a", "ab", "c", "abcd", "bd"]), min_size=1, max_size=6),
    beta=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    rate=st.sampled_from([0.1, 1.0, 1.5]),
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 10_000),
)
def test_x_follows_the_recursion_whoever_is_there(
    present: list[str], beta: float, rate: float, rule: str, seed: int
) -> None:
    flat = {"fedavgm.momentum": beta, "fedavgm.learning-rate": rate, "fedavgm.rule": rule}
    rounds, source = draw(seed, present), [0.5, -2.0, 1.0]
    strategy = strategy_for(RunConfig.from_flat(flat), weight=torch.tensor(source, dtype=torch.float64))
    for number, (uploads, x) in enumerate(zip(rounds, by_hand(rounds, source, beta, rate, rule), strict=True), start=1):
        updates = stacked(number, dict(reversed(uploads.items())))
        moved = strategy.personalize(updates)["weight"]
        expected = torch.tensor(x, dtype=torch.float64).expand(len(uploads), 3)
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
        assert strategy._round.weights is not None
        assert check_row_stochastic(strategy._round.weights, len(uploads)) is None


@pytest.mark.parametrize(("flat", "second"), [({}, 2.9), ({"fedavgm.rule": "ema"}, 2.0)])
def test_two_rounds_by_mental_arithmetic(tiny_config: Config, flat: dict[str, Any], second: float) -> None:
    """The mean is 1, then 2. The paper's x, from 0: 1, then 1 + 0.9 + 1; the average's: 1, then 1 + 0.9 + 0.1."""
    strategy = strategy_for(tiny_config(**flat), weight=torch.zeros(1, dtype=torch.float64))
    for number, (mean, x) in enumerate([(1.0, 1.0), (2.0, second)], start=1):
        assert strategy.personalize(stacked(number, {"a": ([mean], 5)}))["weight"].item() == pytest.approx(x)


@pytest.mark.parametrize("name", ["bn.running_mean", "bn.running_var", "teacher.conv.weight", "teacher.bn.running_var"])
def test_statistics_and_teachers_are_plain_means(tiny_config: Config, name: str) -> None:
    """With momentum on it this variance would become negative."""
    strategy = strategy_for(tiny_config(), **{name: torch.ones(1), "weight": torch.ones(1)})
    for number, value in enumerate([0.4, 0.1, 0.1, 0.1], start=1):
        sent = {name: torch.tensor([value]), "weight": torch.tensor([value])}
        mixed = strategy.personalize(stack_updates(number, {c: Update(sent, None, 5) for c in "ab"}, ()))
        assert mixed[name].tolist() == [[pytest.approx(value)]] * 2
    assert mixed["weight"].max() < 0
    assert all(name not in key for key in strategy.memory())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes_and_shapes_are_kept_and_all_get_the_same(tiny_config: Config, dtype: torch.dtype) -> None:
    strategy = strategy_for(tiny_config(), weight=torch.ones(2, 1, 3, dtype=dtype), scale=torch.ones((), dtype=dtype))
    g = torch.Generator().manual_seed(0)
    sent = {
        client: Update(
            {"weight": torch.randn(2, 1, 3, generator=g).to(dtype), "scale": torch.ones((), dtype=dtype)}, None, 5
        )
        for client in "abc"
    }
    mixed = strategy.personalize(stack_updates(1, sent, ()))
    assert {name: (t.shape, t.dtype) for name, t in mixed.items()} == {
        "weight": ((3, 2, 1, 3), dtype),
        "scale": ((3,), dtype),
    }
    assert all(torch.equal(t[0], t[i]) for t in mixed.values() for i in range(3))
    mixed["weight"][0] += 1  # each has its own, and none is what the strategy remembers
    assert not torch.equal(mixed["weight"][0], mixed["weight"][1])
    assert torch.equal(strategy.memory()["global/weight"].to(dtype), mixed["weight"][1])


@pytest.mark.parametrize("rule", RULES)
def test_a_new_instance_continues_from_the_memory(tiny_config: Config, rule: str) -> None:
    config = tiny_config(**{"fedavgm.rule": rule})
    rounds, source = draw(3, ["abc", "ab", "c", "abcd", "bd"]), torch.zeros(3)
    first = strategy_for(config, weight=source)
    for number, uploads in enumerate(rounds[:3], start=1):
        first.personalize(stacked(number, uploads, dtype=torch.float32))
    second = strategy_for(config, weight=source)
    second.personalize(stacked(1, rounds[4], dtype=torch.float32))  # to be forgotten
    second.load_memory({key: t.clone() for key, t in first.memory().items()})
    assert set(second.memory()) == {"global/weight", "velocity/weight"}
    fresh = strategy_for(config, weight=source)
    for number, uploads in enumerate(rounds[3:], start=4):
        one, other, none = (
            s.personalize(stacked(number, uploads, dtype=torch.float32))["weight"] for s in (first, second, fresh)
        )
        assert torch.equal(one, other)
        assert not torch.equal(one, none)
    assert all(torch.equal(t, second.memory()[key]) for key, t in first.memory().items())
    second.load_memory({})
    assert second.memory() == {}


@pytest.mark.parametrize("n", [3, 7, 11])
def test_what_nobody_moves_stays(tiny_config: Config, n: int) -> None:
    """Float32's shares do not sum to 1, which momentum would multiply."""
    source = torch.randn(50, generator=torch.Generator().manual_seed(n))
    strategy, sent = strategy_for(tiny_config(), weight=source), source
    for number in range(1, 200):
        replies = {f"{i:02d}": Update({"weight": sent}, None, 10) for i in range(n)}
        sent = strategy.personalize(stack_updates(number, replies, ()))["weight"][0]
    assert torch.equal(sent, source)


@pytest.mark.parametrize("scale", [1e-38, 1e-10, 1e10, 1e37])
@pytest.mark.parametrize("rule", RULES)
def test_extreme_scales_stay_finite(tiny_config: Config, scale: float, rule: str) -> None:
    rounds, source = draw(4, ["abc", "abc", "ab"], scale=scale), [0.0, scale, -scale]
    strategy = strategy_for(tiny_config(**{"fedavgm.rule": rule}), weight=torch.tensor(source))
    for number, uploads in enumerate(rounds, start=1):
        moved = strategy.personalize(stacked(number, uploads, dtype=torch.float32))["weight"][0]
    expected = torch.tensor(by_hand(rounds, source, 0.9, 1.0, rule)[-1], dtype=torch.float64)
    assert moved.isfinite().all()
    torch.testing.assert_close(moved.double() / scale, expected / scale, rtol=1e-5, atol=1e-5)


def test_nothing_changed_is_nothing_moved(tiny_config: Config) -> None:
    source = torch.randn(5, generator=torch.Generator().manual_seed(1))
    strategy = strategy_for(tiny_config(), weight=source)
    for number in (1, 2):
        same = {f"client-{i:03d}": Update({"weight": source}, None, 5) for i in range(500)}
        moved = strategy.personalize(stack_updates(number, same, ()))["weight"]
        torch.testing.assert_close(moved, source.expand(500, 5), rtol=1e-5, atol=0)


def test_without_parameters_there_is_nothing_to_remember(tiny_config: Config) -> None:
    strategy = strategy_for(tiny_config())
    assert strategy.personalize(stack_updates(1, {"a": Update({}, None, 5)}, ())) == {}
    assert strategy.memory() == {}


def check_close(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert found.keys() == expected.keys()
    for one, other in zip(found.values(), expected.values(), strict=True):
        values = (torch.frombuffer(bytearray(t), dtype=torch.float32) for t in (one, other))
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adapter", ["bn-stats", "source"])
def test_without_gradients_it_is_fedavg_bit_for_bit(run_local: Any, adapter: str) -> None:
    assert metrics(run_local(strategy="fedavgm", adapter=adapter)) == metrics(
        run_local(strategy="fedavg", adapter=adapter)
    )


def test_without_momentum_it_is_fedavg_but_for_rounding_and_with_it_x_runs_ahead(run_local: Any) -> None:
    few = {"adapter": "entropy", "entropy.learning-rate": 0.01}
    average = run_local(strategy="fedavg", **few)
    still = run_local(strategy="fedavgm", **few, **{"fedavgm.momentum": 0.0})
    assert still.summary["accuracy"] == average.summary["accuracy"]
    ahead, behind = personal_states(run_local(strategy="fedavgm", **few)), personal_states(average)
    check_close(personal_states(still)[4, "client-00"], behind[4, "client-00"])
    check_close(ahead[2, "client-00"], behind[2, "client-00"])  # the first velocity is the first step
    for key, sent in ahead[3, "client-00"].items():
        assert key.endswith(("_mean", "_var")) or sent != behind[3, "client-00"][key]
    assert all(ahead[t, "client-00"] == ahead[t, "client-03"] for t in (2, 3, 4, 5))
