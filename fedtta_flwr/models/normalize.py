"""Input normalisation as the first layer of a network, so that no caller can forget it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """Map images in [0, 1] to ``(x - mean) / std``, channel by channel.

    Both are persistent buffers, so they travel with a checkpoint and never with an optimiser.

    Parameters
    ----------
    mean, std : sequence of float, length C
        Per-channel statistics of the training set, in units of [0, 1]; ``std`` is positive.

    Raises
    ------
    ValueError
        When the lengths differ, or a number is not what pixels in [0, 1] can have: those of pixels up to 255 are to be
        divided by 255.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not mean:
            raise ValueError(f"mean has {len(mean)} channels, std {len(std)}: expected equal, > 0")
        if not all(0 <= value <= 1 for value in mean):
            raise ValueError(f"mean is that of pixels in [0, 1], got {list(mean)}")
        if not all(0 < value <= 1 for value in std):
            raise ValueError(f"std is positive, and that of pixels in [0, 1], got {list(std)}")
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))

    @property
    def channels(self) -> int:
        """Number of image channels, C."""
        return len(self.mean)

    @property
    def is_identity(self) -> bool:
        """Whether every mean is 0 and every std 1."""
        return bool((self.mean == 0).all() and (self.std == 1).all())

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` of shape [B, C, H, W]; the result has the same shape."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Show the statistics in ``print(model)``."""
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        return f"mean={mean}, std={std}"
