"""Numbers on a collaboration matrix, against loops in Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedtta_flwr.strategies.structure import STRUCTURE, entropy, evenness, self_weight, structure, within_group

ROWS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n).filter(any), min_size=n, max_size=n)
)


def matrix(counts: list[list[int]]) -> list[list[float]]:
    return [[value / sum(row) for value in row] for row in counts]


@given(ROWS, st.data())
def test_the_numbers_are_those_of_the_definitions(counts: list[list[int]], data: st.DataObject) -> None:
    rows = matrix(counts)
    n = len(rows)
    groups = data.draw(st.lists(st.sampled_from(["fog", "snow", None]), min_size=n, max_size=n))
    weights = torch.tensor(rows, dtype=torch.float64)
    found = structure(weights, groups)
    assert tuple(found) == STRUCTURE
    assert found["self_weight"] == pytest.approx(sum(rows[i][i] for i in range(n)) / n)
    nats = sum(-w * math.log(w) for row in rows for w in row if w) / n
    assert found["entropy"] == pytest.approx(nats, abs=1e-15)
    assert found["evenness"] == (pytest.approx(nats / math.log(n), abs=1e-15) if n > 1 else None)
    inside = [
        sum(w for w, group in zip(row, groups, strict=True) if group == own)
        for row, own in zip(rows, groups, strict=True)
        if own is not None
    ]
    assert found["within_group"] == (pytest.approx(sum(inside) / len(inside)) if inside else None)


@pytest.mark.parametrize("n", [2, 20])
def test_the_extremes(n: int) -> None:
    alone, equal = torch.eye(n), torch.full((n, n), 1 / n)
    groups = [i % 2 for i in range(n)]
    assert structure(alone, groups) == {"self_weight": 1.0, "entropy": 0.0, "evenness": 0.0, "within_group": 1.0}
    assert structure(equal, groups) == {
        "self_weight": pytest.approx(1 / n),
        "entropy": pytest.approx(math.log(n)),
        "evenness": pytest.approx(1.0),
        "within_group": pytest.approx(0.5),
    }


def test_one_client() -> None:
    one = torch.ones(1, 1)
    assert (self_weight(one), entropy(one), evenness(one)) == (1.0, 0.0, None)
    assert within_group(one, ["fog"]) == 1.0
    assert within_group(one, [None]) is None


def test_who_has_no_group_is_left_out_but_may_be_in_nobody_elses() -> None:
    weights = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1], [0.0, 0.0, 1.0]])
    assert within_group(weights, ["fog", "fog", None]) == pytest.approx((0.7 + 0.9) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_order_of_clients_does_not_matter(dtype: torch.dtype) -> None:
    weights: Tensor = torch.rand((6, 6), generator=torch.Generator().manual_seed(0)).to(dtype).softmax(dim=1)
    groups = ["a", "b", "a", None, "b", "c"]
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved = structure(weights[order][:, order], [groups[i] for i in order])
    assert moved == pytest.approx(structure(weights, groups), rel=1e-12)
