"""FedAMP's weights: its equations by plain loops, its limits, and where it equals another method."""

import logging
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.records import INFO
from fedtta_flwr.strategies.fedamp import FedAMP, attention, original_attention
from fedtta_flwr.strategies.updates import Update, Updates, check_row_stochastic, stack_updates

Config = Callable[..., RunConfig]
Rows = list[list[float]]


def normalised_by_loops(distances: Rows, sigma: float, self_weight: float) -> Rows:
    """The self weight fixed, the others by exp(-d / sigma), with Python floats."""
    rows = []
    for i, row in enumerate(distances):
        near = min((d for j, d in enumerate(row) if j != i), default=0.0)
        kernel = [0.0 if j == i else math.exp(-(d - near) / sigma) for j, d in enumerate(row)]
        share = (1 - self_weight) / sum(kernel) if len(row) > 1 else 0.0
        rows.append([share * k for k in kernel])
        rows[i][i] = self_weight if len(row) > 1 else 1.0
    return rows


def original_by_loops(distances: Rows, sigma: float, alpha: float) -> Rows:
    """u_i = (1 - a sum A'(d_ij)) theta_i + a sum A'(d_ij) theta_j, the sum at most 1."""
    rows = []
    for i, row in enumerate(distances):
        others = [0.0 if j == i else alpha * math.exp(-d / sigma) / sigma for j, d in enumerate(row)]
        total = max(1.0, sum(others))
        rows.append([w / total for w in others])
        rows[i][i] = 1 - sum(rows[i])
    return rows


def draw_distances(n: int, seed: int, scale: float = 1.0) -> Tensor:
    points = torch.randn((n, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scale * torch.cdist(points, points).square().fill_diagonal_(0)


def updates_of(states: dict[str, list[float]]) -> Updates:
    made = {
        client: Update({"a": torch.tensor(t[:1]), "b": torch.tensor(t[1:])}, None, 5) for client, t in states.items()
    }
    return stack_updates(1, made, ())


def strategy_of(config: RunConfig, source: list[float]) -> FedAMP:
    strategy = FedAMP(config)
    strategy.source = {"a": torch.tensor(source[:1]), "b": torch.tensor(source[1:])}
    return strategy


draws = given(
    n=st.integers(1, 8),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-6, 1.0, 100.0]),
    sigma=st.sampled_from([0.1, 1.0, 20.0]),
    other=st.sampled_from([0.05, 0.3, 0.9]),
)


@settings(max_examples=60, deadline=None)
@draws
def test_the_normalised_rule(n: int, seed: int, scale: float, sigma: float, other: float) -> None:
    distances = draw_distances(n, seed, scale)
    weights = attention(-distances / sigma, other)
    expected = torch.tensor(normalised_by_loops(distances.tolist(), sigma, other), dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-14)
    assert check_row_stochastic(weights, n) is None


@settings(max_examples=60, deadline=None)
@draws
def test_the_original_rule(n: int, seed: int, scale: float, sigma: float, other: float) -> None:
    distances = draw_distances(n, seed, scale)
    weights, clipped = original_attention(distances, sigma, other)
    expected = torch.tensor(original_by_loops(distances.tolist(), sigma, other), dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-14)
    assert check_row_stochastic(weights, n) is None
    assert weights.min() >= 0
    sums = [
        sum(other / sigma * math.exp(-d / sigma) for j, d in enumerate(row) if j != i)
        for i, row in enumerate(distances.tolist())
    ]
    assert clipped == sum(total > 1 for total in sums)


def test_the_distance_is_a_mean_over_all_that_was_uploaded(tiny_config: Config) -> None:
    states = {"p": [1.0, 2.0, 3.0], "q": [1.0, 2.0, 9.0], "r": [4.0, 2.0, 0.0]}
    config = tiny_config(**{"fedamp.sigma": 4.0, "fedamp.self-weight": 0.2})
    mean = [
        [sum((a - b) ** 2 for a, b in zip(s, t, strict=True)) / 3 for t in states.values()] for s in states.values()
    ]
    assert mean[0][1] == 12.0
    weights = strategy_of(config, [0.5, -7.0, 1.0]).collaboration_matrix(updates_of(states))
    assert weights.tolist() == [pytest.approx(row) for row in normalised_by_loops(mean, 4.0, 0.2)]
    original = tiny_config(**{"fedamp.rule": "original", "fedamp.sigma": 4.0, "fedamp.alpha": 0.5})
    weights = strategy_of(original, [0.5, -7.0, 1.0]).collaboration_matrix(updates_of(states))
    assert weights.tolist() == [pytest.approx(row) for row in original_by_loops(mean, 4.0, 0.5)]


