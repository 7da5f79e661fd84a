"""TTA-grad against its equations: one SGD step, and running statistics that move by a tenth."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.entropy import Entropy, entropy
from fedtta_flwr.options import EntropyOptions
from fedtta_flwr.records import from_arrays, to_arrays

RATE = 0.05


def adapter_of(model: nn.Module, rate: float = RATE) -> Entropy:
    return Entropy(model, EntropyOptions(learning_rate=rate))


def by_hand(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The tiny network with batch statistics as a function of its parameters; also its layers' inputs' moments."""
    inputs = {}
    for number, stride in ((1, 1), (2, 2)):
        h = F.conv2d(x, p[f"conv{number}.weight"], stride=stride, padding=1)
        mean = h.mean(dim=(0, 2, 3), keepdim=True)
        centred = h - mean
        variance = (centred * centred).mean(dim=(0, 2, 3), keepdim=True)
        count = h.numel() // h.shape[1]
        unbiased = (centred * centred).sum(dim=(0, 2, 3)) / (count - 1)
        inputs[f"bn{number}"] = (mean.flatten().detach(), unbiased.detach())
        h = centred / (variance + 1e-5).sqrt()
        h = h * p[f"bn{number}.weight"].view(1, -1, 1, 1) + p[f"bn{number}.bias"].view(1, -1, 1, 1)
        x = h.clamp(min=0)
    return x.mean(dim=(2, 3)) @ p["head.weight"].T + p["head.bias"], inputs


def mean_entropy(logits: Tensor) -> Tensor:
    """-1/B sum_b sum_k p log p, by plain loops."""
    total = logits.new_zeros(())
    for row in logits:
        p = row.exp() / row.exp().sum()
        for k in range(len(p)):
            total = total - p[k] * p[k].log()
    return total / len(logits)


@pytest.mark.parametrize("batch", [6, 2])
def test_one_step_is_that_of_the_equations(tiny, images, batch: int) -> None:
    model, x = tiny(torch.float64), images(batch, dtype=torch.float64)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    before = {name: t.clone() for name, t in model.state_dict().items()}
    expected_logits, moments = by_hand(parameters, x)
    gradients = torch.autograd.grad(mean_entropy(expected_logits), list(parameters.values()))

    adapter = adapter_of(model)
    logits = adapter.adapt(x)
    torch.testing.assert_close(logits, expected_logits.detach(), rtol=1e-10, atol=1e-12)
    after = adapter.adapted_state()
    for (name, old), gradient in zip(parameters.items(), gradients, strict=True):
        torch.testing.assert_close(after[name], old.detach() - RATE * gradient, rtol=1e-10, atol=1e-12)
    assert any(not torch.equal(after[name], before[name]) for name in parameters)
    for layer, (mean, unbiased) in moments.items():
        for kind, batch_value in (("running_mean", mean), ("running_var", unbiased)):
            name = f"{layer}.{kind}"
            torch.testing.assert_close(after[name], 0.9 * before[name] + 0.1 * batch_value, rtol=1e-10, atol=1e-12)


def test_the_mean_entropy_goes_down(tiny, images) -> None:
    adapter, x = adapter_of(tiny(), rate=0.01), images(8)
    values = [entropy(adapter.adapt(x)).mean().item() for _ in range(20)]
    assert values[-1] < values[0]


def test_all_parameters_and_statistics_travel_and_no_counter(tiny) -> None:
    model = tiny()
    names = set(adapter_of(model).adapted_state())
    assert names == {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}


def test_predictions_use_the_running_statistics(tiny, images) -> None:
    adapter, x = adapter_of(tiny(), rate=1e-30), images(6)
    before = adapter.predict(x)
    logits = adapter.adapt(x)
    after = adapter.predict(x)
    assert not torch.equal(before, after)  # they moved
    assert not torch.allclose(logits, after, atol=1e-3)  # but are not the batch's
    assert not any(module.training for module in adapter.model.modules())


def test_dropout_stays_off(tiny, no_norm, images) -> None:
    adapter = adapter_of(tiny(), rate=1e-30)
    assert torch.equal(adapter.adapt(images(6)), adapter.adapt(images(6)))
    plain = adapter_of(no_norm(), rate=1e-30)
    logits = plain.adapt(images(6))
    assert torch.equal(logits, plain.predict(images(6)))
    assert torch.equal(logits, plain.adapt(images(6)))


def test_works_without_batch_norm(no_norm, images) -> None:
    adapter, x = adapter_of(no_norm()), images(5)
    before = {name: t.clone() for name, t in adapter.adapted_state().items()}
    adapter.adapt(x)
    assert set(before) == {"conv.weight", "conv.bias", "head.weight", "head.bias"}
    assert all(not torch.equal(before[name], t) for name, t in adapter.adapted_state().items())


