"""SHOT-IM against its equations, by plain loops in float64, with SGD in plain arithmetic."""

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.shot import SHOT
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import SHOTOptions
from tests.adaptation.oracle import logits_of

RATE, DECAY = 0.05, 0.1


def information(logits: Tensor, weight: float) -> Tensor:
    """mean_b H(p_b) - weight * H(mean_b p_b)."""
    rows = [row.exp() / row.exp().sum() for row in logits]
    mean = sum(rows) / len(rows)
    entropies = sum(-sum(q * q.log() for q in row) for row in rows) / len(rows)
    return entropies + weight * sum(q * q.log() for q in mean)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_steps_are_those_of_the_equations(tiny, images, momentum: float, weight: float) -> None:
    model = tiny(torch.float64)
    p = {name: t.detach().clone().requires_grad_() for name, t in model.named_parameters()}
    names = [name for name in p if not name.startswith("head")]
    velocity = {name: torch.zeros_like(p[name]) for name in names}
    options = SHOTOptions(learning_rate=RATE, momentum=momentum, weight_decay=DECAY, diversity_weight=weight)
    adapter = SHOT(model, options)
    assert list(adapter.adapted_state()) == names
    for t, count in enumerate((6, 2, 5), start=1):
        x = images(count, seed=t, dtype=torch.float64)
        gradients = torch.autograd.grad(information(logits_of(p, x), weight), [p[name] for name in names])
        for name, g in zip(names, gradients, strict=True):
            g = g + DECAY * p[name]
            velocity[name] = momentum * velocity[name] + g
            step = g + momentum * velocity[name] if momentum else g
            p[name] = (p[name] - RATE * step).detach().requires_grad_()
        logits = adapter.adapt(x)
        torch.testing.assert_close(logits, logits_of(p, x).detach(), rtol=1e-8, atol=1e-10)
        assert torch.equal(logits, adapter.predict(x))
        for name in names:
            torch.testing.assert_close(adapter.adapted_state()[name], p[name].detach(), rtol=1e-8, atol=1e-10)


def test_the_mean_prediction_becomes_more_diverse(tiny, images) -> None:
    """The sign that forks get wrong: the entropy of the mean prediction is maximised."""

    def diversity(logits: Tensor) -> float:
        mean = logits.double().softmax(dim=1).mean(dim=0)
        return -(mean * mean.log()).sum().item()

    model = tiny()
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([1.5, 0.0, 0.0]))
    adapter = SHOT(model, SHOTOptions(weight_decay=0.0, diversity_weight=10.0))
    x = images(12)
    before = diversity(adapter.predict(x))
    for _ in range(10):
        adapter.adapt(x)
    assert diversity(adapter.predict(x)) > before


def test_the_classifier_and_running_statistics_stay(tiny, images) -> None:
    model = tiny()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    adapter = SHOT(model, SHOTOptions())
    adapter.adapt(images(6))
    for name, t in model.state_dict().items():
        stays = name.startswith("head") or "running" in name or "num_batches" in name
        assert torch.equal(t, before[name]) == stays, name


def test_a_single_image_has_nothing_to_say(tiny, images) -> None:
    """H(p) - H(p) = 0: without weight decay, nothing moves."""
    adapter = SHOT(tiny(torch.float64), SHOTOptions(weight_decay=0.0))
    before = {name: t.clone() for name, t in adapter.adapted_state().items()}
    adapter.adapt(images(1, dtype=torch.float64))
    for name, t in adapter.adapted_state().items():
        torch.testing.assert_close(t, before[name], rtol=0, atol=1e-12)


def test_a_model_without_a_classifier_or_nothing_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer"):
        SHOT(nn.Sequential(nn.Conv2d(3, 4, 3)), SHOTOptions())
    with pytest.raises(ConfigError, match="no parameter"):
        SHOT(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), SHOTOptions())
