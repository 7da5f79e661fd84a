"""The one shape that every network of this package has: normalise, embed, classify."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from fedtta_flwr.models.normalize import Normalize


class Classifier(nn.Module, ABC):
    """An image classifier whose penultimate features can be asked for.

    A subclass sets ``head`` and implements `embed`; normalisation is always the first submodule.

    Parameters
    ----------
    normalize : Normalize
        The input normalisation, which also says how many channels the images have.

    Attributes
    ----------
    normalize : Normalize
        Maps images in [0, 1] to the network's input.
    head : nn.Module
        Maps features [B, D] to logits [B, K].
    """

    head: nn.Module

    def __init__(self, normalize: Normalize) -> None:
        super().__init__()
        self.normalize = normalize

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Map *normalised* images [B, C, H, W], laid out as `pixel_by_pixel` does, to features [B, D]."""

    def features(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] in [0, 1] to penultimate features [B, D]."""
        return self.embed(pixel_by_pixel(self.normalize(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] in [0, 1] to logits [B, K]."""
        logits: Tensor = self.head(self.features(x))
        return logits


def pixel_by_pixel(x: Tensor) -> Tensor:
    """Return images [B, C, H, W] as they are; on a CPU with a pixel's channels beside each other in memory.

    Layers keep that layout to the last. On CPUs a step of most networks takes up to a third less time with it, one of
    the widest as much as without (benchmarks/layout.py); graphics cards choose for themselves.
    """
    return x.contiguous(memory_format=torch.channels_last) if x.device.type == "cpu" else x


def last_linear(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """Return the name of a network's last linear layer, which is its classifier, and the layer; None without one."""
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return linear[-1] if linear else None


def take_head(model: nn.Module) -> nn.Linear | None:
    """Put an identity in the place of a network's last linear layer, and return that; None without one."""
    last = last_linear(model)
    if last is None:
        return None
    for module in list(model.modules()):  # it may have several names
        for name, child in module.named_children():
            if child is last[1]:
                setattr(module, name, nn.Identity())
    return last[1]


def initialise_convolutions(model: nn.Module) -> None:
    """Draw convolution weights as in He et al. 2015 (arXiv 1502.01852, eq. 10), fan-out, ReLU.

    Batch-norm, group-norm and linear layers keep torch's own initialisation.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
