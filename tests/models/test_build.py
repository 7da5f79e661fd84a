"""The networks: names, sizes that the papers give, and the contract that all of them keep."""

import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from torch import nn

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models import MODELS, build
from fedtta_flwr.models.base import Classifier
from fedtta_flwr.models.registry import BUILDERS
from fedtta_flwr.models.resnet import PaddedShortcut


def test_names_can_be_listed_without_torch() -> None:
    code = "import sys; from fedtta_flwr.models import MODELS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_name_has_a_builder_and_a_description() -> None:
    assert set(MODELS) == set(BUILDERS)
    assert all(MODELS.values())


@pytest.mark.parametrize(
    ("name", "classes", "parameters", "norms", "channels", "features"),
    [
        ("resnet8", 10, 78_042, 9, 336, 64),
        ("resnet20", 10, 272_474, 21, 784, 64),
        ("resnet56", 10, 855_770, 57, 2128, 64),
        ("resnet20-a", 10, 269_722, 19, 688, 64),  # He et al., table 6: 0.27 million
        ("resnet56-a", 10, 853_018, 55, 2032, 64),  # and 0.85 million
        ("resnet8-fedtsa", 10, 1_235_274, 9, 1344, 256),
        ("wrn-28-10", 10, 36_479_194, 25, 8976, 640),
        ("wrn-40-2", 10, 2_243_546, 37, 2704, 128),
        ("resnext29-32x4d", 100, 6_900_132, 31, 12_608, 1024),
        ("cnn", 10, 156_800, 0, 0, 64),
        ("cct-4", 10, 483_659, 0, 0, 128),  # Hassani et al., table 1: 0.48 million
        ("resnet20-gn", 10, 4_327_744, 0, 0, 256),
    ],
)
def test_sizes(name: str, classes: int, parameters: int, norms: int, channels: int, features: int) -> None:
    with torch.device("meta"):
        model = build(name, classes)
        logits, embedding = (
            model(torch.rand(2, 3, 32, 32)),
            model.features(torch.rand(2, 3, 32, 32)),
        )
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert (len(layers), sum(layer.num_features for layer in layers)) == (norms, channels)
    assert logits.shape == (2, classes)
    assert embedding.shape == (2, features)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "wrn-28-10"])
def test_contract(name: str) -> None:
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    # float64: the activations of a deep network with untrained statistics grow past float32's use
    model, plain = build(name, 7, mean=mean, std=std).double(), build(name, 7).double()
    assert isinstance(model, Classifier)
    assert not model.training
    assert next(iter(model.named_children()))[0] == "normalize"
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("normalize.")}
    plain.load_state_dict({**plain.state_dict(), **weights})
    with torch.no_grad():
        logits = model(x)
        assert torch.equal(model.head(model.features(x)), logits)
        assert torch.equal(deepcopy(model)(x), logits)
        normalised = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)
        torch.testing.assert_close(plain(normalised), logits, rtol=1e-5, atol=1e-5)
        # In eval mode a sample's logits do not depend on its batch.
        torch.testing.assert_close(model(x[:1]), logits[:1])


def test_channels_follow_the_normalisation() -> None:
    model = build("resnet8", 10, mean=[0.5], std=[0.3])
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert build("resnet8", 10).normalize.is_identity


def test_the_same_seed_draws_the_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(build("resnet8", 10).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_layers_of_a_transformer_are_drawn_one_by_one() -> None:
    first, *others = [layer.linear1.weight for layer in build("cct-4", 10).encoder.layers]  # type: ignore[union-attr]
    assert len(others) == 3
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("name", "classes", "mean", "std", "said"),
    [
        ("resnet9", 10, None, None, "resnet8, resnet20"),
        ("resnet8", 1, None, None, "at least 2"),
        ("resnet8", 10, [0.5] * 3, [0.5], "3 channels, std 1"),
        ("resnet8", 10, None, [1.0, 0.0, 1.0], "positive"),
        ("resnet8", 10, [125.3, 123.0, 113.9], [63.0, 62.1, 66.7], "mean is that of pixels in [0, 1], got [125.3, 123"),
        ("resnet8", 10, [0.5, float("nan"), 0.5], None, "mean is that"),
        ("resnet8", 10, None, [0.2, 63.0, 0.2], "std is positive, and that of pixels in [0, 1]"),
        ("resnet8", 10, [], None, "expected equal, > 0"),
    ],
)
def test_what_cannot_be_built(
    name: str, classes: int, mean: list[float] | None, std: list[float] | None, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, classes, mean=mean, std=std)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_padded_shortcut_keeps_pixels_and_pads_both_sides() -> None:
    x = torch.rand(2, 16, 6, 6)
    y = PaddedShortcut(16, 32, 2)(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()
