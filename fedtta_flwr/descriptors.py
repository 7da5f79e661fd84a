"""What a client tells the server about the data that it sees: pure functions of a model (and a batch).

Each returns one small tensor. A strategy names the one it needs in its `descriptor` attribute.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models.base import Classifier
from fedtta_flwr.seeding import torch_rng

Predict = Callable[[Tensor], Tensor]


def noise_images(seed: int, samples: int, shape: tuple[int, int, int]) -> Tensor:
    """Return the noise that all clients of a run share.

    Parameters
    ----------
    seed : int
        The run's seed.
    samples : int
        Number of images M.
    shape : tuple of int
        (C, H, W).

    Returns
    -------
    Tensor
        [M, C, H, W], uniform in [0, 1), the same wherever it is drawn.
    """
    return torch.rand((samples, *shape), generator=torch_rng(seed, "shared noise"))


def noise_logits(predict: Predict, noise: Tensor) -> Tensor:
    """Return a model's mean logits [K] on noise [M, C, H, W] (FedCTTA eq. 5)."""
    return predict(noise).mean(dim=0)


@torch.inference_mode()
def feature_mean(model: nn.Module, x: Tensor) -> Tensor:
    """Return a model's mean penultimate features [D] on images x [B, C, H, W] (FedTSA's indicator, section 4.4.2).

    Raises
    ------
    ConfigError
        If the model does not tell its features from its classifier.
    """
    if not isinstance(model, Classifier):
        raise ConfigError(
            f"descriptor 'feature-mean': {type(model).__name__} has no features; choose a model that is a "
            f"`fedtta_flwr.models.base.Classifier`, or a strategy that needs none"
        )
    return model.features(x).mean(dim=0)
