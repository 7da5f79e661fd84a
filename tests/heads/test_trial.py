"""Every head that ships passes the trial that one of the user's own has to pass."""

import pytest
import torch

from fedtta_flwr.config import RunConfig
from fedtta_flwr.heads.base import NEEDS, SHARED, VALIDATION
from fedtta_flwr.heads.training import TwoHeads, statistics
from fedtta_flwr.heads.trial import try_out
from fedtta_flwr.models import build
from fedtta_flwr.registry import HEADS
from fedtta_flwr.resolve import resolve

X, Y = torch.rand(20, 3, 32, 32, generator=torch.Generator().manual_seed(2)), torch.arange(20) % 4


@pytest.mark.parametrize("name", HEADS)
def test_the_trial_asks_for_what_training_leaves_and_changes_nothing(name: str) -> None:
    method, options = resolve("head", name, HEADS), RunConfig().options(name)
    net = TwoHeads(build("cnn", 4), method.recipe(options))
    before = {key: t.clone() for key, t in net.state_dict().items()}
    try_out(name, method, options, net, lambda: [(X, Y)], clients=3)
    assert all(torch.equal(t, before[key]) for key, t in net.state_dict().items())
    assert not net.extractor.training
    own = statistics(net, lambda: [(X, Y)], NEEDS)
    there = own.keys() | SHARED.values() | {"clients", *VALIDATION.values()}
    assert there == (NEEDS if net.recipe.rotation else NEEDS - {"rotation-head"})