def test_the_median_is_that_of_the_distances_to_the_nearest(tiny_config: Config) -> None:
    states = {"p": [0.0, 0.0, 0.0], "q": [3.0, 0.0, 0.0], "r": [0.0, 6.0, 0.0], "s": [0.0, 6.0, 9.0]}
    total = [[sum((a - b) ** 2 for a, b in zip(s, t, strict=True)) for t in states.values()] for s in states.values()]
    nearest = statistics.median_low(sorted(row)[1] for row in total)
    assert nearest == 9.0  # of 9, 9, 36, 81
    strategy = strategy_of(tiny_config(**{"fedamp.sigma": "median"}), [0.0] * 3)
    weights = strategy.collaboration_matrix(updates_of(states))
    assert weights.tolist() == [pytest.approx(row) for row in normalised_by_loops(total, nearest, 0.3)]
    hardly = updates_of({client: [1e-4 * x for x in t] for client, t in states.items()})
    torch.testing.assert_close(strategy.collaboration_matrix(hardly), weights, rtol=1e-5, atol=0)
    one = strategy_of(tiny_config(), [0.0] * 3).collaboration_matrix(hardly)  # sigma = 1 tells nobody apart
    assert one.tolist() == [pytest.approx([0.3 if i == j else 0.7 / 3 for j in range(4)], abs=1e-6) for i in range(4)]


def test_a_median_of_zero_is_shared_by_equal_clients(tiny_config: Config) -> None:
    strategy = strategy_of(tiny_config(**{"fedamp.sigma": "median"}), [0.0] * 3)
    pairs = updates_of({"p": [1.0] * 3, "q": [1.0] * 3, "r": [2.0] * 3, "s": [4.0] * 3})
    third = pytest.approx([0.7 / 3] * 3)
    p, q, r, s = strategy.collaboration_matrix(updates_of({c: [1.0] * 3 for c in "pqrs"})).tolist()
    assert p[1:] == q[:1] + q[2:] == r[:2] + r[3:] == s[:3] == third
    p, q, r, s = strategy.collaboration_matrix(pairs).tolist()
    assert (p, q) == (pytest.approx([0.3, 0.7, 0, 0]), pytest.approx([0.7, 0.3, 0, 0]))
    assert (r, s) == (pytest.approx([0.35, 0.35, 0.3, 0]), pytest.approx([0, 0, 0.7, 0.3]))  # to the nearest


def test_the_papers_sum_is_the_mean_with_sigma_and_alpha_divided(tiny_config: Config) -> None:
    """As the class says: sigma / P and alpha / P here are the paper's sigma and alpha."""
    states = {"p": [0.1, 0.2, 0.3], "q": [0.1, 0.2, 0.9], "r": [0.4, 0.2, 0.0]}
    total = [[sum((a - b) ** 2 for a, b in zip(s, t, strict=True)) for t in states.values()] for s in states.values()]
    config = tiny_config(**{"fedamp.rule": "original", "fedamp.sigma": 2.0 / 3, "fedamp.alpha": 0.6 / 3})
    weights = strategy_of(config, [0.0] * 3).collaboration_matrix(updates_of(states))
    assert weights.tolist() == [pytest.approx(row, rel=1e-5) for row in original_by_loops(total, 2.0, 0.6)]


def test_the_cosine_rule_is_of_what_was_added_to_the_source(tiny_config: Config) -> None:
    source, states = [1.0, 1.0, 0.0], {"p": [2.0, 1.0, 0.0], "q": [3.0, 3.0, 0.0], "r": [1.0, 0.0, 0.0]}
    cos = [[1, math.sqrt(0.5), 0], [math.sqrt(0.5), 1, -math.sqrt(0.5)], [0, -math.sqrt(0.5), 1]]
    expected = normalised_by_loops([[-10 * c for c in row] for row in cos], 1.0, 0.3)
    weights = strategy_of(tiny_config(**{"fedamp.rule": "cosine"}), source).collaboration_matrix(updates_of(states))
    assert weights.tolist() == [pytest.approx(row, rel=1e-6) for row in expected]


def test_limits_of_sigma() -> None:
    distances = draw_distances(5, 0)
    nearest = (distances + torch.diag(torch.full((5,), math.inf))).argmin(dim=1)
    expected = 0.3 * torch.eye(5, dtype=torch.float64)
    expected[torch.arange(5), nearest] = 0.7
    torch.testing.assert_close(attention(-distances / 1e-4, 0.3), expected, rtol=0, atol=1e-12)
    equal = torch.full((5, 5), 0.7 / 4, dtype=torch.float64).fill_diagonal_(0.3)
    torch.testing.assert_close(attention(-distances / 1e9, 0.3), equal, rtol=1e-7, atol=0)
    # far apart, the original rule leaves everybody alone, which the normalised one never does
    assert torch.equal(original_attention(1e6 + distances, 1.0, 1.0)[0], torch.eye(5, dtype=torch.float64))


