"""pFedGraph's weights: solvers and optimality conditions of its quadratic programme, and its limits."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.records import INFO
from fedtta_flwr.strategies.pfedgraph import PFedGraph, pfedgraph_weights, project_onto_simplex
from fedtta_flwr.strategies.updates import Update, Updates, check_row_stochastic, stack_updates

Config = Callable[..., RunConfig]
Floats = NDArray[np.float64]


def programme(similarity: Floats, shares: Floats, lam: float) -> tuple[Floats, Floats]:
    """min_w lam ||w||^2 + (d - 2 lam p)^T w of one client: the linear term, and d."""
    d = -similarity
    d = np.where(d < -0.9, -1.0, d)
    return d - 2 * lam * shares, d


def by_slsqp(similarity: Floats, shares: Floats, lam: float) -> Floats:
    linear, _ = programme(similarity, shares, lam)
    n = len(shares)
    found = minimize(
        lambda w: lam * w @ w + linear @ w,
        np.full(n, 1 / n),
        jac=lambda w: 2 * lam * w + linear,
        bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert found.success
    return np.asarray(found.x)


def by_active_sets(similarity: Floats, shares: Floats, lam: float) -> Floats:
    """Solve the equality-constrained programme on every support; keep the best that is feasible."""
    linear, _ = programme(similarity, shares, lam)
    n, best = len(shares), (np.inf, np.zeros(0))
    for size in range(1, n + 1):
        for support in map(list, itertools.combinations(range(n), size)):
            multiplier = (2 * lam + linear[support].sum()) / size  # 2 lam w + linear = multiplier, sum w = 1
            w = np.zeros(n)
            w[support] = (multiplier - linear[support]) / (2 * lam)
            if w.min() >= -1e-15 and (value := lam * w @ w + linear @ w) < best[0]:
                best = value, w
    return best[1]


def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Cosines of n random directions, and shares."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.nn.functional.normalize(torch.randn((n, 3), generator=generator, dtype=torch.float64), dim=1)
    shares = torch.rand(n, generator=generator, dtype=torch.float64) + 0.05
    return points @ points.T, shares / shares.sum()


draws = given(n=st.integers(1, 7), seed=st.integers(0, 10_000), lam=st.sampled_from([0.01, 0.1, 0.8, 5.0]))


@settings(max_examples=60, deadline=None)
@draws
def test_weights_are_those_of_every_active_set(n: int, seed: int, lam: float) -> None:
    similarity, shares = draw(n, seed)
    weights = pfedgraph_weights(similarity, shares, lam)
    assert check_row_stochastic(weights, n) is None
    for row, cosines in zip(weights.numpy(), similarity.numpy(), strict=True):
        np.testing.assert_allclose(row, by_active_sets(cosines, shares.numpy(), lam), rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@draws
def test_weights_are_those_of_a_solver(n: int, seed: int, lam: float) -> None:
    similarity, shares = draw(n, seed)
    weights = pfedgraph_weights(similarity, shares, lam)
    for row, cosines in zip(weights.numpy(), similarity.numpy(), strict=True):
        np.testing.assert_allclose(row, by_slsqp(cosines, shares.numpy(), lam), rtol=0, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 10_000), lam=st.floats(1e-6, 1e6))
def test_weights_meet_the_conditions_of_karush_kuhn_and_tucker(n: int, seed: int, lam: float) -> None:
    similarity, shares = draw(n, seed)
    for row, cosines in zip(pfedgraph_weights(similarity, shares, lam).numpy(), similarity.numpy(), strict=True):
        assert row.min() >= 0
        assert abs(row.sum() - 1) < 1e-12
        linear, _ = programme(cosines, shares.numpy(), lam)
        gradient = 2 * lam * row + linear
        multiplier = gradient[row > 0].mean()
        slack = 1e-9 * max(1.0, lam)
        assert np.abs(gradient[row > 0] - multiplier).max() < slack  # stationary where a weight is free
        assert (gradient[row == 0] >= multiplier - slack).all()  # and nothing to gain where it is 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_projection_is_nearer_than_any_other_point(points: list[list[float]]) -> None:
    given = torch.tensor(points, dtype=torch.float64)
    nearest = project_onto_simplex(given)
    others = torch.tensor(np.random.default_rng(0).dirichlet(np.full(4, 0.5), size=200))
    others = torch.cat([others, torch.eye(4, dtype=torch.float64)])
    for point, found in zip(given, nearest, strict=True):
        assert (torch.linalg.vector_norm(point - found) <= torch.linalg.vector_norm(point - others, dim=1) + 1e-9).all()


def test_points_of_the_simplex_stay() -> None:
    points = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(project_onto_simplex(points), points, rtol=0, atol=1e-15)


def test_limits_of_lambda() -> None:
    similarity, shares = draw(6, 0)
    similarity = similarity.clamp(-0.9, 0.85).fill_diagonal_(1.0)
    torch.testing.assert_close(pfedgraph_weights(similarity, shares, 1e12), shares.expand(6, -1), rtol=0, atol=1e-11)
    for lam in (1e-3, 1e-12, 5e-324):
        torch.testing.assert_close(
            pfedgraph_weights(similarity, shares, lam), torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-12
        )
    # two as similar as oneself: the mass is theirs too
    similarity[0, 3] = 0.95
    row = pfedgraph_weights(similarity, torch.full((6,), 1 / 6, dtype=torch.float64), 1e-6)[0]
    assert row.tolist() == pytest.approx([0.5, 0, 0, 0.5, 0, 0])


@pytest.mark.parametrize("n", [1, 2, 20])
@pytest.mark.parametrize("cosine", [1.0, 0.95])
def test_clients_alike_get_the_shares(n: int, cosine: float) -> None:
    similarity = torch.full((n, n), cosine, dtype=torch.float64).fill_diagonal_(1.0)
    shares = torch.full((n,), 1 / n, dtype=torch.float64)
    torch.testing.assert_close(pfedgraph_weights(similarity, shares, 0.8), shares.expand(n, -1), rtol=1e-14, atol=0)


# ---------------------------------------------------------------------------------------------------- from updates


def updates_of(states: dict[str, list[float]], examples: int = 5) -> Updates:
    made = {client: Update({"t": torch.tensor(t)}, None, examples) for client, t in states.items()}
    return stack_updates(1, made, ())


def strategy_of(config: RunConfig, source: list[float]) -> PFedGraph:
    strategy = PFedGraph(config)
    strategy.source = {"t": torch.tensor(source)}
    return strategy


def test_directions_are_taken_from_the_source(tiny_config: Config) -> None:
    updates = updates_of({"p": [3.0, 1.0], "q": [2.0, 2.0], "r": [1.0, 1.5]})
    weights = strategy_of(tiny_config(), [1.0, 1.0]).collaboration_matrix(updates)
    root = np.sqrt(0.5)
    similarity = np.array([[1, root, 0], [root, 1, root], [0, root, 1]])
    expected = [by_active_sets(row, np.full(3, 1 / 3), 0.8) for row in similarity]
    np.testing.assert_allclose(weights.numpy(), expected, rtol=0, atol=1e-7)


def test_shares_are_those_of_the_samples(tiny_config: Config) -> None:
    made = {name: Update({"t": torch.tensor([1.0])}, None, n) for name, n in {"p": 10, "q": 30}.items()}
    weights = strategy_of(tiny_config(), [0.0]).collaboration_matrix(stack_updates(1, made, ()))
    assert weights.tolist() == [pytest.approx([0.25, 0.75])] * 2


def test_who_has_not_moved_gets_the_shares_and_is_orthogonal_to_the_others(tiny_config: Config) -> None:
    strategy = strategy_of(tiny_config(), [1.0, 1.0])
    nobody = strategy.collaboration_matrix(updates_of({"p": [1.0, 1.0], "q": [1.0, 1.0]}))
    assert nobody.tolist() == [[0.5, 0.5]] * 2
    weights = strategy.collaboration_matrix(updates_of({"p": [1.0, 1.0], "q": [2.0, 1.0], "r": [1.0, 2.0]}))
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)
    expected = by_active_sets(np.array([0.0, 1.0, 0.0]), np.full(3, 1 / 3), 0.8)
    assert weights[1].tolist() == pytest.approx(expected)


def test_nothing_uploaded_gives_the_shares(tiny_config: Config) -> None:
    updates = stack_updates(1, {name: Update({}, None, n) for name, n in {"p": 10, "q": 30}.items()}, ())
    assert PFedGraph(tiny_config()).collaboration_matrix(updates).tolist() == [[0.25, 0.75]] * 2


@pytest.mark.parametrize(("weight", "terms"), [(0.5, {"pfedgraph.weight": 0.5}), (0.0, {})])
def test_the_local_term_is_asked_for(weight: float, terms: dict[str, float], tiny_config: Config) -> None:
    assert dict(PFedGraph(tiny_config(**{"pfedgraph.weight": weight})).objectives) == terms


# ------------------------------------------------------------------------------------------------------- whole runs


def weights_of(run: Any) -> Floats:
    with np.load(run.path / "collaboration.npz") as arrays:
        return arrays["weights"]


@pytest.mark.parametrize("adapter", ["bn-stats", "entropy"])
def test_a_real_run(adapter: str, run_local: Callable[..., Any]) -> None:
    weights = weights_of(run_local(strategy="pfedgraph", adapter=adapter))
    assert weights.shape == (4, 4, 4)
    assert weights.sum(axis=2) == pytest.approx(1.0)
    own = np.diagonal(weights, axis1=1, axis2=2)
    assert (own >= weights.max(axis=2) - 1e-6).all()  # with equal shares nobody is more alike than oneself
    assert np.ptp(weights) > 0.01


def test_without_anything_to_travel_it_is_fedavg(run_local: Callable[..., Any]) -> None:
    graph, average = (run_local(strategy=name, adapter="source", rounds=2) for name in ("pfedgraph", "fedavg"))
    assert np.array_equal(weights_of(graph), weights_of(average))
    assert graph.summary["accuracy"] == average.summary["accuracy"]


def test_a_large_lambda_is_fedavg(run_local: Callable[..., Any]) -> None:
    graph = run_local(strategy="pfedgraph", rounds=3, **{"pfedgraph.lam": 1e12})
    average = run_local(strategy="fedavg", rounds=3)
    assert weights_of(graph) == pytest.approx(weights_of(average), abs=1e-7)
    assert graph.summary["accuracy"] == average.summary["accuracy"]


def test_clients_with_one_step_a_round_feel_no_pull(run_local: Callable[..., Any]) -> None:
    """The term's gradient is zero where a round begins."""
    few = {"strategy": "pfedgraph", "adapter": "entropy", "rounds": 3, "entropy.learning-rate": 0.01}
    with_term, without = run_local(**few), run_local(**few, **{"pfedgraph.weight": 0.0})
    asked = [m.content.config_records[INFO] for m in with_term.sent if INFO in m.content.config_records]
    assert asked[0]["objective.pfedgraph.weight"] == 0.01
    assert with_term.summary["accuracy"] == without.summary["accuracy"]
    assert np.array_equal(weights_of(with_term), weights_of(without))
