"""SAR against its equations: two filters, the climb, the step, and the recovery, by plain loops in float64."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.sar import SAR
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import SAROptions
from tests.adaptation.oracle import entropy_of, logits_of

NAMES = ["bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"]
RATE, RHO = 0.05, 0.05


def sar(model: nn.Module, **options) -> SAR:
    return SAR(model, SAROptions(**{"learning_rate": RATE, "rho": RHO} | options))


def certain(model: nn.Module, factor: float = 20.0) -> nn.Module:
    with torch.no_grad():
        model.head.weight.mul_(factor)
    return model


@pytest.mark.parametrize(("reset_below", "expected_resets"), [(0.0, 0), (0.125, 1), (0.2, 6)])
def test_steps_are_those_of_the_equations(tiny, images, reset_below: float, expected_resets: int) -> None:
    """Never reset, once with a step after it, and after each step."""
    model = certain(tiny(torch.float64))
    p = {name: t.detach().clone().requires_grad_(name in NAMES) for name, t in model.named_parameters()}
    source = {name: p[name].detach().clone() for name in NAMES}
    velocity = {name: torch.zeros_like(p[name]) for name in NAMES}
    mean_entropy, margin, first_kept, second_kept, resets = None, 0.4 * math.log(3), [], [], 0
    adapter = sar(model, reset_below=reset_below)
    for t, count in enumerate((8, 5, 9, 8, 7, 8), start=1):
        x = images(count, seed=t, dtype=torch.float64)
        logits = logits_of(p, x)
        torch.testing.assert_close(adapter.adapt(x), logits.detach(), rtol=1e-8, atol=1e-10)
        values = [entropy_of(row) for row in logits]
        kept = [b for b in range(count) if values[b].item() < margin]
        first_kept.append(len(kept) / count)
        if kept:
            g = torch.autograd.grad(sum(values[b] for b in kept) / len(kept), [p[name] for name in NAMES])
            norm = math.sqrt(sum(v * v for part in g for v in part.flatten().tolist()))
            moved = {n: t.detach() for n, t in p.items()}
            for name, part in zip(NAMES, g, strict=True):
                moved[name] = (p[name].detach() + RHO * part / norm).requires_grad_()
            perturbed = logits_of(moved, x)
            again = [entropy_of(perturbed[b]) for b in kept]
            again = [h for h in again if h.item() < margin]
            second_kept.append(len(again) / len(kept))
            if again:
                loss = sum(again) / len(again)
                g = torch.autograd.grad(loss, [moved[name] for name in NAMES])
                for name, part in zip(NAMES, g, strict=True):
                    velocity[name] = 0.9 * velocity[name] + part
                    p[name] = (p[name] - RATE * velocity[name]).detach().requires_grad_()
                mean_entropy = loss.item() if mean_entropy is None else 0.9 * mean_entropy + 0.1 * loss.item()
                if mean_entropy < reset_below:
                    resets += 1
                    mean_entropy = None
                    for name in NAMES:
                        p[name] = source[name].clone().requires_grad_()
                        velocity[name].zero_()
        for name in NAMES:
            torch.testing.assert_close(adapter.adapted_state()[name], p[name].detach(), rtol=1e-7, atol=1e-9)
        momentum = torch.cat([velocity[name].flatten() for name in NAMES])
        torch.testing.assert_close(adapter.local_state()["optimizer.momentum_buffer"], momentum, rtol=1e-7, atol=1e-9)
        expected = -1.0 if mean_entropy is None else mean_entropy
        assert adapter.local_state()["mean_entropy"].item() == pytest.approx(expected)
    assert any(0 < share < 1 for share in first_kept)
    assert any(share > 0 for share in second_kept)
    assert resets == expected_resets


def test_a_filter_that_keeps_nothing_makes_no_step(tiny, images) -> None:
    adapter = sar(tiny(), entropy_margin=1e-6)
    before = {name: t.clone() for name, t in (adapter.adapted_state() | adapter.local_state()).items()}
    assert torch.equal(adapter.adapt(images(6)), adapter.predict(images(6)))
    assert all(torch.equal(t, before[n]) for n, t in (adapter.adapted_state() | adapter.local_state()).items())


def test_a_climb_that_leaves_no_reliable_sample_leaves_the_parameters_exactly(tiny, images) -> None:
    """The climb makes the only sample uncertain; the published code would poison the parameters."""
    model = certain(tiny(), 3.0)
    adapter = sar(model, entropy_margin=0.8)
    before = {name: t.clone() for name, t in (adapter.adapted_state() | adapter.local_state()).items()}
    x = images(8)
    with torch.no_grad():
        values = [entropy_of(row).item() for row in adapter.predict(x)]
    margin = (min(values) + 1e-4) / math.log(3)  # the most certain sample alone, and only just
    adapter = sar(certain(tiny(), 3.0), entropy_margin=margin)
    assert adapter.adapt(x).isfinite().all()
    assert adapter.rolled_back == 0
    assert all(torch.equal(t, before[n]) for n, t in (adapter.adapted_state() | adapter.local_state()).items())


def test_top_layers_are_skipped_by_name(tiny, no_norm) -> None:
    adapter = sar(tiny(), skip="bn2, head")
    assert list(adapter.adapted_state()) == NAMES[:2]
    assert list(sar(tiny()).adapted_state()) == NAMES
    model = nn.ModuleDict({"layer4": nn.BatchNorm2d(2), "layer40": nn.BatchNorm2d(2), "encoder": nn.Module()})
    model["encoder"].layer4 = nn.LayerNorm(2)
    model["encoder"].norm1 = nn.LayerNorm(2)
    names = list(sar(model).adapted_state())
    assert names == ["layer40.weight", "layer40.bias", "encoder.norm1.weight", "encoder.norm1.bias"]
    with pytest.raises(ConfigError, match=r"sar\.skip = 'bn1,bn2'"):
        sar(tiny(), skip="bn1,bn2")
    with pytest.raises(ConfigError, match="adapter = 'sar'"):
        sar(no_norm())


class Block(nn.Module):
    """Residual, with what many call its normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x))


class Blocks(nn.Module):
    """Two of them, and a last ``norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x))).mean(dim=(2, 3)))


@pytest.mark.parametrize("within", ["", "1."], ids=["alone", "behind a module"])
def test_only_the_last_norm_is_skipped_and_not_those_of_the_blocks(within: str, images) -> None:
    model = nn.Sequential(nn.Identity(), Blocks()) if within else Blocks()
    adapter = sar(model, entropy_margin=1.1)
    before = {name: t.detach().clone() for name, t in model.named_parameters()}
    adapter.adapt(images(6))
    moved = {name for name, t in model.named_parameters() if not torch.equal(t, before[name])}
    assert moved == {f"{within}blocks.{i}.norm.{kind}" for i in range(2) for kind in ("weight", "bias")}
    assert moved == set(adapter.adapted_state())
