"""What each name of `fedtta_flwr.models.MODELS` builds."""

from collections.abc import Callable
from functools import partial

from fedtta_flwr.models.base import Classifier
from fedtta_flwr.models.normalize import Normalize
from fedtta_flwr.models.resnet import ResNet, group_norm
from fedtta_flwr.models.resnext import ResNeXt29
from fedtta_flwr.models.small import CCT, SmallCNN
from fedtta_flwr.models.wrn import WideResNet

Builder = Callable[[Normalize, int], Classifier]

BUILDERS: dict[str, Builder] = {
    **{f"resnet{n}": partial(ResNet, blocks=(n - 2) // 6) for n in (8, 20, 32, 44, 56)},
    **{f"resnet{n}-a": partial(ResNet, blocks=(n - 2) // 6, padded=True) for n in (20, 32, 44, 56)},
    "resnet20-gn": partial(ResNet, blocks=3, widths=(64, 128, 256), norm=group_norm, bias=False),
    "resnet8-fedtsa": partial(ResNet, blocks=1, widths=(64, 128, 256), imagenet_stem=True),
    "wrn-28-10": partial(WideResNet, depth=28, width=10),
    "wrn-40-2": partial(WideResNet, depth=40, width=2),
    "resnext29-32x4d": ResNeXt29,
    "cnn": SmallCNN,
    "cct-4": CCT,
}
