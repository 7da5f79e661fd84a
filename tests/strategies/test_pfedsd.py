"""pFedSD: the request, the step that a client takes by it, and where it is FedAvg."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.pfedsd import PFedSD
from tests.strategies.second_round import Outputs, check_that_the_previous_model_survives, second_round
from tests.test_client import metrics, personal_states

Config = Callable[..., RunConfig]
SETTINGS = {"strategy": "pfedsd", "adapter": "entropy", "entropy.learning-rate": 0.05}


def test_the_request_holds_the_settings(tiny_config: Config) -> None:
    assert PFedSD(tiny_config()).objectives == {"pfedsd.weight": 1.0, "pfedsd.temperature": 1.0}
    changed = tiny_config(**{"pfedsd.weight": 5.0, "pfedsd.temperature": 2.0})
    assert PFedSD(changed).objectives == {"pfedsd.weight": 5.0, "pfedsd.temperature": 2.0}


def test_a_client_steps_down_the_sum_of_its_loss_and_the_divergence(tiny_config: Config, resnet8: nn.Module) -> None:
    def term(present: Outputs, received: Outputs, previous: Outputs) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for logits, teacher in zip(present[1], previous[1], strict=True):
            p, q = (torch.exp(t / 2) / torch.exp(t / 2).sum() for t in (teacher, logits))
            total = total + 2**2 * sum(p[k] * (torch.log(p[k]) - torch.log(q[k])) for k in range(len(p)))
        return 3.0 * total / len(present[1])

    second_round(tiny_config(**SETTINGS, **{"pfedsd.weight": 3.0, "pfedsd.temperature": 2.0}), resnet8, term).check()


def test_the_previous_model_survives_between_visits(tiny_config: Config) -> None:
    check_that_the_previous_model_survives(tiny_config(**SETTINGS))


def test_it_differs_from_fedavg_as_soon_as_there_is_a_previous_model(run_local: Any) -> None:
    run = run_local(**SETTINGS)
    found, average = personal_states(run), personal_states(run_local(**SETTINGS | {"strategy": "fedavg"}))
    assert found[3, "client-00"] != average[3, "client-00"]
    for nodes in (1, 5):
        assert metrics(run_local(nodes=nodes, **SETTINGS)) == metrics(run)


@pytest.mark.parametrize("adapter", ["bn-stats", "source"])
def test_without_gradients_it_is_fedavg_bit_for_bit(run_local: Any, adapter: str) -> None:
    few = {"adapter": adapter, "rounds": 3}
    assert metrics(run_local(strategy="pfedsd", **few)) == metrics(run_local(strategy="fedavg", **few))
