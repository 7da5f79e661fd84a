"""EATA against its equations: both filters, weights, mean prediction and Fisher term by plain loops in float64."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.eata import EATA
from fedtta_flwr.adaptation.tent import Tent
from fedtta_flwr.options import EATAOptions, TentOptions
from tests.adaptation.oracle import entropy_of, logits_of

NAMES = ["bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"]
RATE = 0.05


def eata(model: nn.Module, **options) -> EATA:
    return EATA(model, EATAOptions(**{"learning_rate": RATE} | options))


def cosine(a: list[float], b: list[float]) -> float:
    return sum(u * v for u, v in zip(a, b, strict=True)) / math.sqrt(sum(u * u for u in a) * sum(v * v for v in b))


def distinct(model: nn.Module) -> nn.Module:
    """Let the network be certain of some samples and differ between them."""
    with torch.no_grad():
        model.head.weight.mul_(12)
    return model


@pytest.mark.parametrize("fisher_weight", [0.0, 3.0])
def test_steps_are_those_of_the_equations(tiny, images, fisher_weight: float) -> None:
    model = distinct(tiny(torch.float64))
    p = {name: t.detach().clone().requires_grad_(name in NAMES) for name, t in model.named_parameters()}
    anchor = {name: p[name].detach().clone() for name in NAMES}
    velocity = {name: torch.zeros_like(p[name]) for name in NAMES}
    squares: list[list[Tensor]] = []
    mean_prediction: list[float] | None = None
    adapter = eata(model, optimizer="sgd", fisher_weight=fisher_weight, fisher_samples=12, similarity_margin=0.9)
    margin, used = 0.4 * math.log(3), []
    for t, count in enumerate((8, 5, 7, 6), start=1):
        x = images(count, seed=t, dtype=torch.float64)
        logits = logits_of(p, x)
        torch.testing.assert_close(adapter.adapt(x), logits.detach(), rtol=1e-9, atol=1e-11)
        leaves = [p[name] for name in NAMES]
        if sum((8, 5, 7, 6)[: t - 1]) < 12:  # the samples before this batch
            labels = logits.argmax(dim=1)
            loss = -sum(row.log_softmax(0)[y] for row, y in zip(logits, labels, strict=True)) / count
            squares.append([g * g for g in torch.autograd.grad(loss, leaves, retain_graph=True)])
        terms, kept = [], []
        for row in logits:
            h, q = entropy_of(row), (row.exp() / row.exp().sum()).tolist()
            if h.item() < margin and (mean_prediction is None or abs(cosine(q, mean_prediction)) < 0.9):
                terms.append(math.exp(margin - h.item()) * h)
                kept.append(q)
        used.append(len(kept))
        if kept:
            loss = sum(terms) / len(terms)
            if fisher_weight:
                for i, name in enumerate(NAMES):
                    omega = sum(s[i] for s in squares) / len(squares)
                    loss = loss + fisher_weight * (omega * (p[name] - anchor[name]) ** 2).sum()
            gradients = torch.autograd.grad(loss, leaves)
            for name, g in zip(NAMES, gradients, strict=True):
                velocity[name] = 0.9 * velocity[name] + g
                p[name] = (p[name] - RATE * velocity[name]).detach().requires_grad_()
            new = [sum(column) / len(kept) for column in zip(*kept, strict=True)]
            old = mean_prediction
            mean_prediction = new if old is None else [0.9 * a + 0.1 * b for a, b in zip(old, new, strict=True)]
        for name in NAMES:
            torch.testing.assert_close(adapter.adapted_state()[name], p[name].detach(), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(adapter.local_state()["mean_prediction"].tolist(), mean_prediction)
    assert 0 < sum(used) < 26  # the filters keep some and leave out some
    assert any(0 < u < n for u, n in zip(used, (8, 5, 7, 6), strict=True))


def test_a_filter_that_keeps_nothing_makes_no_step(tiny, images) -> None:
    adapter = eata(tiny(), entropy_margin=1e-6)
    before = {name: t.clone() for name, t in (adapter.adapted_state() | adapter.local_state()).items()}
    assert torch.equal(adapter.adapt(images(6)), adapter.predict(images(6)))
    assert all(torch.equal(t, before[n]) for n, t in (adapter.adapted_state() | adapter.local_state()).items())


def test_redundant_samples_are_left_out(tiny, images) -> None:
    """After the first batch, no sample is less like the mean than a margin of 0 allows."""
    adapter = eata(distinct(tiny()), similarity_margin=0.0, entropy_margin=10.0)
    adapter.adapt(images(6))
    before = {name: t.clone() for name, t in adapter.adapted_state().items()}
    assert adapter.local_state()["mean_prediction"].sum().item() == pytest.approx(1.0)
    adapter.adapt(images(6, seed=1))
    assert all(torch.equal(t, before[name]) for name, t in adapter.adapted_state().items())


def test_samples_of_equal_certainty_give_tents_direction(tiny, images) -> None:
    """On one image many times, every filter passes and every weight is alike: Adam's first step is Tent's."""
    x = images(1).repeat(4, 1, 1, 1)
    a = eata(tiny(torch.float64), entropy_margin=10.0)
    b = Tent(tiny(torch.float64), TentOptions(learning_rate=RATE))
    torch.testing.assert_close(a.adapt(x.double()), b.adapt(x.double()))
    for name in NAMES:
        torch.testing.assert_close(a.adapted_state()[name], b.adapted_state()[name], rtol=1e-4, atol=1e-6)


def test_the_fisher_term_holds_the_parameters_back(tiny, images) -> None:
    distances = []
    for weight in (0.0, 1e4):
        adapter = eata(distinct(tiny()), fisher_weight=weight, entropy_margin=10.0, similarity_margin=1.0)
        before = {name: t.clone() for name, t in adapter.adapted_state().items()}
        for seed in range(12):
            adapter.adapt(images(8, seed=seed))
        distances.append(sum((t - before[name]).square().sum() for name, t in adapter.adapted_state().items()))
    assert distances[1] < distances[0]
    assert "fisher" not in eata(tiny()).local_state()
    assert eata(tiny(), fisher_weight=1.0).local_state()["fisher"].shape == (18,)
