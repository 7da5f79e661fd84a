"""What a client tells about its data."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.source import Source
from fedtta_flwr.descriptors import feature_mean, noise_images, noise_logits
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models import build
from fedtta_flwr.options import NoOptions


def test_the_noise_is_the_same_everywhere_and_never_changes() -> None:
    torch.manual_seed(1)
    first = noise_images(0, 4, (3, 8, 8))
    torch.manual_seed(2)
    assert torch.equal(first, noise_images(0, 4, (3, 8, 8)))
    assert first.flatten()[:3].tolist() == [0.5029795169830322, 0.4816057085990906, 0.08638018369674683]


def test_the_noise_is_uniform_in_the_unit_interval() -> None:
    noise = noise_images(3, 64, (3, 32, 32))
    assert noise.shape == (64, 3, 32, 32)
    assert noise.dtype == torch.float32
    assert 0 <= noise.min() < 0.001
    assert 0.999 < noise.max() < 1
    assert noise.mean().item() == pytest.approx(0.5, abs=0.005)
    assert noise.var().item() == pytest.approx(1 / 12, abs=0.002)


def test_another_seed_is_other_noise() -> None:
    assert not torch.allclose(noise_images(0, 2, (3, 4, 4)), noise_images(1, 2, (3, 4, 4)))


def test_logits_are_the_mean_over_the_images() -> None:
    table = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, -3.0]])
    found = noise_logits(lambda noise: table[: len(noise)], torch.zeros(2, 3, 4, 4))
    assert found.tolist() == [3.0, 1.0, 0.0]


def test_logits_of_the_embedded_model(resnet8: nn.Module) -> None:
    noise = noise_images(0, 5, (3, 32, 32))
    adapter = Source(deepcopy(resnet8), NoOptions())
    one_by_one: list[Tensor] = [adapter.predict(noise[i : i + 1])[0].double() for i in range(5)]
    expected = sum(one_by_one) / 5
    torch.testing.assert_close(noise_logits(adapter.predict, noise).double(), expected, rtol=1e-4, atol=1e-4)


def test_features_are_what_enters_the_classifier(resnet8: nn.Module) -> None:
    """Heads are linear: they map the mean of the features to the mean of the logits."""
    x = noise_images(1, 5, (3, 32, 32))
    entered: list[Tensor] = []
    hook = resnet8.head.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    with torch.inference_mode():
        one_by_one = [resnet8(image[None])[0].double() for image in x]
        found = feature_mean(resnet8, x)
        answered = resnet8.head(found).double()
    hook.remove()
    assert found.shape == (64,)
    torch.testing.assert_close(found.double(), torch.cat(entered[:5]).double().mean(dim=0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(answered, torch.stack(one_by_one).mean(dim=0), rtol=1e-4, atol=1e-4)


def test_the_features_of_a_batch_leave_the_model_as_it_is(resnet8: nn.Module) -> None:
    model = deepcopy(resnet8)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    first = feature_mean(model, noise_images(1, 5, (3, 32, 32)))
    feature_mean(model, noise_images(2, 50, (3, 32, 32)) * 10)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(feature_mean(model, noise_images(1, 5, (3, 32, 32))), first)
    assert not first.requires_grad


@pytest.mark.parametrize("name", ["resnet8-fedtsa", "cnn", "cct-4"])
def test_every_architecture_has_features(name: str) -> None:
    model = build(name, 10)
    assert feature_mean(model, noise_images(0, 2, (3, 32, 32))).shape == (model.head.in_features,)


def test_a_model_without_features_is_one_line() -> None:
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ConfigError, match="'feature-mean': Sequential") as caught:
        feature_mean(model, torch.zeros(1, 3, 8, 8))
    assert "\n" not in str(caught.value)
