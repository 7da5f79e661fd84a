"""What a client tells the server about the data that it sees: pure functions of a network and images.

Each returns one small tensor. A strategy names the one it needs in its `descriptor` attribute;
`fedtta_flwr.workbench.DESCRIPTORS` says by name whose answer to which images that is.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.base import batch_norms, classifier, inputs_of, statistics
from fedtta_flwr.adaptation.bn_stats import moments
from fedtta_flwr.adaptation.layers import BatchNorm, more_than_batch_norm, normalised_by, widened
from fedtta_flwr.data.contracts import Images, to_tensor
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.seeding import numpy_rng, torch_rng

Predict = Callable[[Tensor], Tensor]


def noise_images(seed: int, samples: int, shape: tuple[int, int, int], *purpose: str | int) -> Tensor:
    """Return the noise that all clients of a run share.

    Parameters
    ----------
    seed : int
        The run's seed.
    samples : int
        Number of images M.
    shape : tuple of int
        (C, H, W).
    *purpose : str or int
        Names another draw: of a round, of a client.

    Returns
    -------
    Tensor
        [M, C, H, W], uniform in [0, 1), the same wherever it is drawn.
    """
    return torch.rand((samples, *shape), generator=torch_rng(seed, "shared noise", *purpose))


def chosen_images(clean: Images, seed: int, samples: int) -> Tensor:
    """Return clean images [M, 3, H, W] in [0, 1] of a data set, chosen by the seed alone, no image twice.

    Raises
    ------
    ConfigError
        If the set has fewer.
    """
    if samples > len(clean):
        raise ConfigError(f"{samples} chosen images: the data set has {len(clean)} clean ones; ask for fewer, or noise")
    rows = np.sort(numpy_rng(seed, "chosen images").permutation(len(clean))[:samples])
    return to_tensor(clean[rows])


def form_of(descriptor: str, model: nn.Module, classes: int) -> Tensor | None:
    """Return zeros of the form that a descriptor of this name has for K classes; None if none is asked for."""
    if not descriptor:
        return None
    if descriptor == "bn-statistics":
        return torch.cat([torch.zeros_like(t) for t in statistics(model).values()])
    if "feature" in descriptor:
        return torch.zeros(classifier(model, descriptor)[1].in_features)
    return torch.zeros(classes)


@torch.no_grad()
def mean_logits(predict: Predict, images: Tensor) -> Tensor:
    """Return the mean logits [K] on images [M, C, H, W] (FedCTTA eq. 6)."""
    return predict(images).mean(dim=0)


@torch.no_grad()
def mean_features(predict: Predict, head: nn.Module, images: Tensor) -> Tensor:
    """Return the mean penultimate features [D] on images [M, C, H, W]: what enters `head` while `predict` looks."""
    with inputs_of(head) as seen:
        predict(images)
    return seen[-1].mean(dim=0)


@torch.no_grad()
def bn_statistics(model: nn.Module, x: Tensor) -> Tensor:
    """Return the statistics of a batch x [B, C, H, W] in all BatchNorm layers, each of which normalises with them.

    They are those that TTA-bn (`fedtta_flwr.adaptation.bn_stats`) would take over; the model stays as it is.

    Returns
    -------
    Tensor
        Mean and variance of the first layer, of the second ..., in the order and with the sizes of
        `fedtta_flwr.adaptation.base.statistics`, as one vector.

    Raises
    ------
    ConfigError
        If there is no BatchNorm layer that tracks statistics.
    """
    found = statistics(model)
    if not found:
        raise ConfigError(
            f"descriptor 'bn-statistics': {type(model).__name__} has no BatchNorm layer with statistics; choose a "
            f"model with BatchNorm, or another strategy"
        )
    if more := more_than_batch_norm(batch_norms(model)):
        raise ConfigError(
            f"descriptor 'bn-statistics': {more}; choose another strategy, or a network whose BatchNorm layers are "
            f"torch's"
        )

    def normalise(name: str, layer: BatchNorm, h: Tensor) -> Tensor:
        mean, var = f"{name}.running_mean", f"{name}.running_var"
        if h.numel() > h.shape[1]:  # one value per channel has no variance: the layer's own are left
            found[mean], found[var] = moments(widened(h))
        return F.batch_norm(h, found[mean], found[var], layer.weight, layer.bias, False, 0.0, layer.eps)

    with normalised_by(model, normalise):
        model(x)
    return torch.cat(list(found.values()))
