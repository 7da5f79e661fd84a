"""Tent against its equation: hand-written network, entropy, gradient by autograd, Adam in plain arithmetic."""

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.entropy import Entropy
from fedtta_flwr.adaptation.tent import Tent
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import EntropyOptions, TentOptions
from tests.adaptation.oracle import logits_of

NAMES = ["bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"]
RATE = 0.02


def tent(model: nn.Module, **options) -> Tent:
    return Tent(model, TentOptions(**{"learning_rate": RATE} | options))


def mean_entropy(logits: Tensor) -> Tensor:
    total = logits.new_zeros(())
    for row in logits:
        p = row.exp() / row.exp().sum()
        total = total - sum(q * q.log() for q in p)
    return total / len(logits)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_steps_are_those_of_the_equation(tiny, images, optimizer: str) -> None:
    model = tiny(torch.float64)
    p = {name: t.detach().clone().requires_grad_(name in NAMES) for name, t in model.named_parameters()}
    moments = {name: (torch.zeros_like(p[name]), torch.zeros_like(p[name])) for name in NAMES}
    adapter = tent(model, optimizer=optimizer)
    for t, count in enumerate((6, 2, 1, 5), start=1):
        x = images(count, seed=t, dtype=torch.float64)
        expected = logits_of(p, x)
        torch.testing.assert_close(adapter.adapt(x), expected.detach(), rtol=1e-9, atol=1e-11)
        gradients = torch.autograd.grad(mean_entropy(expected), [p[name] for name in NAMES])
        for name, g in zip(NAMES, gradients, strict=True):
            m, v = moments[name]
            if optimizer == "adam":
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                change = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            else:
                m = 0.9 * m + g
                change = m
            moments[name] = (m, v)
            p[name] = (p[name] - RATE * change).detach().requires_grad_()
            torch.testing.assert_close(adapter.adapted_state()[name], p[name].detach(), rtol=1e-7, atol=1e-9)
    assert list(adapter.adapted_state()) == NAMES


def test_the_entropy_goes_down(tiny, images) -> None:
    adapter, x = tent(tiny(), learning_rate=0.01), images(8)
    values = [mean_entropy(adapter.adapt(x)).item() for _ in range(10)]
    assert values[-1] < values[0]


def test_predictions_use_the_statistics_of_their_own_batch_and_running_ones_stay(tiny, images) -> None:
    model = tiny()
    running = {name: t.clone() for name, t in model.named_buffers()}
    adapter, x = tent(model, learning_rate=1e-30), images(5)
    assert torch.equal(adapter.predict(x), adapter.adapt(x))
    with torch.no_grad():
        torch.testing.assert_close(adapter.predict(x), logits_of(dict(tiny().named_parameters()), x))
    assert all(torch.equal(t, running[name]) for name, t in adapter.model.named_buffers())


def test_one_value_per_channel_uses_the_running_statistics(tiny, images) -> None:
    adapter, x = tent(tiny(), learning_rate=1e-30), images(1, size=1)
    with torch.no_grad():
        expected = tiny().eval()(x)
    torch.testing.assert_close(adapter.adapt(x), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 4), nn.LayerNorm([4, 4, 4]), nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4)]
)
def test_every_kind_of_normalisation_with_affine_parameters_adapts(norm: nn.Module, images) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    adapter = tent(model)
    before = {name: t.clone() for name, t in adapter.adapted_state().items()}
    assert list(before) == ["1.weight", "1.bias"]
    adapter.adapt(images(6))
    assert all(not torch.equal(t, before[name]) for name, t in adapter.adapted_state().items())


def test_a_model_without_affine_parameters_is_refused(no_norm) -> None:
    for model in (no_norm(), nn.Sequential(nn.BatchNorm2d(3, affine=False))):
        with pytest.raises(ConfigError, match=r"^adapter = 'tent': \w+ has no normalisation layer") as caught:
            tent(model)
        assert "\n" not in str(caught.value)


def test_tent_is_the_affine_part_of_one_sgd_step_of_tta_grad(tiny, images) -> None:
    """From the same state, plain gradient descent moves the affine parameters alike."""
    a = tent(tiny(torch.float64), optimizer="sgd")
    b = Entropy(tiny(torch.float64), EntropyOptions(learning_rate=RATE))
    x = images(6, dtype=torch.float64)
    torch.testing.assert_close(a.adapt(x), b.adapt(x), rtol=1e-12, atol=1e-13)
    for name in NAMES:
        torch.testing.assert_close(a.adapted_state()[name], b.adapted_state()[name], rtol=1e-12, atol=1e-13)
