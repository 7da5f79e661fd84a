"""What a client tells about its data."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.source import Source
from fedtta_flwr.descriptors import noise_images, noise_logits
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
