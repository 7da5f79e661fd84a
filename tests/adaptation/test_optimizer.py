"""The moments of torch's optimisers, made before the first step: same steps, fixed form, undone and restored."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.errors import ConfigError

SETTINGS = [
    ("adam", {}),
    ("adam", {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 2), (4,), (1,), ())]


@pytest.mark.parametrize(("rule", "settings"), SETTINGS)
def test_steps_are_those_of_torch(rule: str, settings: dict) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours, rule, learning_rate=0.1, **settings)
    reference = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[rule](theirs, lr=0.1, **settings)
    form = {name: (t.shape, t.dtype) for name, t in optimizer.state.items()}
    for scale in (1.0, 2.0, 0.0, -3.0):
        optimizer.minimize(sum((scale * p + 1).square().sum() for p in ours))
        reference.zero_grad()
        sum((scale * p + 1).square().sum() for p in theirs).backward()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        assert all(p.grad is None for p in ours)
    assert {name: (t.shape, t.dtype) for name, t in optimizer.state.items()} == form


@pytest.mark.parametrize(("rule", "settings"), SETTINGS)
def test_copying_parameters_and_state_back_undoes_steps(rule: str, settings: dict) -> None:
    p = parameters()
    optimizer = Optimizer(p, rule, learning_rate=0.1, **settings)

    def step(scale: float) -> list[torch.Tensor]:
        optimizer.minimize(sum((scale * q + 1).square().sum() for q in p))
        return [q.detach().clone() for q in p]

    step(1.0)
    saved = [t.detach().clone() for t in (*p, *optimizer.state.values())]
    first = step(2.0)
    with torch.no_grad():
        for t, old in zip((*p, *optimizer.state.values()), saved, strict=True):
            t.copy_(old)
    assert all(torch.equal(a, b) for a, b in zip(first, step(2.0), strict=True))
    optimizer.forget()
    assert not any(t.any() for t in optimizer.state.values())


def test_names() -> None:
    assert {n: tuple(t.shape) for n, t in Optimizer(parameters(), "adam", learning_rate=1.0).state.items()} == {
        "optimizer.step": (4,),
        "optimizer.exp_avg": (12,),
        "optimizer.exp_avg_sq": (12,),
    }
    assert Optimizer(parameters(), "sgd", learning_rate=1.0).state == {}


def test_a_parameter_that_the_loss_does_not_use_has_a_gradient_of_zero() -> None:
    p = parameters()
    optimizer = Optimizer(p, "sgd", learning_rate=1.0)
    before = p[1].detach().clone()
    optimizer.minimize(p[0].sum())
    assert torch.equal(p[1], before)


def test_a_device_that_adapts_does_not_import_torchs_compiler() -> None:
    made = "p = torch.nn.Parameter(torch.ones(2)); o = Optimizer([p], rule, learning_rate=1.0); o.minimize(p.sum())"
    code = f"""
import sys, torch
from fedtta_flwr.adaptation.optimizer import Optimizer
for rule in ("adam", "sgd"):
    {made}
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_no_parameter_or_several_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter"):
        Optimizer([], "adam", learning_rate=1.0)
    mixed = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    with pytest.raises(ConfigError, match=r"torch\.float32, torch\.float64"):
        Optimizer(mixed, "adam", learning_rate=1.0)
