"""FedTSA's TS-Block: attention over time, then over clients, trained on what the clients sent (KDD 2024, section 4.4).

Pure functions of N clients' features in T slots, X [N, T, D]. A block is a dict of six parameters: ``temporal.query``
and ``temporal.key`` [D, D], ``temporal.bias`` [D] of the queries, and ``spatial.*`` alike; one that leaves time out has
the spatial three alone. A bias of the keys would shift a whole row of scores, which softmax does not notice; values
are not mapped: weights of the features themselves are what the clients' states are mixed by.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import FedTSAOptions
from fedtta_flwr.strategies.ts_masks import spatial_mask, temporal_mask
from fedtta_flwr.strategies.updates import State

CELLS = 2**18  # of attention over clients that are made at once, or those of one slot: more would not fit into a cache


class Attention(NamedTuple):
    """What the last slot attends to; rows sum to 1.

    Attributes
    ----------
    temporal : Tensor
        [N, T], over the client's own slots.
    spatial : Tensor
        [N, N], over the clients: W.
    """

    temporal: Tensor
    spatial: Tensor


def new_block(features: int, *, over_time: bool = True) -> State:
    """Return a block for D features whose queries and keys are the features themselves."""
    block: State = {}
    for kind in ("temporal", "spatial") if over_time else ("spatial",):
        block |= {f"{kind}.query": torch.eye(features), f"{kind}.key": torch.eye(features)}
        block[f"{kind}.bias"] = torch.zeros(features)
    return block


def untrained_attention(x: Tensor, *, over_time: bool = True) -> Attention:
    r"""Return the attention of a new block on x [N, T, D], in float64: softmax of inner products.

    With T = 1 the spatial one is :math:`\mathrm{softmax}(X X^\top / \sqrt D)`.
    """
    x = x.double()
    temporal = attend(_scores(x, x) if over_time else _only_itself(x))[:, -1:]  # [N, 1, T]
    attended = (temporal @ x).squeeze(1)
    return Attention(temporal.squeeze(1), attend(_scores(attended, attended)))


def train_block(block: State, x: Tensor, options: FedTSAOptions, generator: torch.Generator) -> tuple[Attention, State]:
    """Train a block on x [N, T, D] with full-batch Adam steps, in float32.

    Returns
    -------
    Attention
        That of the step with the lowest loss, taken before the block is changed by it; of equal ones the first. A
        loss that is not finite ends the training; if it is the first one, the attention is the untrained one.
    State
        The block after the last step, or the given one if anything in it is no longer finite.
    """
    x, trained = x.float(), {name: t.clone() for name, t in block.items()}
    optimizer = Optimizer(list(trained.values()), "adam", learning_rate=options.learning_rate, fused=True)
    least, best = math.inf, untrained_attention(x, over_time="temporal.query" in block)
    for _ in range(options.steps):
        loss, attention = loss_and_attention(trained, x, options, generator)
        if not (value := loss.item()) < math.inf:
            break
        if value < least:
            least, best = value, attention
        optimizer.minimize(loss)
    finite = all(t.isfinite().all() for t in trained.values())
    return best, {name: t.detach() for name, t in trained.items()} if finite else block


def loss_and_attention(
    block: State, x: Tensor, options: FedTSAOptions, generator: torch.Generator
) -> tuple[Tensor, Attention]:
    r"""Return :math:`\mathrm{MSE}(X, R) + \lambda\, \mathrm{MSE}(R, R')` (eq. 18) and the attention behind R.

    R [N, T, D] is what both attentions make of X (eqs. 9-14), R' the same with masks (eqs. 16-17). A masked cell has
    the score minus infinity; the paper's product with 0 would leave it a weight of ``exp(0)``.

    Every projection is one of X, a constant: rows of attention sum to 1, hence (A X) W + b = A (X W + b). This takes
    half of the products that projecting both (A X) and (A' X) would, and none for their gradients.
    """
    n, slots, _ = x.shape
    weight = 0.0 if options.variant == "wo-aug" else options.augmentation_weight
    scores = _scores(*_projections(block, "temporal", x)) if "temporal.query" in block else _only_itself(x)
    temporal = attend(scores)
    over_time = temporal
    if weight:  # the masked slots follow the T others in one tensor, so that one product serves both
        seen = temporal_mask(options.masks, temporal.detach(), generator)
        over_time = torch.cat([temporal, attend(scores, _hiding(seen))], dim=1)
    # [T, N, D], or [2T, N, D]
    over_clients = ((over_time @ t).transpose(0, 1) for t in (x, *_projections(block, "spatial", x)))
    at_once = max(1, CELLS // n**2)  # slots
    sizes = [min(at_once, slots - first) for first in range(0, slots, at_once)]
    parts = list(zip(*(torch.split(t, sizes * (2 if weight else 1)) for t in over_clients), strict=True))
    restored = []
    for attended, queries, keys in parts[: len(sizes)]:
        spatial = attend(_scores(queries, keys))
        restored.append(spatial @ attended)
    plain, last = torch.cat(restored), spatial[-1].detach()
    loss = F.mse_loss(plain, x.transpose(0, 1))
    if weight:
        hiding = _hiding(spatial_mask(options.masks, last, attended[-1].detach(), generator))
        masked = [attend(_scores(queries, keys), hiding) @ attended for attended, queries, keys in parts[len(sizes) :]]
        loss = loss + weight * F.mse_loss(plain, torch.cat(masked))
    return loss, Attention(temporal[:, -1].detach(), last)


def attend(scores: Tensor, hiding: Tensor | None = None) -> Tensor:
    """Return the softmax of scores [..., M], to which `hiding` is added: minus infinity for cells without weight."""
    return (scores if hiding is None else scores + hiding).softmax(dim=-1)


def _hiding(keep: Tensor) -> Tensor:
    """Return 0 where a cell is kept (bool), and minus infinity elsewhere."""
    return torch.zeros(keep.shape).masked_fill_(~keep, -torch.inf)


def _projections(block: State, kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys [N, T, D] (eqs. 9 and 12)."""
    rows = x.flatten(0, 1)
    queries = torch.addmm(block[f"{kind}.bias"], rows, block[f"{kind}.query"])
    return queries.view_as(x), (rows @ block[f"{kind}.key"]).view_as(x)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    return queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])


def _only_itself(x: Tensor) -> Tensor:
    """Return scores [N, T, T] with which a slot attends to itself alone."""
    n, slots, _ = x.shape
    return x.new_full((slots, slots), -torch.inf).fill_diagonal_(0).expand(n, -1, -1)
