"""Distances and the weights that follow, against loops in Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta_flwr.strategies.similarity import distances, median_distance, median_nearest, softmax_weights

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
