"""How alike clients are, and the weights that follow: float64, differences before squares."""

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 8192  # columns of [N, P] that are turned into float64 at once
ROWS = 128  # of G that are made at once, from the diagonal on: what is left of it is known from the rows above


def distances(x: Tensor) -> Tensor:
    """Return the Euclidean distances [N, N] of the rows of x [N, P]: symmetric, exactly 0 between equal rows.

    The usual expansion of the square would lose the small ones.
    """
    n = len(x)
    i, j = torch.triu_indices(n, n, offset=1)
    found = x.new_zeros((n, n), dtype=torch.float64)
    found[i, j] = found[j, i] = torch.pdist(x.to(torch.float64))
    return found


def scaled(distance: Tensor, scale: float | Tensor) -> Tensor:
    """Return distances [N, N], of at least 0, divided by a scale; one of 0 is the limit from above: 0 or infinity."""
    return distance / scale if scale > 0 else torch.zeros_like(distance).masked_fill_(distance > 0, torch.inf)


def softmax_weights(distance: Tensor, scale: float | Tensor) -> Tensor:
    """Return W [N, N], ``softmax_j(-d_ij / scale)``, for distances [N, N] of at least 0, which are 0 to oneself.

    With a scale of 0 the row's clients at distance 0 share it equally.
    """
    return torch.softmax(-scaled(distance, scale), dim=1)


def median_distance(distance: Tensor) -> Tensor:
    """Return the median of the distances [N, N] between two clients, the lower of the two in the middle.

    Infinity for a client without others.
    """
    n = len(distance)
    i, j = torch.triu_indices(n, n, offset=1)
    return distance[i, j].median() if n > 1 else distance.new_tensor(torch.inf)


def nearest(distance: Tensor) -> Tensor:
    """Return each client's distance [N], of all [N, N], to its nearest other; infinity for a client without others."""
    return distance.clone().fill_diagonal_(torch.inf).amin(dim=1)


def median_nearest(distance: Tensor) -> Tensor:
    """Return the median of the clients' distances [N, N] to their nearest other, the lower of the two in the middle.

    Infinity for a client without others.
    """
    return nearest(distance).median()


def gram(state: Mapping[str, Tensor], source: Mapping[str, Tensor], clients: int) -> Tensor:
    """Return G [N, N], ``G_ij = <theta_i - theta_0, theta_j - theta_0>`` over all tensors of the states together.

    For whole states, of which one pass over all pairs would take minutes. The differences are taken before the
    products, and from the source model, which no client can move: one that is far away costs the others no precision.

    Parameters
    ----------
    state : mapping of str to Tensor
        Adapted states theta_i, each [N, *shape]. Of an empty one G is zero.
    source : mapping of str to Tensor
        theta_0, each [*shape].
    clients : int
        N.
    """
    total = torch.zeros((clients, clients), dtype=torch.float64)
    for name, t in state.items():
        rows, origin = t.reshape(clients, t.numel() // clients), source[name].flatten()
        for start in range(0, len(origin), BLOCK):
            block = slice(start, start + BLOCK)
            delta = rows[:, block].to(torch.float64) - origin[block]
            for row in range(0, clients, ROWS):
                total[row : row + ROWS, row:].addmm_(delta[row : row + ROWS], delta[row:].T)
    for row in range(ROWS, clients, ROWS):
        total[row:, row - ROWS : row] = total[row - ROWS : row, row:].T
    return total


def squared_distances(products: Tensor) -> Tensor:
    """Return ``||theta_i - theta_j||^2`` [N, N] from their Gram matrix [N, N]; 0 between equal ones.

    So is what the products' rounding may have made: below 1e-14 of the squared lengths.
    """
    norms = products.diagonal()
    lengths = norms[:, None] + norms
    found = lengths - 2 * products
    return found.masked_fill_(found <= 1e-14 * lengths, 0.0)


def cosines(products: Tensor) -> Tensor:
    """Return the cosines [N, N] of the angles from a Gram matrix [N, N]; 0 where a vector is zero, even with itself."""
    norms = products.diagonal().sqrt()
    lengths = norms[:, None] * norms
    return torch.where(lengths > 0, products / lengths, 0.0).clamp_(-1, 1)
