"""Distances and the weights that follow, against loops in Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtta_flwr.strategies import similarity
from fedtta_flwr.strategies.similarity import (
    cosines,
    distances,
    gram,
    median_distance,
    median_nearest,
    softmax_weights,
    squared_distances,
)

ROWS = st.integers(1, 7).flatmap(
    lambda p: st.lists(st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 3.0]), min_size=p, max_size=p), min_size=1)
)


@settings(max_examples=80, deadline=None)
@given(ROWS.filter(lambda rows: len(rows) < 8))
def test_distances_and_their_medians(rows: list[list[float]]) -> None:
    found = distances(torch.tensor(rows))
    expected = [[math.dist(a, b) for b in rows] for a in rows]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    others = [[d for j, d in enumerate(row) if j != i] for i, row in enumerate(expected)]
    if len(rows) == 1:
        assert median_distance(found) == median_nearest(found) == math.inf
        return
    pairs = [d for i, row in enumerate(expected) for d in row[:i]]
    assert median_distance(found).item() == pytest.approx(statistics.median_low(pairs), rel=1e-14)
    assert median_nearest(found).item() == pytest.approx(statistics.median_low(map(min, others)), rel=1e-14)


def test_distances_of_nearly_equal_rows_far_from_zero() -> None:
    """The expanded square has none of these digits."""
    base = torch.full((3, 40), 1e6, dtype=torch.float64)
    base[1, 0] += 1e-6
    base[2, 7] += 3e-6
    found = distances(base)
    steps = [(base[1, 0] - 1e6).item(), (base[2, 7] - 1e6).item()]
    expected = [steps[0], steps[1], math.hypot(*steps)]
    assert [found[0, 1].item(), found[0, 2].item(), found[1, 2].item()] == pytest.approx(expected, rel=1e-12)
    assert found.diagonal().tolist() == [0.0] * 3


@pytest.mark.parametrize("scale", [1e-38, 1e37])
def test_distances_over_the_whole_range_of_float32(scale: float) -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]]) * scale
    assert distances(rows)[0, 1].item() == pytest.approx(5 * scale, rel=1e-6)


def test_weights_are_a_softmax() -> None:
    distance = torch.tensor([[0.0, 1.0, 5.0], [1.0, 0.0, 2.0], [5.0, 2.0, 0.0]], dtype=torch.float64)
    for scale in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        rows = [[math.exp(-d / 0.3) for d in row] for row in distance.tolist()]
        expected = torch.tensor([[w / sum(row) for w in row] for row in rows], dtype=torch.float64)
        torch.testing.assert_close(softmax_weights(distance, scale), expected, rtol=1e-13, atol=0)


def test_a_scale_of_zero_is_the_limit() -> None:
    twins = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    expected = [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    assert softmax_weights(twins, 0.0).tolist() == softmax_weights(twins, torch.tensor(0.0)).tolist() == expected
    torch.testing.assert_close(softmax_weights(twins, 1e-300).tolist(), expected)
    assert softmax_weights(torch.zeros(4, 4), 0.0).tolist() == [[0.25] * 4] * 4


# ------------------------------------------------------------------------------------------------- of whole states

SHAPES = {"conv.weight": (2, 3), "bn.running_mean": (4,), "scalar": ()}


def draw(clients: int, seed: int, scale: float = 1.0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stacked states and a source model, float32."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: scale * torch.randn((clients, *shape), generator=generator) for name, shape in SHAPES.items()}
    return state, {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def vectors(state: dict[str, Tensor], client: int) -> list[float]:
    return [value for t in state.values() for value in t[client].flatten().tolist()]


def moves(state: dict[str, Tensor], source: dict[str, Tensor], clients: int) -> list[list[float]]:
    """theta_i - theta_0 with Python floats."""
    origin = [value for t in source.values() for value in t.flatten().tolist()]
    return [[a - b for a, b in zip(vectors(state, i), origin, strict=True)] for i in range(clients)]


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 6), seed=st.integers(0, 10_000), scale=st.sampled_from([1e-38, 1e-3, 1.0, 1e37]))
def test_distances_and_cosines_are_those_of_the_definitions(n: int, seed: int, scale: float) -> None:
    state, source = draw(n, seed, scale)
    products = gram(state, source, n)
    assert products.dtype == torch.float64
    distances, angles = squared_distances(products), cosines(products)
    delta = moves(state, source, n)
    for i in range(n):
        for j in range(n):
            expected = sum((a - b) ** 2 for a, b in zip(vectors(state, i), vectors(state, j), strict=True))
            assert distances[i, j].item() == pytest.approx(expected, rel=1e-12, abs=0)
            lengths = math.hypot(*delta[i]) * math.hypot(*delta[j])
            dot = math.fsum(a * b for a, b in zip(delta[i], delta[j], strict=True))
            assert angles[i, j].item() == pytest.approx(dot / lengths, abs=1e-14)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state, source = draw(5, 0)
    whole = gram(state, source, 5)
    for columns, rows in ((1, 9), (2, 1), (5, 2), (9, 3)):
        monkeypatch.setattr(similarity, "BLOCK", columns)
        monkeypatch.setattr(similarity, "ROWS", rows)
        torch.testing.assert_close(gram(state, source, 5), whole, rtol=1e-13, atol=1e-13)


def test_nothing_uploaded_is_no_distance_and_no_direction() -> None:
    products = gram({}, {}, 3)
    assert squared_distances(products).tolist() == [[0.0] * 3] * 3
    assert cosines(products).tolist() == [[0.0] * 3] * 3


def test_a_tensor_without_entries_counts_nothing() -> None:
    state, source = draw(3, 1)
    more = gram(state | {"empty": torch.zeros(3, 0)}, source | {"empty": torch.zeros(0)}, 3)
    assert torch.equal(more, gram(state, source, 3))


def test_a_client_far_away_costs_the_others_no_precision() -> None:
    source = {"t": torch.zeros(4)}
    near = torch.tensor([[1.0, 0, 0, 0], [1.0, 2**-20, 0, 0], [1.0, 0, 0, 0]])
    far = torch.full((1, 4), 1e37)
    distances = squared_distances(gram({"t": torch.cat([near, far])}, source, 4))
    assert distances[0, 1].item() == pytest.approx(2.0**-40, rel=1e-3)
    assert distances[0, 2].item() == 0.0
    assert distances[0, 3].item() == pytest.approx(4 * 1e74, rel=1e-5)


@pytest.mark.parametrize("n", [2, 7, 10, 20])
def test_equal_clients_are_no_distance_apart(n: int) -> None:
    """However the products are summed."""
    row = torch.randn(1000, generator=torch.Generator().manual_seed(n))
    assert not squared_distances(gram({"t": row.expand(n, -1)}, {"t": torch.zeros(1000)}, n)).any()


def test_a_client_that_has_not_moved_has_no_angle() -> None:
    state = {"t": torch.tensor([[1.0, 2.0], [1.0, 3.0], [0.0, 2.0]])}
    angles = cosines(gram(state, {"t": torch.tensor([1.0, 2.0])}, 3))
    assert angles.tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_states_are_left_alone() -> None:
    state, source = draw(3, 2)
    for dtype in (torch.float32, torch.float64):
        given = {name: t.to(dtype) for name, t in state.items()}
        before = {name: t.clone() for name, t in given.items()}
        gram(given, {name: t.to(dtype) for name, t in source.items()}, 3)
        assert all(torch.equal(given[name], before[name]) for name in given)
