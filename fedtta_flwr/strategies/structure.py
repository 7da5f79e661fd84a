"""What a collaboration matrix says about who helps whom, in a few numbers. Pure torch."""

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

STRUCTURE = ("self_weight", "entropy", "evenness", "within_group")


def structure(weights: Tensor, groups: Sequence[Hashable | None]) -> dict[str, float | None]:
    """Return the numbers of `STRUCTURE`, for W [N, N] and the group of each client; None for what is not known."""
    found = self_weight(weights), entropy(weights), evenness(weights), within_group(weights, groups)
    return dict(zip(STRUCTURE, found, strict=True))


def self_weight(weights: Tensor) -> float:
    """Return the mean weight of a client's own state, from 0 to 1, for W [N, N]."""
    return float(weights.diagonal().double().mean())


def entropy(weights: Tensor) -> float:
    """Return the mean entropy of a row of W [N, N] in nats: from 0, one client alone, to ln N, all alike."""
    return float(torch.special.entr(weights.double().clamp_min(0)).sum(dim=1).mean())


def evenness(weights: Tensor) -> float | None:
    """Return the entropy of W [N, N] in units of ln N, from 0 to 1; None for one client, who has no choice."""
    clients = len(weights)
    return entropy(weights) / math.log(clients) if clients > 1 else None


def within_group(weights: Tensor, groups: Sequence[Hashable | None]) -> float | None:
    """Return the mean weight that a client gives to its group, itself included, from 0 to 1.

    Parameters
    ----------
    weights : Tensor
        W [N, N].
    groups : sequence
        Of N: equal for clients of the same group; None where it is not known. These clients are left out of the mean.

    Returns
    -------
    float or None
        None if no client's group is known.
    """
    numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    number = torch.tensor([numbers[group] for group in groups])
    known = torch.tensor([group is not None for group in groups])
    if not known.any():
        return None
    inside = (weights.double() * (number[:, None] == number)).sum(dim=1)
    return float(inside[known].mean())
