"""What a client tells about its data."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import batch_norms, statistics
from fedtta_flwr.adaptation.bn_stats import BNStats
from fedtta_flwr.adaptation.source import Source
from fedtta_flwr.data.digits import test_part as digits
from fedtta_flwr.descriptors import bn_statistics, chosen_images, mean_features, mean_logits, noise_images
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models import build
from fedtta_flwr.models.base import Classifier
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


def test_another_seed_or_purpose_is_other_noise() -> None:
    draws = [(0,), (1,), (0, 1), (0, 2), (0, 1, "client-00"), (0, 1, "client-01"), (0, 2, "client-00")]
    noises = [noise_images(seed, 2, (3, 4, 4), *purpose) for seed, *purpose in draws]
    for i, noise in enumerate(noises):
        assert not any(torch.allclose(noise, other) for other in noises[:i])


@pytest.mark.parametrize("samples", [1, 64, 797])
def test_chosen_images_are_some_of_the_clean_ones(samples: int) -> None:
    clean, _ = digits()
    chosen = chosen_images(clean, 0, samples)
    assert chosen.dtype == torch.float32
    assert torch.equal(chosen, chosen_images(clean, 0, samples))
    among = {image.tobytes() for image in clean}
    back = [np.ascontiguousarray(image) for image in (chosen * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()]
    assert all(image.tobytes() in among for image in back)
    assert len({image.tobytes() for image in back}) == min(samples, len(among))
    if samples < 797:
        assert not torch.equal(chosen, chosen_images(clean, 1, samples))


def test_more_chosen_images_than_there_are() -> None:
    for clean in (np.zeros((3, 8, 8, 3), np.uint8), np.zeros((0, 8, 8, 3), np.uint8)):
        with pytest.raises(ConfigError, match=f"4 chosen images.* {len(clean)} clean") as caught:
            chosen_images(clean, 0, 4)
        assert "\n" not in str(caught.value)


def test_logits_are_the_mean_over_the_images() -> None:
    table = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, -3.0]])
    found = mean_logits(lambda noise: table[: len(noise)], torch.zeros(2, 3, 4, 4))
    assert found.tolist() == [3.0, 1.0, 0.0]


def test_logits_and_features_of_the_embedded_model(resnet8: Classifier) -> None:
    noise = noise_images(0, 5, (3, 32, 32))
    adapter = Source(deepcopy(resnet8), NoOptions())
    one_by_one: list[Tensor] = [adapter.predict(noise[i : i + 1])[0].double() for i in range(5)]
    expected = sum(one_by_one) / 5
    torch.testing.assert_close(mean_logits(adapter.predict, noise).double(), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        features = resnet8.features(noise).double().mean(dim=0)
    found = mean_features(adapter.predict, adapter.model.head, noise)  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), features, rtol=1e-5, atol=1e-5)
    assert found.shape == (64,)
    assert not adapter.model.head._forward_pre_hooks


def test_features_are_let_go_of_when_a_prediction_fails() -> None:
    head = nn.Linear(2, 2)

    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        mean_features(fails, head, torch.zeros(1, 2))
    assert not head._forward_pre_hooks


@pytest.mark.parametrize("batch", [1, 2, 10])
def test_statistics_are_those_that_tta_bn_takes_over(resnet8: Classifier, batch: int) -> None:
    model = deepcopy(resnet8)
    before = deepcopy(model.state_dict())
    x = torch.from_numpy(digits()[0][:batch]).permute(0, 3, 1, 2).float() / 255
    found = bn_statistics(model, x)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any("forward" in vars(layer) for layer in model.modules())
    adapter = BNStats(deepcopy(resnet8), NoOptions())
    adapter.adapt(x)
    taken_over = adapter.adapted_state()
    assert list(taken_over) == list(statistics(model))
    assert torch.equal(found, torch.cat(list(taken_over.values())))
    # the first layer by hand
    with torch.no_grad():
        h = model.conv1(model.normalize(x)).double()  # type: ignore[operator]
    torch.testing.assert_close(found[:16].double(), h.mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[16:32].double(), h.var(dim=(0, 2, 3), correction=0), rtol=1e-4, atol=1e-5)
    assert len(found) == 2 * sum(layer.num_features for layer in batch_norms(model).values())


def test_one_value_per_channel_has_no_variance() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)).eval()
    with torch.no_grad():
        model[1].running_mean.fill_(3.0)
    x = torch.rand(1, 3, 2, 2)
    assert bn_statistics(model, x).tolist() == [3.0] * 12 + [1.0] * 12
    two = torch.cat([x, x + 2])
    expected = torch.cat([(x + 1).flatten(), torch.ones(12)])
    torch.testing.assert_close(bn_statistics(model, two), expected)


def test_a_network_without_statistics_has_none() -> None:
    with pytest.raises(ConfigError, match="descriptor 'bn-statistics': ResNet has no BatchNorm") as caught:
        bn_statistics(build("resnet20-gn", 10), torch.rand(2, 3, 32, 32))
    own = build("resnet8", 10).eval()
    own.bn1.__class__ = type("Activated", (nn.BatchNorm2d,), {"forward": lambda self, x: x.relu()})
    with pytest.raises(ConfigError, match=r"descriptor 'bn-statistics': bn1 is a Activated, .* another strategy"):
        bn_statistics(own, torch.rand(2, 3, 8, 8))
    assert "\n" not in str(caught.value)
