"""LAME against its fixed-point equation, by plain loops over samples and classes."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedtta_flwr.adaptation.lame import LAME
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import LAMEOptions


def parts(model: nn.Module, x: Tensor) -> tuple[list[list[float]], list[list[float]]]:
    """Unit features and predictions of the tiny network in eval mode."""
    model = model.eval()
    with torch.no_grad():
        for conv, bn in ((model.conv1, model.bn1), (model.conv2, model.bn2)):
            x = torch.relu(bn(conv(x)))
        f = x.mean(dim=(2, 3))
        q = model.head(f).softmax(dim=1)
    return (f / (f * f).sum(dim=1, keepdim=True).sqrt()).tolist(), q.tolist()


def affinities(f: list[list[float]], kind: str, k: int, sigma: float) -> list[list[float]]:
    n = len(f)
    if kind == "linear":
        return [[sum(u * v for u, v in zip(a, b, strict=True)) for b in f] for a in f]
    d = [[math.dist(a, b) for b in f] for a in f]
    near = [sorted((j for j in range(n) if j != i), key=lambda j: d[i][j])[:k] for i in range(n)]
    if kind == "rbf":
        width = sigma * sum(d[i][near[i][-1]] for i in range(n)) / n
        return [[0.0 if i == j else math.exp(-(d[i][j] ** 2) / (2 * width**2)) for j in range(n)] for i in range(n)]
    return [[((j in near[i]) + (i in near[j])) / 2 for j in range(n)] for i in range(n)]


def fixed_point(q: list[list[float]], w: list[list[float]], weight: float, steps: int) -> list[list[float]]:
    z, n, classes = q, len(q), range(len(q[0]))
    for _ in range(steps):
        z = [[q[b][k] * math.exp(weight * sum(w[b][c] * z[c][k] for c in range(n))) for k in classes] for b in range(n)]
        z = [[value / sum(row) for value in row] for row in z]
    return z


@pytest.mark.parametrize("affinity", ["knn", "rbf", "linear"])
@pytest.mark.parametrize(("count", "k", "weight", "steps"), [(9, 5, 1.0, 1), (9, 2, 0.7, 4), (4, 5, 1.0, 40)])
def test_predictions_are_those_of_the_equations(tiny, images, affinity, count, k, weight, steps) -> None:
    options = LAMEOptions(
        affinity=affinity, neighbours=k, sigma=1.3, bound_weight=weight, max_steps=steps, tolerance=0.0
    )
    x = images(count, dtype=torch.float64)
    f, q = parts(tiny(torch.float64), x)
    expected = fixed_point(q, affinities(f, affinity, k, 1.3), weight, steps)
    adapter = LAME(tiny(torch.float64), options)
    torch.testing.assert_close(
        adapter.adapt(x).exp(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-8
    )
    assert torch.equal(adapter.adapt(x), adapter.predict(x))


def test_it_ends_where_the_equation_holds(tiny, images) -> None:
    adapter, x = LAME(tiny(torch.float64), LAMEOptions(tolerance=0.0)), images(10, dtype=torch.float64)
    f, q = parts(tiny(torch.float64), x)
    z = adapter.predict(x).exp().tolist()
    again = fixed_point(q, affinities(f, "knn", 5, 1.0), 1.0, 1)
    assert again != z
    w = affinities(f, "knn", 5, 1.0)
    mapped = [[q[b][k] * math.exp(sum(w[b][c] * z[c][k] for c in range(10))) for k in range(3)] for b in range(10)]
    mapped = [[value / sum(row) for value in row] for row in mapped]
    torch.testing.assert_close(torch.tensor(mapped), torch.tensor(z), rtol=1e-5, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 3.0), st.integers(2, 8))
def test_the_objective_never_rises_where_the_affinities_are_positive_semidefinite(seed, weight, count) -> None:
    generator = torch.Generator().manual_seed(seed)
    f = torch.nn.functional.normalize(torch.randn((count, 4), generator=generator, dtype=torch.float64), dim=1)
    log_q = torch.randn((count, 3), generator=generator, dtype=torch.float64).log_softmax(dim=1)
    w = weight * f @ f.T

    def objective(z: Tensor) -> float:
        return ((z * (z.log() - log_q)).sum() - (z * (w @ z)).sum() / 2).item()

    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    values = [objective(log_q.exp())]
    for steps in range(1, 8):
        adapter = LAME(model, LAMEOptions(max_steps=steps, tolerance=0.0))
        values.append(objective(adapter._smooth(log_q, w).exp()))
    assert all(b <= a + 1e-10 for a, b in itertools.pairwise(values))


def test_without_weight_or_neighbours_predictions_are_the_models(tiny, images) -> None:
    with torch.no_grad():
        expected = tiny().eval()(images(5)).log_softmax(dim=1)
    assert torch.equal(LAME(tiny(), LAMEOptions(bound_weight=0.0)).adapt(images(5)), expected)
    torch.testing.assert_close(LAME(tiny(), LAMEOptions()).adapt(images(5)[:1]), expected[:1])


def test_an_uncertain_sample_follows_its_neighbours() -> None:
    """Features in two clusters; one sample of the first is on the fence."""
    f = torch.tensor([[1.0, 0.0], [1.0, 0.01], [1.0, -0.01], [0.0, 1.0], [0.01, 1.0], [-0.01, 1.0]])
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    log_q = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.49, 0.51], [0.1, 0.9], [0.1, 0.9], [0.1, 0.9]]).log()
    adapter = LAME(model, LAMEOptions(neighbours=2))
    z = adapter._smooth(log_q, adapter._affinity(nn.functional.normalize(f, dim=1)))
    assert z.argmax(dim=1).tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("affinity", ["knn", "rbf", "linear"])
def test_identical_features(tiny, images, affinity) -> None:
    adapter = LAME(tiny(), LAMEOptions(affinity=affinity))
    logits = adapter.adapt(images(1).repeat(7, 1, 1, 1))
    assert logits.isfinite().all()
    assert adapter.rolled_back == 0


def test_nothing_travels_or_changes(tiny, images) -> None:
    model = tiny()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    adapter = LAME(model, LAMEOptions())
    adapter.adapt(images(6))
    assert adapter.adapted_state() == adapter.local_state() == {}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    with pytest.raises(ConfigError, match=r"^'lame' needs a classifier, and Sequential has no linear layer"):
        LAME(nn.Sequential(nn.Conv2d(3, 4, 3)), LAMEOptions())


def test_features_in_half_precision_are_compared_in_single(tiny, images) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = tiny().eval()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                logits: Tensor = self.body(x)
            return logits.float()

    x = images(9)
    half, whole = (LAME(model, LAMEOptions(affinity="linear")).adapt(x) for model in (Half(), tiny()))
    torch.testing.assert_close(half, whole, rtol=0, atol=0.1)
    assert LAME(Half(), LAMEOptions()).adapt(x).isfinite().all()
