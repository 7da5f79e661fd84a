"""Networks by name. Importing this package does not import torch, so names can be listed at once.

Every network is a `fedtta_flwr.models.base.Classifier`: ``forward(x) = head(features(x))``, where
``features`` begins with the input normalisation ``normalize``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedtta_flwr.errors import ConfigError

if TYPE_CHECKING:
    from fedtta_flwr.models.base import Classifier

__all__ = ["MODELS", "ROBUSTBENCH", "build"]

#: what a model of the RobustBench zoo is named by: this and its id
ROBUSTBENCH = "robustbench:"

MODELS: dict[str, str] = {
    "resnet8": "CIFAR ResNet, n = 1, widths 16/32/64: 78 thousand parameters",
    "resnet20": "CIFAR ResNet, n = 3, 1x1-convolution shortcuts (option B)",
    "resnet32": "CIFAR ResNet, n = 5, option B",
    "resnet44": "CIFAR ResNet, n = 7, option B",
    "resnet56": "CIFAR ResNet, n = 9, option B",
    "resnet20-a": "CIFAR ResNet, n = 3, zero-padded shortcuts (option A)",
    "resnet32-a": "CIFAR ResNet, n = 5, option A",
    "resnet44-a": "CIFAR ResNet, n = 7, option A",
    "resnet56-a": "CIFAR ResNet, n = 9, option A",
    "resnet20-gn": "BTFL: ResNet-20, four times as wide, group normalisation",
    "resnet8-fedtsa": "FedTSA and FedCTTA: ImageNet stem, widths 64/128/256: 1.24 million",
    "wrn-28-10": "Wide ResNet of the CIFAR-10 benchmarks: 36.5 million parameters",
    "wrn-40-2": "Wide ResNet: 2.2 million parameters",
    "resnext29-32x4d": "AugMix's ResNeXt-29 of the CIFAR-100 benchmarks: 6.9 million parameters",
    "cnn": "BTFL: two 5x5 convolutions and one hidden layer, 32x32 images",
    "cct-4": "BTFL: compact convolutional transformer CCT-4/3x2, 32x32 images",
}


def build(
    name: str,
    classes: int,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> "Classifier":
    """Build a network with random weights, in eval mode, on torch's default device.

    The weights come from torch's global generator: seed it (or fork it) for a reproducible draw.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    classes : int
        Number of classes, K >= 2.
    mean, std : sequence of float, optional
        Input normalisation, one value per image channel, for pixels in [0, 1]; 0 and 1, which
        change nothing, for what is left out. Three channels when both are left out.

    Returns
    -------
    Classifier
        Its first submodule is ``normalize``.

    Raises
    ------
    ConfigError
        Unknown name, fewer than two classes, or a normalisation that cannot be.
    """
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is not known; allowed: {', '.join(MODELS)}")
    if classes < 2:
        raise ConfigError(f"model {name} needs at least 2 classes, got {classes}")
    from fedtta_flwr.models.normalize import Normalize
    from fedtta_flwr.models.registry import BUILDERS

    channels = len(mean if mean is not None else std if std is not None else (0, 0, 0))
    try:
        normalize = Normalize([0.0] * channels if mean is None else mean, [1.0] * channels if std is None else std)
    except ValueError as error:
        raise ConfigError(f"input normalisation of model {name}: {error}") from error
    return BUILDERS[name](normalize, classes).eval()
