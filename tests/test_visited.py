"""What a visit contributes: how sure its predictions were."""

import pytest
import torch

from fedtta_flwr.records import NOT_KNOWN
from fedtta_flwr.visited import Visited


def test_confidence_is_the_mean_probability_of_what_is_predicted() -> None:
    """Over samples, not over slots; by hand, of odds."""
    visited = Visited()
    assert visited.confidence == NOT_KNOWN
    visited.enter_confidence(torch.tensor([[3.0, 1.0], [1.0, 1.0], [1.0, 9.0]]).log())
    visited.enter_confidence(torch.tensor([[0.2, 1.8]], dtype=torch.bfloat16).log())
    assert visited.confidence == pytest.approx((0.75 + 0.5 + 0.9 + 0.9) / 4, abs=1e-3)


def test_what_is_no_prediction_has_no_confidence() -> None:
    visited = Visited()
    visited.enter_confidence(torch.tensor([[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]]))
    assert visited.confidence == NOT_KNOWN
    visited.enter_confidence(torch.tensor([[torch.nan, 0.0], [-torch.inf, 5.0]]))
    assert visited.confidence == 1.0
    visited.enter_confidence(torch.tensor([[0.0, 0.0]]))
    assert visited.confidence == 0.75
