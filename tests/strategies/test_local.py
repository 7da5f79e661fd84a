"""No collaboration."""

import pytest
import torch

from fedtta_flwr.strategies.local import Local
from fedtta_flwr.strategies.updates import Update, mix, stack_updates


@pytest.mark.parametrize("n", [1, 2, 30])
def test_everybody_keeps_his_own(n: int, tiny_config) -> None:
    updates = {f"client-{i:02d}": Update({"t": torch.randn(3)}, None, 5) for i in range(n)}
    stacked = stack_updates(1, updates, ())
    weights = Local(tiny_config(strategy="local")).collaboration_matrix(stacked)
    assert weights.tolist() == [[float(i == j) for j in range(n)] for i in range(n)]
    assert torch.equal(mix(weights, stacked.state)["t"], stacked.state["t"])


def test_no_descriptor_is_asked_for(tiny_config) -> None:
    assert Local(tiny_config(strategy="local")).descriptor == ""
