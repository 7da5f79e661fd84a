"""Bounds on what one client can do to the others, whatever the method: on its step, and on its weight. Pure torch."""

import torch
from torch import Tensor

from fedtta_flwr.strategies.updates import State, is_statistic


def clip_changes(state: State, received: State, factor: float) -> tuple[State, Tensor]:
    """Scale down changes that are far larger than those of the others.

    Of each client's change ``state - received`` the L2 norm is taken, over all parameters and over all statistics
    apart, since their scales have nothing in common. One above ``factor`` times the median is scaled down to that;
    the change keeps its direction, and a variance stays between two that are not negative. More than half of the
    clients would have to be malicious together to move the median at will.

    Parameters
    ----------
    state, received : dict of Tensor
        [N, *shape], what the clients sent, and what they began the round from.
    factor : float
        Above 0. The median is that of clients that changed anything, the lower one of an even number.

    Returns
    -------
    state : dict of Tensor
        Those of other clients to the bit.
    clipped : Tensor
        [N], bool.
    """
    result = dict(state)
    clipped = torch.zeros(len(next(iter(state.values()))) if state else 0, dtype=torch.bool)
    for statistics in (False, True):
        names = [name for name in state if is_statistic(name) == statistics]
        if not names:
            continue
        # Tensor by tensor: all at once would take several times the memory of the states.
        norms = torch.stack([_norms(state[name], received[name]) for name in names]).norm(dim=0)
        if not norms.any():
            continue
        scales = (factor * norms[norms > 0].median() / norms).clamp(max=1.0)  # infinite, so 1, of no change
        clipped |= (scales < 1).cpu()
        for name in names if (scales < 1).any() else ():
            scale = scales.view(-1, *[1] * (state[name].dim() - 1))
            smaller = torch.lerp(received[name].double(), state[name].double(), scale).to(state[name].dtype)
            result[name] = torch.where(scale < 1, smaller, state[name])
    return result, clipped


def _norms(t: Tensor, began: Tensor) -> Tensor:
    """Return the norms [N] of a tensor's changes [N, *shape], in float64."""
    change = t.double() - began.double()
    norms: Tensor = change.view(len(t), t.numel() // len(t)).norm(dim=1)
    return norms


def cap_weights(weights: Tensor, cap: float) -> Tensor:
    """Return W [N, N] in which no other client weighs more than ``cap``; what is above goes to a client's own state."""
    others = weights.clone().fill_diagonal_(0.0)
    excess = (others - cap).clamp_min(0)
    return weights - excess + excess.sum(dim=1).diag()
