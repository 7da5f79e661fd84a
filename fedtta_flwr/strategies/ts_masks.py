"""FedTSA's heterogeneity-aware augmentation: which cells of its two attentions are masked (KDD 2024, section 4.4.2).

Masks are bool, True where a cell is kept, and never mask the diagonal.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Masks = Literal["sampling", "bernoulli"]
#: shares that are drawn: cells of A^(T) to mask, edges of the graph to drop, pairs without an edge to add
MASKED, DROPPED, ADDED = 0.75, 0.8, 0.2
#: by how much a cosine is above the mean, at least: that of float32 features which differ by rounding alone is not
MARGIN = 1e-12


def temporal_mask(masks: Masks, attention: Tensor, generator: torch.Generator) -> Tensor:
    """Return which slots each slot may attend to.

    Parameters
    ----------
    masks : {"sampling", "bernoulli"}
        Sampling, as the published code: of each client's T^2 cells three quarters (rounded down) are drawn in turn,
        with probabilities in proportion to 1 - a. Bernoulli, as the paper: each cell is kept with probability a.
    attention : Tensor
        A^(T) [N, T, T].
    generator : torch.Generator
        On the CPU.

    Returns
    -------
    Tensor
        [N, T, T].
    """
    if masks == "bernoulli":
        return _bernoulli(attention, generator)
    cells = attention.flatten(1)
    masked = draw(1 - cells, int(MASKED * cells.shape[1]), generator)
    return ~masked.view_as(attention) | _diagonal(attention)


def spatial_mask(masks: Masks, attention: Tensor, features: Tensor, generator: torch.Generator) -> Tensor:
    """Return which clients each client may attend to, [N, N]; not symmetric.

    Parameters
    ----------
    masks : {"sampling", "bernoulli"}
        Sampling, as the published code: of the graph's edges 80 % are dropped, drawn in proportion to 1 - a, and of
        the pairs without one 20 % added, drawn in proportion to a (both rounded down). Bernoulli, as the paper: an
        edge is dropped with probability 1 - a, one that is not there added with probability a. Either way it is kept
        with probability a, so that the graph has no part in it.
    attention : Tensor
        A^(S) of the last slot, [N, N].
    features : Tensor
        The last slot's, [N, D], from which the graph is made (`similarity_graph`).
    generator : torch.Generator
        On the CPU.
    """
    if masks == "bernoulli":
        return _bernoulli(attention, generator)
    own = _diagonal(attention)
    edges = similarity_graph(features) & ~own
    others = ~edges & ~own
    dropped = draw((1 - attention).mul(edges).flatten(), int(DROPPED * int(edges.sum())), generator)
    added = draw(attention.mul(others).flatten(), int(ADDED * int(others.sum())), generator)
    return edges & ~dropped.view_as(edges) | added.view_as(edges) | own


def similarity_graph(features: Tensor) -> Tensor:
    """Return which clients' features [N, D] are more alike (cosine) than the mean of all N^2 pairs, bool [N, N].

    The diagonal counts as any other pair (eq. 15, with > as in the published code). Among equal clients, for which
    rounding would decide, nobody is more alike than the mean: no pair at all. Features that are zero are like nothing.
    """
    features = features.double()
    unit = F.normalize(features, dim=1, eps=torch.finfo(features.dtype).tiny)
    cosine = unit @ unit.T
    return cosine > cosine.mean() + MARGIN


def draw(chances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return which of C cells are drawn, one after the other without replacement, in each row of chances [..., C].

    The next one is a cell not yet drawn, with probability in proportion to its chance (0 or more). If fewer than
    `count` (at most C) have a chance, these are drawn. Exponential race: of independent arrivals with these rates, the
    first ones.
    """
    speed = chances / torch.empty_like(chances).exponential_(generator=generator)
    drawn = torch.zeros_like(chances, dtype=torch.bool)
    return drawn.scatter_(-1, speed.topk(count, sorted=False).indices, True) & (chances > 0)


def _bernoulli(attention: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.rand(attention.shape, generator=generator) < attention) | _diagonal(attention)


def _diagonal(attention: Tensor) -> Tensor:
    return torch.eye(attention.shape[-1], dtype=torch.bool)
