"""FedProx: FedAvg with one step a round; by hand with two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.fedprox import FedProx
from tests.strategies.second_round import CLIENT, requested
from tests.test_client import Node, metrics, state_for

ENTROPY = {"adapter": "entropy", "entropy.learning-rate": 0.05}


def test_the_request_holds_mu(tiny_config: Callable[..., RunConfig]) -> None:
    assert FedProx(tiny_config()).objectives == {"fedprox.mu": 1.0}
    assert FedProx(tiny_config(**{"fedprox.mu": 0.01})).objectives == {"fedprox.mu": 0.01}


@pytest.mark.parametrize(
    "adapter", [ENTROPY, {"adapter": "tent", "tent.learning-rate": 0.01}], ids=["entropy-sgd", "tent-adam"]
)
def test_with_one_step_a_round_it_is_fedavg_bit_for_bit_and_with_more_it_is_not(run_local: Any, adapter: Any) -> None:
    for every, equal in ((1, True), (3, False)):
        pair = [run_local(strategy=name, **adapter, **{"aggregate-every": every}) for name in ("fedprox", "fedavg")]
        assert (metrics(pair[0]) == metrics(pair[1])) == equal


def test_the_second_step_is_pulled_back_by_mu_times_the_first(
    tiny_config: Callable[..., RunConfig], resnet8: nn.Module
) -> None:
    """theta_2 - theta_2(mu = 0) = -rate * mu * (theta_1 - source); the first steps are the same."""
    config = tiny_config(strategy="fedprox", **ENTROPY, **{"fedprox.mu": 4.0})
    once, twice, pulled = (
        state_for(Node(config).visit(CLIENT, slots=slots, **terms))
        for slots, terms in ((1, {}), (2, {}), (2, requested(config)))
    )
    found, expected = [], []
    for name, source in resnet8.named_parameters():
        found.append((pulled[name] - twice[name]).double().flatten())
        expected.append(-0.05 * 4.0 * (once[name][0] - source.detach()).double().flatten())
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-2, atol=1e-6)
    assert torch.cat(expected).abs().max() > 1e-4


def test_hosting_changes_nothing(run_local: Any) -> None:
    several = {"strategy": "fedprox", **ENTROPY, "aggregate-every": 2}
    one = metrics(run_local(nodes=1, **several))
    assert all(metrics(run_local(nodes=nodes, **several)) == one for nodes in (2, 5))


@pytest.mark.parametrize("adapter", ["bn-stats", "source"])
def test_without_gradients_it_is_fedavg_bit_for_bit(run_local: Any, adapter: str) -> None:
    few = {"adapter": adapter, "aggregate-every": 2}
    assert metrics(run_local(strategy="fedprox", **few)) == metrics(run_local(strategy="fedavg", **few))
