"""Bounds on what one client can do to the others, whatever the method: on its step, and on its weight. Pure torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtta_flwr.strategies.updates import State, is_statistic

FEWEST = 3  # of two changes nobody can say which is too large


def clip_changes(state: State, began: Sequence[State], source: State, factor: float) -> tuple[State, Tensor]:
    """Scale down changes that are far larger than those of the others.

    Of each client's change, from what it received or from the source model, whichever is nearer (a client may have been
    reset), the L2 norm is taken, over all parameters and over all statistics apart, since their scales have nothing
    in common. One above ``factor`` times the median is scaled down to that; the change keeps its direction, and a
    variance stays between two that are not negative. The median is an honest one where more than half of the clients
    that changed anything are; of fewer than `FEWEST` such clients it says nothing, and nobody is scaled down.

    Parameters
    ----------
    state : dict of Tensor
        [N, *shape], what the clients sent.
    began : sequence of dict
        Of each client, what it received.
    source : dict of Tensor
        The state of the source model.
    factor : float
        Above 0. Of an even number of clients it is the lower median.

    Returns
    -------
    state : dict of Tensor
        Those of other clients to the bit.
    clipped : Tensor
        [N], bool.
    """
    result, clipped = dict(state), torch.zeros(len(began), dtype=torch.bool)
    for statistics in (False, True):
        names = [name for name in state if is_statistic(name) == statistics]
        if not names:
            continue
        # Tensor by tensor: all at once would take several times the memory of the states.
        moved = torch.stack([_norms(state[name], _stack(began, name)) for name in names]).norm(dim=0)
        away = torch.stack([_norms(state[name], source[name]) for name in names]).norm(dim=0)
        norms = torch.minimum(moved, away)
        if (norms > 0).sum() < FEWEST:
            continue
        scales = (factor * norms[norms > 0].median() / norms).clamp(max=1.0)  # infinite, so 1, of no change
        clipped |= (scales < 1).cpu()
        for name in names if (scales < 1).any() else ():
            t = state[name]
            scale, reset = (of_each.view(-1, *[1] * (t.dim() - 1)) for of_each in (scales, away < moved))
            base = torch.where(reset, source[name], _stack(began, name))
            smaller = torch.lerp(base.double(), t.double(), scale).to(t.dtype)
            result[name] = torch.where(scale < 1, smaller, t)
    return result, clipped


def _stack(states: Sequence[State], name: str) -> Tensor:
    return torch.stack([state[name] for state in states])


def _norms(t: Tensor, base: Tensor) -> Tensor:
    """Return the norms [N] of a tensor's changes [N, *shape], in float64."""
    change = t.double() - base.double()
    norms: Tensor = change.view(len(t), t.numel() // len(t)).norm(dim=1)
    return norms


def cap_weights(weights: Tensor, cap: float) -> Tensor:
    """Return W [N, N] in which no other client weighs more than ``cap``; what is above goes to a client's own state."""
    others = weights.clone().fill_diagonal_(0.0)
    excess = (others - cap).clamp_min(0)
    return weights - excess + excess.sum(dim=1).diag()
