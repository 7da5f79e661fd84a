"""ROID against its equations, sample by sample in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta_flwr.adaptation import roid
from fedtta_flwr.adaptation.roid import ROID, likelihood_ratio, symmetric
from fedtta_flwr.options import ROIDOptions
from tests.adaptation.oracle import Adam, by_batch, cross_entropy, detached, entropy, leaves, network, softmax


def rescaled(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(v - low) / (high - low) if high > low else 0.0 for v in values]


def weights_of(rows: list[torch.Tensor], mean: torch.Tensor, temperature: float) -> list[float]:
    diversities, certainties = [], []
    for row in rows:
        p = softmax(row)
        cosine = float((p * mean).sum() / (p.norm() * mean.norm()))
        diversities.append(1 - cosine)
        certainties.append(-entropy(row))
    diversities, certainties = rescaled(diversities), rescaled(certainties)
    middle = sum(diversities) / len(diversities)
    return [
        math.exp(d * c / temperature) if d >= middle else 0.0 for d, c in zip(diversities, certainties, strict=True)
    ]


def ratio(row: torch.Tensor, clip: float = 0.99) -> torch.Tensor:
    p = softmax(row)
    total = torch.zeros((), dtype=row.dtype)
    for k in range(len(p)):
        q = p[k] if p[k] < clip else torch.full_like(p[k], clip)
        total = total - q * (q / (1 - q) + 1e-5).log()
    return total


def corrected(logits: torch.Tensor) -> torch.Tensor:
    samples, classes = logits.shape
    prior = sum(softmax(row) for row in logits) / samples
    smooth = max(1 / samples, 1 / classes) / float(prior.max())
    published = [logits[:, k] * (prior[k] + smooth) / (1 + smooth * classes) for k in range(classes)]
    largest = (prior.max() + smooth) / (1 + smooth * classes)
    return torch.stack([column / largest for column in published], dim=1)


@pytest.fixture
def mirrored(monkeypatch) -> None:
    monkeypatch.setattr(roid, "strong", lambda x, generator, strength: x.flip(-1) * 0.8)


@pytest.mark.parametrize("consistency", [True, False])
@pytest.mark.parametrize("weighting", [True, False])
def test_steps_are_those_of_the_equations(tiny, images, mirrored, consistency: bool, weighting: bool) -> None:
    keep, past, temperature = 0.9, 0.8, 0.4
    options = ROIDOptions(
        learning_rate=0.02,
        source_momentum=keep,
        prior_momentum=past,
        temperature=temperature,
        consistency=consistency,
        weighting=weighting,
    )
    adapter, student = ROID(tiny(torch.float64), options), leaves(tiny(torch.float64))
    source, adapted = detached(student), [name for name in student if "bn" in name]
    adam, mean = Adam(adapted, 0.02), torch.full((3,), 1 / 3, dtype=torch.float64)
    for seed, count in enumerate((6, 1, 4, 8)):
        x = images(count, seed=seed, dtype=torch.float64)
        logits = network(student, x, by_batch)
        rows = list(logits.detach())
        weights = weights_of(rows, mean, temperature) if weighting else [1.0] * count
        if weighting:
            mean = past * mean + (1 - past) * sum(softmax(row) for row in rows) / count
        kept = [b for b in range(count) if weights[b]]
        views = network(student, (x.flip(-1) * 0.8)[kept], by_batch)
        loss = torch.zeros((), dtype=torch.float64)
        for i, b in enumerate(kept):
            loss = loss + weights[b] * ratio(logits[b])
            if consistency:
                loss = loss + weights[b] / 2 * (cross_entropy(logits[b], views[i]) + cross_entropy(views[i], logits[b]))
        student = adam.step(student, loss / count)
        student = {n: (keep * t + (1 - keep) * source[n]).detach().requires_grad_() for n, t in student.items()}

        before = adapter.predict(x)
        reported = adapter.adapt(x)
        torch.testing.assert_close(reported, corrected(logits.detach()), rtol=1e-8, atol=1e-10)
        assert torch.equal(before, reported)
        torch.testing.assert_close(adapter.local_state()["mean_prediction"], mean, rtol=1e-8, atol=1e-10)
        for name in adapted:
            torch.testing.assert_close(adapter.adapted_state()[name], student[name].detach(), rtol=1e-7, atol=1e-9)
    assert adapter.rolled_back == 0


def test_the_affine_parameters_travel_and_nothing_else(tiny) -> None:
    adapter = ROID(tiny(), ROIDOptions())
    assert sorted(adapter.adapted_state()) == ["bn1.bias", "bn1.weight", "bn2.bias", "bn2.weight"]
    assert adapter.local_state()["mean_prediction"].tolist() == pytest.approx([1 / 3] * 3)


def test_samples_that_are_all_alike_count_once_each(tiny, images) -> None:
    adapter = ROID(tiny(), ROIDOptions())
    for x in (images(1), images(1).expand(6, -1, -1, -1), torch.zeros(4, 3, 6, 6)):
        logits = adapter.model(x)
        assert adapter._weights(logits).tolist() == [1.0] * len(x)
        assert adapter.adapt(x).isfinite().all()
    assert adapter.rolled_back == 0


def test_a_correction_leaves_the_likeliest_class_as_sure_as_it_is(tiny) -> None:
    """So that a collapse is seen by it, whatever the number of classes."""
    adapter = ROID(tiny(), ROIDOptions())
    for classes in (3, 100):
        logits = torch.zeros(10, classes)
        logits[:, 0] = 12.0
        assert (adapter._corrected(logits).softmax(dim=1)[:, 0] > 0.99).all()
        even = torch.eye(classes) * 5
        torch.testing.assert_close(adapter._corrected(even), even)


def test_an_answer_is_not_corrected(tiny, images) -> None:
    adapter, plain = ROID(tiny(), ROIDOptions()), ROID(tiny(), ROIDOptions(prior_correction=False))
    assert torch.equal(adapter.answer(images(5)), plain.predict(images(5)))
    assert not torch.equal(adapter.answer(images(5)), adapter.predict(images(5)))


def test_everything_switched_off_and_no_step_towards_the_source(tiny, images) -> None:
    adapter = ROID(tiny(), ROIDOptions(weighting=False, consistency=False, prior_correction=False, source_momentum=1.0))
    with torch.no_grad():
        expected = network({n: p.double() for n, p in tiny().named_parameters()}, images(5).double(), by_batch)
    torch.testing.assert_close(adapter.adapt(images(5)).double(), expected, rtol=1e-4, atol=1e-5)


def test_a_source_momentum_of_zero_never_leaves_the_source(tiny, images) -> None:
    adapter = ROID(tiny(), ROIDOptions(source_momentum=0.0))
    for seed in range(3):
        adapter.adapt(images(5, seed=seed))
    for name, t in adapter.adapted_state().items():
        assert torch.equal(t, tiny().get_parameter(name))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-60, 60), min_size=2, max_size=6), st.integers(0, 100))
def test_losses_of_single_rows(row: list[float], seed: int) -> None:
    a = torch.tensor([row], dtype=torch.float64)
    b = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert float(likelihood_ratio(a)) == pytest.approx(float(ratio(a[0])), rel=1e-9, abs=1e-9)
    assert float(symmetric(a, b)) == pytest.approx(float(symmetric(b, a)), rel=1e-12)
    assert likelihood_ratio(a).isfinite().all()
    # a probability at the clip has no gradient: a certain sample pulls nothing
    certain = torch.tensor([[100.0, 0.0, 0.0]], requires_grad=True)
    (g,) = torch.autograd.grad(likelihood_ratio(certain).sum(), certain)
    assert float(g.abs().max()) < 1e-6
