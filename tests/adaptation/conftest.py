"""A tiny network written by hand, for oracles that repeat its arithmetic in plain loops."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.base import Adapter


class Tiny(nn.Module):
    """conv - BN - ReLU - dropout - conv - BN - ReLU - mean over pixels - linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.conv2 = nn.Conv2d(4, 5, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.bn1(self.conv1(x))))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.head(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


class NoNorm(nn.Module):
    """A network without BatchNorm, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.relu(self.conv(x)).mean(dim=(2, 3))))  # type: ignore[no-any-return]


def make(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind().to(dtype)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.uniform_(module.bias, -0.5, 0.5)
                module.running_mean.uniform_(-0.2, 0.2)  # type: ignore[operator,union-attr]
                module.running_var.uniform_(0.5, 2.0)  # type: ignore[operator,union-attr]
    return model.train()  # an adapter has to choose the mode itself


@pytest.fixture
def tiny() -> Callable[..., nn.Module]:
    """Make equal networks with BatchNorm: ``tiny()``, ``tiny(torch.float64)``."""
    return lambda dtype=torch.float32: make(Tiny, dtype)


@pytest.fixture
def no_norm() -> Callable[..., nn.Module]:
    """Make equal networks without BatchNorm."""
    return lambda dtype=torch.float32: make(NoNorm, dtype)


@pytest.fixture
def images() -> Callable[..., Tensor]:
    """Make images [B, 3, S, S] in [0, 1]: ``images(4, size=6, seed=1)``."""

    def draw(count: int, size: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand((count, 3, size, size), generator=torch.Generator().manual_seed(seed), dtype=dtype)

    return draw


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in state.items()}


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same tensors, in name, order, dtype and value."""
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def both(adapter: Adapter) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of what travels and of what stays at home."""
    return copied(adapter.adapted_state()), copied(adapter.local_state())
