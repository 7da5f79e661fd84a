"""A small client with two heads, trained by nobody."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.heads.base import Fitted

DIM, CLASSES, CLIENTS = 12, 4, 5


class Extractor(nn.Module):
    """A convolution, a layer, a ReLU: features [B, 12] of images [B, 3, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.layer = nn.Linear(8 * 36, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to features."""
        z: Tensor = self.layer(self.convolution(2 * x - 1).relu().flatten(1))
        return (4 * z).relu()


def draw(count: int, seed: int) -> Tensor:
    """Return images [B, 3, 8, 8] of four coloured squares each, with noise."""
    generator = torch.Generator().manual_seed(seed)
    squares = torch.rand(count, 3, 2, 2, generator=generator).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return (squares + 0.1 * torch.randn(count, 3, 8, 8, generator=generator)).clamp(0, 1)


@pytest.fixture
def make_fitted() -> Callable[..., Fitted]:
    """Return a function that makes the same client anew; statistics may be replaced by name."""

    def make(**replaced: Tensor) -> Fitted:
        with torch.random.fork_rng():
            torch.manual_seed(10)
            extractor = Extractor()
            heads = [torch.randn(CLASSES, DIM) for _ in range(2)]
            with torch.no_grad():
                features = extractor(draw(60, 4))
            typical = [torch.distributions.Categorical(logits=features @ head.T).entropy().mean() for head in heads]
            found = {
                "dle-personal": torch.rand(DIM).mul(0.8).add(0.1),
                "dle-global": torch.rand(DIM).mul(0.8).add(0.1),
                "clients": torch.tensor(CLIENTS),
                "entropy-global": typical[0],
                "entropy-personal": typical[1],
                "feature-personal": features.mean(0),
                "feature-global": features.mean(0) + 0.2 * torch.randn(DIM),
                "features": features,
                "labels": torch.randint(CLASSES, (60,)),
                "rotation-head": torch.randn(4, DIM),
            }
            with torch.no_grad():
                found["validation-features"] = extractor(draw(20, 5))
            found["validation-labels"] = (found["validation-features"] @ heads[0].T).argmax(1)
        return Fitted(extractor, heads[0], heads[1], found | {k.replace("_", "-"): v for k, v in replaced.items()})

    return make


@pytest.fixture
def images() -> Tensor:
    """Return 33 images [33, 3, 8, 8]."""
    return draw(33, 8)