def test_one_value_per_channel_uses_and_keeps_the_running_statistics(tiny, images) -> None:
    adapter, x = adapter_of(tiny(), rate=1e-30), images(1, size=1)
    before = {name: t.clone() for name, t in adapter.adapted_state().items() if "running" in name}
    with torch.no_grad():
        expected = tiny().eval()(x)
    torch.testing.assert_close(adapter.adapt(x), expected, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(t, adapter.adapted_state()[name]) for name, t in before.items())


def without_momentum(model: nn.Module, counted: int = 0) -> nn.Module:
    model.bn1.momentum = None  # its statistics are plain means over all batches; bn2 keeps its tenth
    model.bn1.num_batches_tracked.fill_(counted)
    return model


@pytest.mark.parametrize("counted", [0, 3])
def test_without_momentum_statistics_are_means_over_all_batches(tiny, images, counted: int) -> None:
    adapter = adapter_of(without_momentum(tiny(torch.float64), counted), rate=1e-30)
    source = tiny(torch.float64)
    means = [source.bn1.running_mean.tolist()] * counted  # what was counted before is as good as so many equal batches
    for seed in range(4):
        x = images(5, seed=seed, dtype=torch.float64)
        adapter.adapt(x)
        means.append(source.conv1(x).mean(dim=(0, 2, 3)).tolist())
        expected = [sum(channel) / len(means) for channel in zip(*means, strict=True)]
        found = adapter.adapted_state()["bn1.running_mean"]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    assert set(adapter.local_state()) == {"bn1.num_batches_tracked"}


def test_without_momentum_the_counter_stays_at_home(tiny, images) -> None:
    """As a client's visits do: saved in mid-stream, into an adapter that served another client before."""
    adapter, other = (adapter_of(without_momentum(tiny(), counted=2)) for _ in range(2))
    initial = {name: t.clone() for name, t in adapter.adapted_state().items()}
    for seed in range(5):
        other.adapt(images(3, seed=10 + seed))
    for seed in range(6):
        if seed in (0, 2, 5):
            saved = from_arrays(to_arrays(adapter.local_state())) if seed else {}
            other.load_adapted_state(from_arrays(to_arrays(adapter.adapted_state())))
            other.load_local_state(saved)
        adapter.adapt(images(4, seed=seed) * (float("nan") if seed == 3 else 1.0))  # undone, and not counted
        other.adapt(images(4, seed=seed) * (float("nan") if seed == 3 else 1.0))
        for name, t in adapter.adapted_state().items():
            assert torch.equal(t, other.adapted_state()[name]), name
    assert int(adapter.local_state()["bn1.num_batches_tracked"]) == 2 + 5
    other.reset(initial)
    assert int(other.local_state()["bn1.num_batches_tracked"]) == 2


def test_a_batch_of_one(tiny, images) -> None:
    adapter = adapter_of(tiny())
    before = {name: t.clone() for name, t in adapter.adapted_state().items()}
    assert adapter.adapt(images(1)).isfinite().all()
    assert adapter.rolled_back == 0
    assert any(not torch.equal(t, before[name]) for name, t in adapter.adapted_state().items())


def test_identical_images(tiny, images) -> None:
    adapter = adapter_of(tiny())
    for x in (images(1).expand(6, -1, -1, -1), torch.zeros(6, 3, 6, 6)):
        assert adapter.adapt(x).isfinite().all()
    assert adapter.rolled_back == 0
    assert all((t >= 0).all() for name, t in adapter.adapted_state().items() if name.endswith("running_var"))


def test_a_parameter_that_the_network_does_not_use_stays(tiny, images) -> None:
    model = tiny()
    model.unused = nn.Parameter(torch.tensor([1.0, 2.0]))
    adapter = adapter_of(model)
    adapter.adapt(images(4))
    assert adapter.adapted_state()["unused"].tolist() == [1.0, 2.0]


def test_a_step_under_inference_mode_is_still_a_step(tiny, images) -> None:
    """The caller's grad mode must not decide."""
    adapter, other = adapter_of(tiny()), adapter_of(tiny())
    with torch.no_grad():
        adapter.adapt(images(4))
    other.adapt(images(4))
    for name, t in other.adapted_state().items():
        assert torch.equal(t, adapter.adapted_state()[name])


def test_entropy_of_known_distributions() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -1e4, -1e4]])
    expected = torch.tensor([math.log(4), 0.0, -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))])
    torch.testing.assert_close(entropy(logits), expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=2, max_size=6), st.floats(-100, 100))
def test_entropy_is_bounded_and_shift_invariant(row: list[float], shift: float) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    value = entropy(logits).item()
    weights = [math.exp(v - max(row)) for v in row]
    expected = -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
    assert value == pytest.approx(expected, abs=1e-9)
    assert -1e-12 <= value <= math.log(len(row)) + 1e-12
    assert entropy(logits + shift).item() == pytest.approx(value, abs=1e-9)