@pytest.mark.parametrize("rule", ["normalised", "original", "cosine"])
def test_no_collaboration_for_one_client(rule: str, tiny_config: Config) -> None:
    for sigma in (1.0,) if rule == "original" else (1.0, "median"):
        strategy = strategy_of(tiny_config(**{"fedamp.rule": rule, "fedamp.sigma": sigma}), [0.0] * 3)
        assert strategy.collaboration_matrix(updates_of({"p": [1.0, 2.0, 3.0]})).tolist() == [[1.0]]


@pytest.mark.parametrize("sigma", [1e-300, 1e-6, 1.0, 1e300])
@pytest.mark.parametrize("scale", [0.0, 1e-76, 1e-10, 1e10, 1e74])
def test_extreme_scales_stay_finite(scale: float, sigma: float) -> None:
    distances = draw_distances(6, 4, scale)
    weights = [attention(-distances / sigma, 0.3)] + [
        original_attention(distances, sigma, a)[0] for a in (1e-300, 1, 1e300)
    ]
    for w in weights:
        assert check_row_stochastic(w, 6) is None


def test_a_negative_self_weight_is_clipped_and_said_once(
    tiny_config: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    strategy = strategy_of(tiny_config(**{"fedamp.rule": "original", "fedamp.alpha": 2.0}), [0.0] * 3)
    updates = updates_of({"p": [0.0, 0.0, 0.0], "q": [0.0, 0.0, 0.0], "r": [9.0, 9.0, 9.0]})
    for _ in range(3):
        weights = strategy.collaboration_matrix(updates)
    close = math.exp(-81)
    assert weights[2].tolist() == pytest.approx([2 * close, 2 * close, 1 - 4 * close])
    assert weights[0].tolist() == pytest.approx([0.0, 1 / (1 + close), close / (1 + close)])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "2 of 3 clients" in messages[0]


@pytest.mark.parametrize(("weight", "terms"), [(0.5, {"fedamp.weight": 0.5, "fedamp.alpha": 2.0}), (0.0, {})])
def test_the_local_term_is_asked_for(weight: float, terms: dict[str, float], tiny_config: Config) -> None:
    strategy = FedAMP(tiny_config(**{"fedamp.weight": weight, "fedamp.alpha": 2.0}))
    assert dict(strategy.objectives) == terms


# ------------------------------------------------------------------------------------------------------- whole runs


def weights_of(run: Any) -> np.ndarray:
    with np.load(run.path / "collaboration.npz") as arrays:
        return arrays["weights"]


@pytest.mark.parametrize("adapter", ["bn-stats", "entropy", "source"])
def test_a_real_run(adapter: str, run_local: Callable[..., Any]) -> None:
    run = run_local(strategy="fedamp", adapter=adapter)
    weights = weights_of(run)
    assert weights.shape == (4, 4, 4)
    assert np.diagonal(weights, axis1=1, axis2=2) == pytest.approx(0.3)
    assert weights.sum(axis=2) == pytest.approx(1.0)
    if adapter == "source":  # nothing travels: all are alike
        assert weights[:, 0, 1:] == pytest.approx(0.7 / 3)
    else:
        assert np.ptp(weights[:, 0, 1:], axis=1).min() > 0


def test_equal_shares_are_fedavg(run_local: Callable[..., Any]) -> None:
    """With sigma far above all distances and 1/N of its own everybody has everybody's mean."""
    few = {"rounds": 3, "fedamp.self-weight": 0.25, "fedamp.sigma": 1e30}
    equal, average = run_local(strategy="fedamp", **few), run_local(strategy="fedavg", rounds=3)
    assert equal.summary["accuracy"] == average.summary["accuracy"]
    assert weights_of(equal) == pytest.approx(weights_of(average), abs=1e-7)


def test_all_to_oneself_is_local_bit_for_bit(run_local: Callable[..., Any]) -> None:
    alone = run_local(strategy="fedamp", rounds=3, **{"fedamp.self-weight": 1.0})
    local = run_local(strategy="local", rounds=3)
    assert alone.summary["accuracy"] == local.summary["accuracy"]
    assert np.array_equal(weights_of(alone), weights_of(local))


def test_clients_with_one_step_a_round_feel_no_pull(run_local: Callable[..., Any]) -> None:
    """The term's gradient is zero where a round begins."""
    few = {"strategy": "fedamp", "adapter": "entropy", "rounds": 3, "entropy.learning-rate": 0.01}
    with_term, without = run_local(**few), run_local(**few, **{"fedamp.weight": 0.0})
    asked = [m.content.config_records[INFO] for m in with_term.sent if INFO in m.content.config_records]
    assert asked[0]["objective.fedamp.weight"] == 1.0
    assert with_term.summary["accuracy"] == without.summary["accuracy"]
    assert np.array_equal(weights_of(with_term), weights_of(without))
