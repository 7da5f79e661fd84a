"""TTA-grad's presets: the papers' SGD bit for bit, and the published code's hard pseudo-labels under Adam."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.entropy import Entropy, entropy, hard_pseudo_label, marginal_entropy
from fedtta_flwr.options import EntropyOptions


def plain_step(model: nn.Module, x: Tensor, rate: float) -> Tensor:
    """One SGD step on the mean entropy, in torch's train mode but for dropout."""
    model.train()
    model.drop.eval()
    logits = model(x)
    log_p = F.log_softmax(logits, dim=-1)
    loss = -(log_p.exp() * log_p).sum(dim=-1).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.add_(g, alpha=-rate)
    return logits.detach()


def test_the_default_is_plain_gradient_descent_bit_for_bit(tiny, images) -> None:
    adapter, model = Entropy(tiny(), EntropyOptions(learning_rate=0.03)), tiny()
    for seed, count in enumerate((6, 1, 4)):
        x = images(count, seed=seed)
        assert torch.equal(adapter.adapt(x), plain_step(model, x, 0.03))
        own = model.state_dict()
        assert all(torch.equal(t, own[name]) for name, t in adapter.adapted_state().items())
    assert adapter.local_state() == {}


def test_the_published_codes_preset(tiny, images) -> None:
    """Adam's steps in plain arithmetic on -log max p, over batches whose statistics move the running ones."""
    options = EntropyOptions(loss="hard-pl", optimizer="adam", learning_rate=0.02)
    adapter, model = Entropy(tiny(torch.float64), options), tiny(torch.float64)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    model.drop.eval()
    for t, count in enumerate((6, 3, 2), start=1):
        x = images(count, seed=t, dtype=torch.float64)
        logits = model(x)
        labels = [max(range(3), key=row.tolist().__getitem__) for row in logits]
        loss = sum(row.exp().sum().log() - row[y] for row, y in zip(logits, labels, strict=True)) / count
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(adapter.adapt(x), logits.detach(), rtol=1e-9, atol=1e-11)
        with torch.no_grad():
            for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
                m, v = moments[name]
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                moments[name] = (m, v)
                p -= 0.02 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        own = model.state_dict()
        for name, value in adapter.adapted_state().items():
            torch.testing.assert_close(value, own[name], rtol=1e-6, atol=1e-8)
    assert set(adapter.local_state()) == {"optimizer.step", "optimizer.exp_avg", "optimizer.exp_avg_sq"}


def test_moments_persist_when_a_mixture_is_installed(tiny, images) -> None:
    adapter = Entropy(tiny(), EntropyOptions(optimizer="adam"))
    initial = {name: t.clone() for name, t in adapter.adapted_state().items()}
    adapter.adapt(images(4))
    moments = {name: t.clone() for name, t in adapter.local_state().items()}
    adapter.load_adapted_state(initial)
    assert all(torch.equal(t, moments[name]) for name, t in adapter.local_state().items())
    assert moments["optimizer.step"].tolist() == [1.0] * len(list(adapter.model.parameters()))


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_losses(scale: float) -> None:
    logits = scale * torch.randn((5, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(hard_pseudo_label(logits), F.cross_entropy(logits, logits.argmax(1), reduction="none"))
    mean = logits.softmax(dim=1).mean(dim=0)
    torch.testing.assert_close(marginal_entropy(logits), -(mean * mean.log()).sum())
    assert entropy(logits).mean() <= marginal_entropy(logits)
    torch.testing.assert_close(marginal_entropy(logits[:1]), entropy(logits)[0])
