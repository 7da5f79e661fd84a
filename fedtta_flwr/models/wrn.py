"""Wide residual networks.

References
----------
Zagoruyko, Komodakis. Wide residual networks. BMVC 2016 (arXiv 1605.07146), table 1, B(3, 3).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fedtta_flwr.models.base import Classifier, initialise_convolutions
from fedtta_flwr.models.normalize import Normalize


class WideBlock(nn.Module):
    """Pre-activation block: norm, ReLU, 3x3 convolution, twice, and a shortcut.

    Where the channels change, the shortcut is a 1x1 convolution of the *activated* input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H', W'] with H' = ceil(H / stride)."""
        y = F.relu_(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        residual: Tensor = self.conv2(F.relu_(self.bn2(self.conv1(y))))
        return shortcut + residual


class WideResNet(Classifier):
    """WRN-depth-width for small images.

    Parameters
    ----------
    normalize : Normalize
        Input normalisation.
    classes : int
        Number of classes, K.
    depth : int
        ``6 n + 4`` with n blocks per stage.
    width : int
        Widening factor k: the stages have 16 k, 32 k and 64 k channels; D = 64 k.
    """

    def __init__(self, normalize: Normalize, classes: int, *, depth: int, width: int) -> None:
        super().__init__(normalize)
        blocks = (depth - 4) // 6

        def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                WideBlock(inputs, outputs, stride),
                *(WideBlock(outputs, outputs, 1) for _ in range(blocks - 1)),
            )

        self.conv1 = nn.Conv2d(normalize.channels, 16, 3, padding=1, bias=False)
        self.block1 = stage(16, 16 * width, 1)
        self.block2 = stage(16 * width, 32 * width, 2)
        self.block3 = stage(32 * width, 64 * width, 2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.head = nn.Linear(64 * width, classes)
        initialise_convolutions(self)

    def embed(self, x: Tensor) -> Tensor:
        """Map normalised images [B, C, H, W] to features [B, 64 k]."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return F.relu_(self.bn1(x)).mean(dim=(2, 3))
