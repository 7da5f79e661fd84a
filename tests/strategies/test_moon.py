"""MOON: the request, the step that a client takes by it, and where it is FedAvg."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.moon import MOON
from tests.strategies.second_round import Outputs, check_that_the_previous_model_survives, second_round
from tests.test_client import metrics, personal_states

Config = Callable[..., RunConfig]
SETTINGS = {"strategy": "moon", "adapter": "entropy", "entropy.learning-rate": 0.05}


def test_the_request_holds_the_settings(tiny_config: Config) -> None:
    assert MOON(tiny_config()).objectives == {"moon.mu": 1.0, "moon.temperature": 0.5}
    changed = tiny_config(**{"moon.mu": 5.0, "moon.temperature": 2.0})
    assert MOON(changed).objectives == {"moon.mu": 5.0, "moon.temperature": 2.0}


def test_a_client_steps_down_the_sum_of_its_loss_and_the_contrast(tiny_config: Config, resnet8: nn.Module) -> None:
    def term(present: Outputs, received: Outputs, previous: Outputs) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for z, a, r in zip(present[0], received[0], previous[0], strict=True):
            near, far = (torch.exp(z @ other / (z.norm() * other.norm()) / 0.2) for other in (a, r))
            total = total - torch.log(near / (near + far))
        return 3.0 * total / len(present[0])

    second_round(tiny_config(**SETTINGS, **{"moon.mu": 3.0, "moon.temperature": 0.2}), resnet8, term).check()


def test_the_previous_model_survives_between_visits(tiny_config: Config) -> None:
    check_that_the_previous_model_survives(tiny_config(**SETTINGS))


def test_it_differs_from_fedavg_as_soon_as_there_is_a_previous_model(run_local: Any) -> None:
    run = run_local(**SETTINGS)
    found, average = personal_states(run), personal_states(run_local(**SETTINGS | {"strategy": "fedavg"}))
    assert found[2, "client-00"] == average[2, "client-00"]  # before the first step all three models are the source
    assert found[3, "client-00"] != average[3, "client-00"]
    for nodes in (1, 5):
        assert metrics(run_local(nodes=nodes, **SETTINGS)) == metrics(run)


@pytest.mark.parametrize("adapter", ["bn-stats", "source"])
def test_without_gradients_it_is_fedavg_bit_for_bit(run_local: Any, adapter: str) -> None:
    few = {"adapter": adapter, "rounds": 3}
    assert metrics(run_local(strategy="moon", **few)) == metrics(run_local(strategy="fedavg", **few))
