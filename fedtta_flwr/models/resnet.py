"""Residual networks with basic blocks: the CIFAR form, its group-norm variant, FedTSA's ResNet-8.

References
----------
He, Zhang, Ren, Sun. Deep residual learning for image recognition. CVPR 2016, sections 3.3 and 4.2.
Zhang et al. FedTSA. KDD 2024 (doi 10.1145/3637528.3671908), its public code's ResNet-8.
Zhou et al. BTFL. KDD 2025, its ResNet-20 with group normalisation.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from fedtta_flwr.models.base import Classifier, initialise_convolutions
from fedtta_flwr.models.normalize import Normalize

Norm = Callable[[int], nn.Module]
group_norm: Norm = partial(nn.GroupNorm, 2)  # two groups, as FedTHE and BTFL train it


class PaddedShortcut(nn.Module):
    """Option A: take every ``stride``-th pixel and pad the new channels with zeros on both sides.

    It has no parameters. Both sides get half of the new channels, which is what the widely used
    pretrained option-A networks expect; the paper leaves it open.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, ceil(H / stride), ceil(W / stride)]."""
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., figure 2).

    Parameters
    ----------
    inputs, outputs : int
        Channels before and after.
    stride : int
        Of the first convolution.
    norm : callable
        Makes a normalisation layer for a number of channels.
    padded : bool
        Shortcut where the shape changes: option A (`PaddedShortcut`) instead of option B (1x1
        convolution and normalisation).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, padded: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = (
                PaddedShortcut(inputs, outputs, stride)
                if padded
                else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H', W'] with H' = ceil(H / stride)."""
        y = F.relu_(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu_(y + self.downsample(x))


class ResNet(Classifier):
    """Three stages of basic blocks; the second and third halve the resolution.

    Parameters
    ----------
    normalize : Normalize
        Input normalisation.
    classes : int
        Number of classes, K.
    blocks : int
        Blocks per stage, n: the network has ``6 n + 2`` layers with weights.
    widths : tuple of int
        Channels of the three stages; the last is the feature dimension D.
    norm : callable
        Makes a normalisation layer for a number of channels.
    padded : bool
        Option-A shortcuts, see `BasicBlock`.
    imagenet_stem : bool
        7x7 convolution of stride 2 and max-pooling instead of one 3x3 convolution.
    bias : bool
        Whether the head has a bias.
    """

    def __init__(
        self,
        normalize: Normalize,
        classes: int,
        *,
        blocks: int,
        widths: Sequence[int] = (16, 32, 64),
        norm: Norm = nn.BatchNorm2d,
        padded: bool = False,
        imagenet_stem: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(normalize)
        first, second, third = widths
        kernel, stride = (7, 2) if imagenet_stem else (3, 1)
        self.conv1 = nn.Conv2d(normalize.channels, first, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = norm(first)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if imagenet_stem else nn.Identity()

        def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                BasicBlock(inputs, outputs, stride, norm, padded),
                *(BasicBlock(outputs, outputs, 1, norm, padded) for _ in range(blocks - 1)),
            )

        self.layer1 = stage(first, first, 1)
        self.layer2 = stage(first, second, 2)
        self.layer3 = stage(second, third, 2)
        self.head = nn.Linear(third, classes, bias=bias)
        initialise_convolutions(self)

    def embed(self, x: Tensor) -> Tensor:
        """Map normalised images [B, C, H, W] to features [B, D]."""
        x = self.maxpool(F.relu_(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return x.mean(dim=(2, 3))
