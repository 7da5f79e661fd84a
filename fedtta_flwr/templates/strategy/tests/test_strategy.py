"""What has to hold for any W, and what this one is made for."""

import math

import pytest
import torch
from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.updates import Update, Updates, check_row_stochastic, stack_updates
from torch import Tensor

from my_strategy.strategy import MyStrategy, my_strategy_weights


def tensors(clients: int) -> Tensor:
    return torch.randn((clients, 7), generator=torch.Generator().manual_seed(clients))


def round_of(**means: float) -> Updates:
    """A round in which every client sends one parameter, always the same, and the statistics of one layer."""
    states = {
        client: {"fc.bias": torch.zeros(3), "bn.running_mean": torch.full((2,), mean), "bn.running_var": torch.ones(2)}
        for client, mean in means.items()
    }
    return stack_updates(1, {client: Update(state, None, 10) for client, state in states.items()}, rejected=())


@pytest.mark.parametrize("clients", [1, 2, 5, 200])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_weights_are_a_collaboration_matrix(clients: int, scale: float) -> None:
    assert check_row_stochastic(my_strategy_weights(scale * tensors(clients), 0.1), clients) is None


def test_permuting_the_clients_permutes_the_weights() -> None:
    theta, order = tensors(5), torch.tensor([3, 0, 4, 1, 2])
    expected = my_strategy_weights(theta, 0.1)[order][:, order]
    torch.testing.assert_close(my_strategy_weights(theta[order], 0.1), expected)


def test_clients_that_are_equal_are_averaged() -> None:
    weights = my_strategy_weights(torch.ones(4, 7), 0.1)
    assert weights.flatten().tolist() == pytest.approx([1 / 4] * 16)


def test_the_weights_are_those_of_the_formula() -> None:
    weights = my_strategy_weights(torch.tensor([[0.0], [1.0], [5.0]]), temperature=0.3)
    unit = 0.3 * (1 + 16 + 25) / 3
    scores = [math.exp(-d / unit) for d in (0, 1, 25)]
    assert weights[0].tolist() == pytest.approx([score / sum(scores) for score in scores])


def test_the_means_decide_who_helps_whom() -> None:
    weights = MyStrategy(RunConfig()).collaboration_matrix(round_of(a=0.0, b=0.1, c=9.0))
    assert weights[0, 1] > 0.4
    assert weights[0, 2] < 0.01


def test_there_may_be_nothing_to_mix() -> None:
    updates = stack_updates(1, {client: Update({}, None, 10) for client in "ab"}, rejected=())
    assert torch.equal(MyStrategy(RunConfig()).collaboration_matrix(updates), torch.eye(2))
