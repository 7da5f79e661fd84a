"""FedAvg's weights."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedtta_flwr.strategies.fedavg import FedAvg, fedavg_weights
from fedtta_flwr.strategies.updates import Update, check_row_stochastic, mix, stack_updates


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
@example([0, 0])
def test_every_row_holds_the_shares_of_the_samples(examples: list[int]) -> None:
    weights = fedavg_weights(torch.tensor(examples, dtype=torch.float64))
    total = sum(examples)
    for row in weights.tolist():
        for weight, n in zip(row, examples, strict=True):
            assert weight == pytest.approx(n / total if total else 1 / len(examples), rel=1e-12)
    assert check_row_stochastic(weights, len(examples)) is None


def test_one_client_keeps_its_own() -> None:
    assert fedavg_weights(torch.tensor([7.0])).tolist() == [[1.0]]


def test_equal_samples_give_one_over_n() -> None:
    assert torch.equal(fedavg_weights(torch.full((4,), 10.0)), torch.full((4, 4), 0.25))


def test_everybody_gets_the_same_weighted_mean(tiny_config) -> None:
    updates = {
        f"client-0{i}": Update({"t": torch.tensor([float(value)])}, None, n)
        for i, (value, n) in enumerate([(1, 10), (2, 10), (7, 20)])
    }
    stacked = stack_updates(1, updates, ())
    strategy = FedAvg(tiny_config(strategy="fedavg"))
    mixed = mix(strategy.collaboration_matrix(stacked), stacked.state)["t"]
    assert mixed.flatten().tolist() == pytest.approx([(10 + 20 + 140) / 40] * 3)
    assert strategy.descriptor == ""
