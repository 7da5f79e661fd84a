"""Balanced BN: the published identities, and every formula by plain loops in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.balanced_norm import BalancedStatistics, ClassBatch, balance, update
from fedtta_flwr.adaptation.layers import normalise_with, normalised_by, sample_moments

F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_of(labels: list[int], classes: int, momentum: float) -> ClassBatch:
    return ClassBatch.of(torch.tensor(labels), classes, momentum, F64)


def by_loops(means: Tensor, variances: Tensor, h: Tensor, labels: list[int], eta: float, share: float):
    """methods of one layer, class by class and pixel by pixel; returns lists of 0-d tensors' stacks [K, C]."""
    classes, channels = means.shape
    pixels = h.flatten(2)
    present = sorted(set(labels))
    new_means, new_variances = means.clone(), variances.clone()
    for c in range(channels):
        d, s, m, n = {}, {}, {}, {}
        for k in present:
            own = [b for b, label in enumerate(labels) if label == k]
            n[k] = len(own)
            m[k] = eta if eta == 0 or n[k] <= 1 / eta else 1 / n[k]
            deviations = [pixels[b, c] - means[k, c] for b in own]
            d[k] = m[k] * sum(v.mean() for v in deviations)
            s[k] = sum((v**2).mean() for v in deviations)
        for k in range(classes):
            mean, var = means[k, c], variances[k, c]
            if k in present:
                mean = mean + (1 - share) * d[k]
                var = var + (1 - share) * (m[k] * (s[k] - n[k] * variances[k, c]) - d[k] ** 2)
            mean = mean + share * sum(d.values()) / len(present)
            var = var + share * (
                sum(m[j] * s[j] - d[j] ** 2 for j in present) / len(present)
                - sum(m[j] * n[j] for j in present) / len(present) * var
            )
            new_means[k, c], new_variances[k, c] = mean, var
    return new_means, new_variances


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    side=st.integers(1, 3),
    eta=st.sampled_from([0.0, 0.01, 0.3, 0.5, 1.0]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_an_update_is_that_of_the_equations(labels, side, eta, share, seed) -> None:
    g = rng(seed)
    means, variances = torch.randn(4, 2, generator=g, dtype=F64), torch.rand(4, 2, generator=g, dtype=F64)
    h = torch.randn(len(labels), 2, side, side, generator=g, dtype=F64) * 2 + 5
    found = update(means, variances, h, batch_of(labels, 4, eta), share)
    for new, expected in zip(found, by_loops(means, variances, h, labels, eta, share), strict=True):
        torch.testing.assert_close(new, expected, rtol=1e-10, atol=1e-12)
    assert bool((found[1] >= -1e-12).all())
    if share == 0:
        absent = [k for k in range(4) if k not in labels]
        assert torch.equal(found[0][absent], means[absent])
        assert torch.equal(found[1][absent], variances[absent])


def test_one_class_with_many_samples_gets_the_batchs_own_moments() -> None:
    """methods.md 10.1, 4: n_k > 1 / eta; the variance is the mean of squares minus the square of the mean."""
    h = torch.randn(20, 3, 4, 4, generator=rng(), dtype=F64) * 3 + 1
    means, variances = torch.ones(5, 3, dtype=F64), torch.full((5, 3), 2.0, dtype=F64)
    new_means, new_variances = update(means, variances, h, batch_of([2] * 20, 5, 0.1), 0.0)
    torch.testing.assert_close(new_means[2], h.mean(dim=(0, 2, 3)), rtol=1e-12, atol=1e-12)
    expected = (h**2).mean(dim=(0, 2, 3)) - h.mean(dim=(0, 2, 3)) ** 2
    torch.testing.assert_close(new_variances[2], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("count", [20, 37, 50, 64, 100, 200])
def test_no_variance_of_a_constant_channel_is_negative(count: int, share: float) -> None:
    """n_k >= 1 / eta: what remains is a difference of equals, which float32 rounds to either side of 0."""
    values = torch.tensor([0.1, 1 / 3, 3.7, 100.3])
    h = values.view(1, 4, 1, 1).expand(count, 4, 4, 4)
    batch = ClassBatch.of(torch.ones(count, dtype=torch.int64), 3, 0.05, torch.float32)
    class_var = update(torch.full((3, 4), 0.7), torch.full((3, 4), 0.37), h, batch, share)[1]
    assert bool((class_var >= 0).all())
    remains = share * (1 - share) * 0.37
    assert bool(((class_var[1] - remains).abs() <= 1e-5 * values.square().clamp(min=1)).all())


def test_a_balanced_batch_reproduces_the_total_variance() -> None:
    """methods.md 10.1, 4: the law of total variance, with the biased variance between classes."""
    h = torch.randn(24, 3, 2, 2, generator=rng(), dtype=F64)
    labels = [b % 4 for b in range(24)]
    h = h + torch.tensor(labels, dtype=F64).view(-1, 1, 1, 1)
    new = update(torch.zeros(4, 3, dtype=F64), torch.ones(4, 3, dtype=F64), h, batch_of(labels, 4, 1.0), 0.0)
    mean, var = balance(*new)
    torch.testing.assert_close(mean, h.mean(dim=(0, 2, 3)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(var, h.var(dim=(0, 2, 3), correction=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_balance_is_the_mean_over_classes(unbiased: bool) -> None:
    means, variances = torch.randn(5, 3, generator=rng(), dtype=F64), torch.rand(5, 3, generator=rng(1), dtype=F64)
    mean, var = balance(means, variances, unbiased=unbiased)
    for c in range(3):
        m = sum(means[k, c] for k in range(5)) / 5
        between = sum((means[k, c] - m) ** 2 for k in range(5)) / (4 if unbiased else 5)
        torch.testing.assert_close(mean[c], m)
        torch.testing.assert_close(var[c], sum(variances[k, c] for k in range(5)) / 5 + between)


def test_equal_classes_are_balanced_exactly() -> None:
    mean, var = torch.rand(7, generator=rng()), torch.rand(7, generator=rng(1))
    for classes in (2, 3, 10, 100):
        balanced = balance(mean.expand(classes, -1), var.expand(classes, -1), unbiased=True)
        assert torch.equal(balanced[0], mean)
        assert torch.equal(balanced[1], var)


def test_a_momentum_of_zero_is_the_sources_batch_norm(tiny, images) -> None:
    """methods.md 10.1, 5."""
    model = tiny(F64).eval()
    layers = {"bn1": model.bn1, "bn2": model.bn2}
    statistics = BalancedStatistics(layers, 3, 0.1, role="teacher")
    x = images(6, dtype=F64)
    with torch.no_grad():
        expected = model(x)
        with normalised_by(model, statistics.updating(batch_of([0, 0, 1, 1, 1, 1], 3, 0.0))):
            torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
        with normalised_by(model, statistics.frozen()):
            assert torch.equal(model(x), expected)
    for name, t in (statistics.balanced | statistics.per_class).items():
        assert torch.equal(t, getattr(layers[name[:3]], f"running_{name[-4:].strip('_')}").expand(t.shape)), name
    assert "forward" not in vars(model.bn1)


def test_one_layer_normalises_with_what_it_has_just_learned() -> None:
    layer = nn.BatchNorm2d(2).to(F64).eval()
    nn.init.uniform_(layer.weight, 0.5, 2.0)
    model = nn.Sequential(layer)
    statistics, labels = BalancedStatistics({"0": layer}, 3, 0.2), [0, 2, 2, 0, 2]
    h = torch.randn(5, 2, 3, 3, generator=rng(), dtype=F64, requires_grad=True)
    means, variances = torch.zeros(3, 2, dtype=F64), torch.ones(3, 2, dtype=F64)
    new = by_loops(means, variances, h, labels, 0.3, 0.2)
    mean = new[0].mean(dim=0)
    var = new[1].mean(dim=0) + ((new[0] - mean) ** 2).mean(dim=0)
    expected = F.batch_norm(h, mean.detach(), var.detach(), layer.weight, layer.bias, eps=layer.eps)
    in_graph = (h - mean.view(1, 2, 1, 1)) / (var.view(1, 2, 1, 1) + layer.eps).sqrt() * layer.weight.view(1, 2, 1, 1)
    with normalised_by(model, statistics.updating(batch_of(labels, 3, 0.3))):
        out = model(h)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(statistics.per_class["0.class_mean"], new[0].detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(statistics.per_class["0.class_var"], new[1].detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.running_mean, mean.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.running_var, var.detach(), rtol=1e-10, atol=1e-12)
    # the gradient goes through this batch's share in the statistics
    weights = torch.randn(out.shape, generator=rng(2), dtype=F64)
    (found,) = torch.autograd.grad((out * weights).sum(), h)
    (wanted,) = torch.autograd.grad((in_graph * weights).sum(), h)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_statistics_are_taken_in_float32_of_half_precision_features() -> None:
    h = torch.randn(4, 3, 8, 8, generator=rng()).bfloat16()
    mean, var = update(
        torch.zeros(2, 3), torch.ones(2, 3), h, ClassBatch.of(torch.tensor([0, 1, 1, 0]), 2, 0.5, torch.float32), 0.0
    )
    assert mean.dtype == var.dtype == torch.float32
    torch.testing.assert_close(mean[0], h[[0, 3]].float().mean(dim=(0, 2, 3)), rtol=1e-5, atol=1e-6)


def test_features_without_pixels() -> None:
    h = torch.tensor([[1.0], [3.0], [10.0]], dtype=F64)
    mean, var = update(torch.zeros(2, 1, dtype=F64), torch.ones(2, 1, dtype=F64), h, batch_of([0, 0, 1], 2, 1.0), 0.0)
    assert mean.flatten().tolist() == [2.0, 10.0]
    assert var.flatten().tolist() == [1.0, 0.0]


def test_gradients_of_moments_and_of_the_normalisation() -> None:
    h = torch.randn(3, 2, 2, 3, generator=rng(), dtype=F64, requires_grad=True)
    mean, within = sample_moments(h)
    torch.testing.assert_close(mean, h.mean(dim=(2, 3)))
    torch.testing.assert_close(within, h.var(dim=(2, 3), correction=0))
    assert torch.autograd.gradcheck(sample_moments, h)
    assert torch.autograd.gradcheck(lambda t: sample_moments(t)[0], h)

    layer = nn.BatchNorm2d(2).to(F64).eval()
    moments = (
        torch.tensor([0.5, -1.0], dtype=F64).requires_grad_(),
        torch.tensor([0.3, 2.0], dtype=F64).requires_grad_(),
    )
    weights = (
        torch.tensor([2.0, -0.5], dtype=F64).requires_grad_(),
        torch.tensor([0.1, 0.2], dtype=F64).requires_grad_(),
    )

    def normalised(h, mean, variance, weight, bias):
        del layer.weight, layer.bias
        layer.weight, layer.bias = weight, bias
        return normalise_with(h, mean, variance, layer)

    plain = nn.BatchNorm2d(2, affine=False).to(F64).eval()
    assert torch.autograd.gradcheck(normalised, (h, *moments, *weights))
    assert torch.autograd.gradcheck(lambda *t: normalise_with(*t, plain), (h, *moments))
