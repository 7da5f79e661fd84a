"""ResNeXt-29 as AugMix trains it on CIFAR.

References
----------
Xie et al. Aggregated residual transformations for deep neural networks. CVPR 2017, table 1 (c).
Hendrycks et al. AugMix. ICLR 2020 (arXiv 1912.02781), section 4.1: ResNeXt-29 (32x4).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fedtta_flwr.models.base import Classifier, initialise_convolutions
from fedtta_flwr.models.normalize import Normalize

CARDINALITY = 4
EXPANSION = 4


class ResNeXtBlock(nn.Module):
    """1x1 convolution, grouped 3x3 convolution, 1x1 convolution, and a shortcut.

    Parameters
    ----------
    inputs, width : int
        Channels before, and the stage's base width: the 3x3 convolution has ``CARDINALITY`` groups
        of ``width / 2`` channels and the block returns ``EXPANSION * width``.
    stride : int
        Of the 3x3 convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        inner, outputs = CARDINALITY * width // 2, EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=CARDINALITY, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, 4 * width, H', W'] with H' = ceil(H / stride)."""
        y = F.relu_(self.bn1(self.conv1(x)))
        y = F.relu_(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu_(y + self.downsample(x))


class ResNeXt29(Classifier):
    """Three stages of three blocks with base widths 64, 128 and 256; D = 1024.

    The paper calls it 32x4; its public weights have 4 groups, whose width in the first stage is
    32, so that is what "32x4d" means here.

    Parameters
    ----------
    normalize : Normalize
        Input normalisation.
    classes : int
        Number of classes, K.
    """

    def __init__(self, normalize: Normalize, classes: int) -> None:
        super().__init__(normalize)

        def stage(inputs: int, width: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                ResNeXtBlock(inputs, width, stride),
                *(ResNeXtBlock(EXPANSION * width, width, 1) for _ in range(2)),
            )

        self.conv1 = nn.Conv2d(normalize.channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = stage(64, 64, 1)
        self.layer2 = stage(256, 128, 2)
        self.layer3 = stage(512, 256, 2)
        self.head = nn.Linear(1024, classes)
        initialise_convolutions(self)

    def embed(self, x: Tensor) -> Tensor:
        """Map normalised images [B, C, H, W] to features [B, 1024]."""
        x = F.relu_(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return x.mean(dim=(2, 3))
