"""TTA-bn against the equations, channel by channel and value by value in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.bn_stats import BNStats
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import NoOptions


def moments(h: Tensor) -> tuple[list[float], list[float]]:
    """Mean and biased variance of every channel of [B, C, ...], by plain loops over Python floats."""
    means, variances = [], []
    for channel in range(h.shape[1]):
        values = h[:, channel].flatten().tolist()
        mean = sum(values) / len(values)
        means.append(mean)
        variances.append(sum((value - mean) ** 2 for value in values) / len(values))
    return means, variances


def normalised(h: Tensor, bn: nn.BatchNorm2d, means: list[float], variances: list[float]) -> Tensor:
    out = torch.empty_like(h)
    for c in range(h.shape[1]):
        scale = bn.weight[c].item() / (variances[c] + bn.eps) ** 0.5
        out[:, c] = (h[:, c] - means[c]) * scale + bn.bias[c].item()
    return out


def oracle(model: nn.Module, x: Tensor) -> tuple[dict[str, list[float]], Tensor]:
    """What TTA-bn does to the tiny network: its statistics and logits, in float64."""
    model, x = model.double(), x.double()
    found = {}
    for conv, bn in ((model.conv1, model.bn1), (model.conv2, model.bn2)):
        h = F.conv2d(x, conv.weight, stride=conv.stride, padding=conv.padding)
        means, variances = moments(h)
        name = "bn1" if bn is model.bn1 else "bn2"
        found[f"{name}.running_mean"], found[f"{name}.running_var"] = means, variances
        x = normalised(h, bn, means, variances).clamp(min=0)
    return found, F.linear(x.mean(dim=(2, 3)), model.head.weight, model.head.bias)


@pytest.mark.parametrize(("batch", "size"), [(8, 6), (3, 5), (1, 6), (2, 2)])
def test_statistics_and_logits_are_those_of_the_equations(tiny, images, batch: int, size: int) -> None:
    adapter, x = BNStats(tiny(), NoOptions()), images(batch, size)
    logits = adapter.adapt(x)
    with torch.no_grad():
        expected, expected_logits = oracle(tiny(), x)
    assert list(adapter.adapted_state()) == list(expected)
    for name, t in adapter.adapted_state().items():
        torch.testing.assert_close(t.double(), torch.tensor(expected[name], dtype=torch.float64), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(logits.double(), expected_logits, rtol=2e-5, atol=2e-5)


def test_predicting_after_adapting_repeats_its_logits_exactly(tiny, images) -> None:
    adapter = BNStats(tiny(), NoOptions())
    for seed, batch in ((0, 8), (1, 1), (2, 5)):
        x = images(batch, seed=seed)
        assert torch.equal(adapter.adapt(x), adapter.predict(x))


def test_the_embedded_network_too(resnet8) -> None:
    from copy import deepcopy

    x = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    adapter = BNStats(deepcopy(resnet8), NoOptions())
    logits = adapter.adapt(x)
    assert torch.equal(logits, adapter.predict(x))
    # torch's own train mode normalises with the same statistics
    with torch.no_grad():
        torch.testing.assert_close(logits, deepcopy(resnet8).train()(x), rtol=1e-4, atol=1e-4)
    assert len(adapter.adapted_state()) == 2 * 9


def test_nothing_else_changes(tiny, images) -> None:
    model = tiny()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    adapter = BNStats(model, NoOptions())
    adapter.adapt(images(4))
    after = model.state_dict()
    assert list(after) == list(before)
    for name, t in after.items():
        assert t.dtype == before[name].dtype
        assert torch.equal(t, before[name]) == ("running" not in name), name
    assert not any(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_there_is_no_memory_of_earlier_batches(tiny, images) -> None:
    adapter, fresh = BNStats(tiny(), NoOptions()), BNStats(tiny(), NoOptions())
    adapter.adapt(images(4, seed=1))
    adapter.adapt(images(4, seed=2))
    fresh.adapt(images(4, seed=2))
    for name, t in adapter.adapted_state().items():
        assert torch.equal(t, fresh.adapted_state()[name])


def test_one_value_per_channel_keeps_the_statistics(tiny, images) -> None:
    """B = 1 and a 1x1 map: neither layer has a variance to take."""
    model = tiny()
    adapter, x = BNStats(model, NoOptions()), images(1, size=1)
    before = {name: t.clone() for name, t in adapter.adapted_state().items()}
    logits = adapter.adapt(x)
    assert all(torch.equal(before[name], t) for name, t in adapter.adapted_state().items())
    with torch.no_grad():
        assert torch.equal(logits, tiny().eval()(x))
    assert adapter.rolled_back == 0


def test_only_the_layer_with_one_value_per_channel_keeps_them(tiny, images) -> None:
    adapter, x = BNStats(tiny(), NoOptions()), images(1, size=2)  # 2x2 before conv2, 1x1 after
    before = {name: t.clone() for name, t in adapter.adapted_state().items()}
    adapter.adapt(x)
    changed = [name for name, t in adapter.adapted_state().items() if not torch.equal(t, before[name])]
    assert changed == ["bn1.running_mean", "bn1.running_var"]


def test_two_samples_of_one_pixel_have_a_variance() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten())
    adapter = BNStats(model, NoOptions())
    adapter.adapt(torch.tensor([[1.0, 10.0], [3.0, 10.0]]).reshape(2, 2, 1, 1))
    state = adapter.adapted_state()
    assert state["0.running_mean"].tolist() == [2.0, 10.0]
    assert state["0.running_var"].tolist() == [1.0, 0.0]


def test_batch_norm_over_vectors() -> None:
    adapter = BNStats(nn.Sequential(nn.BatchNorm1d(2)), NoOptions())
    adapter.adapt(torch.tensor([[0.0, 1.0], [2.0, 5.0], [4.0, 6.0]]))
    assert adapter.adapted_state()["0.running_mean"].tolist() == [2.0, 4.0]
    torch.testing.assert_close(adapter.adapted_state()["0.running_var"], torch.tensor([8 / 3, 14 / 3]))


def test_identical_images_give_finite_predictions(tiny, images) -> None:
    adapter = BNStats(tiny(), NoOptions())
    for x in (images(1).expand(6, -1, -1, -1), torch.zeros(6, 3, 6, 6), torch.ones(6, 3, 6, 6)):
        logits = adapter.adapt(x)
        assert logits.isfinite().all()
        assert torch.equal(logits, logits[:1].expand_as(logits))
    assert adapter.rolled_back == 0


def test_a_model_without_batch_norm_is_refused_in_one_line(no_norm) -> None:
    with pytest.raises(ConfigError, match=r"bn-stats.*NoNorm.*entropy") as caught:
        BNStats(no_norm(), NoOptions())
    assert "\n" not in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 6),
    channels=st.integers(1, 4),
    side=st.integers(1, 4),
    offset=st.sampled_from([0.0, -3.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_one_layer_takes_the_moments_of_its_input(
    batch: int, channels: int, side: int, offset: float, seed: int
) -> None:
    model = nn.Sequential(nn.BatchNorm2d(channels))
    x = torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(seed)) + offset
    adapter = BNStats(model, NoOptions())
    logits = adapter.adapt(x)
    if batch * side * side == 1:
        means, variances = [0.0] * channels, [1.0] * channels  # BatchNorm's initial statistics
    else:
        means, variances = moments(x.double())
    state = adapter.adapted_state()
    torch.testing.assert_close(state["0.running_mean"].double(), torch.tensor(means).double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state["0.running_var"].double(), torch.tensor(variances).double(), rtol=1e-4, atol=1e-5)
    assert (state["0.running_var"] >= 0).all()
    expected = normalised(x.double(), model[0].double(), means, variances)  # type: ignore[arg-type]
    torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=5e-2 if abs(offset) > 10 else 1e-3)
