"""How alike clients are, and the weights that follow: float64, differences before squares."""

import torch
from torch import Tensor


def distances(x: Tensor) -> Tensor:
    """Return the Euclidean distances [N, N] of the rows of x [N, P]: symmetric, exactly 0 between equal rows.

    The usual expansion of the square would lose the small ones.
    """
    n = len(x)
    i, j = torch.triu_indices(n, n, offset=1)
    found = x.new_zeros((n, n), dtype=torch.float64)
    found[i, j] = found[j, i] = torch.pdist(x.to(torch.float64))
    return found


def softmax_weights(distance: Tensor, scale: float | Tensor) -> Tensor:
    """Return W [N, N], ``softmax_j(-d_ij / scale)``, for distances [N, N] of at least 0, which are 0 to oneself.

    A scale of 0 is the limit from above: the row's clients at distance 0 share it equally.
    """
    scaled = distance / scale if scale > 0 else torch.zeros_like(distance).masked_fill_(distance > 0, torch.inf)
    return torch.softmax(-scaled, dim=1)


def median_distance(distance: Tensor) -> Tensor:
    """Return the median of the distances [N, N] between two clients, the lower of the two in the middle.

    Infinity for a client without others.
    """
    n = len(distance)
    i, j = torch.triu_indices(n, n, offset=1)
    return distance[i, j].median() if n > 1 else distance.new_tensor(torch.inf)


def median_nearest(distance: Tensor) -> Tensor:
    """Return the median of the clients' distances [N, N] to their nearest other, the lower of the two in the middle.

    Infinity for a client without others.
    """
    return distance.clone().fill_diagonal_(torch.inf).amin(dim=1).median()
