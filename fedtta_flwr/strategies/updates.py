"""A round's replies as stacked tensors: screening, and mixing. Pure torch."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Updates:
    """The accepted replies of one round, stacked in the order of sorted client names.

    Attributes
    ----------
    round : int
        From 1.
    clients : tuple of str
        N names, sorted.
    state : dict of Tensor
        Adapted states, each [N, *shape].
    descriptor : Tensor or None
        [N, *shape], or None if the strategy asks for none.
    examples : Tensor
        [N], samples that each client adapted to in this round (float64).
    """

    round: int
    clients: tuple[str, ...]
    state: State
    descriptor: Tensor | None
    examples: Tensor

    def __len__(self) -> int:
        """Return N."""
        return len(self.clients)


@dataclass(frozen=True)
class Update:
    """One client's reply."""

    state: State
    descriptor: Tensor | None
    examples: int


def screen(updates: Mapping[str, Update]) -> dict[str, str]:
    """Return the reason for each client whose update cannot take part.

    Left out are: tensors that differ in name, shape or dtype from those of most clients, non-finite entries, and
    negative variances. (A variance of zero is that of a constant channel; BatchNorm's epsilon copes with it.)

    Parameters
    ----------
    updates : mapping of str to Update
        By client name.

    Returns
    -------
    dict of str to str
        Client name -> one line.
    """
    rejected: dict[str, str] = {}
    tensors = {
        client: update.state | ({"descriptor": update.descriptor} if update.descriptor is not None else {})
        for client, update in updates.items()
    }
    forms = {
        client: frozenset((name, tuple(t.shape), str(t.dtype)) for name, t in state.items())
        for client, state in tensors.items()
    }
    if not forms:
        return rejected
    # The most common form; among equally common ones that of the first client in order.
    usual = Counter(forms[client] for client in sorted(forms)).most_common(1)[0][0]
    for client, state in tensors.items():
        if forms[client] != usual:
            names = sorted({name for name, *_ in forms[client] ^ usual})
            rejected[client] = f"other names, shapes or dtypes than most clients: {', '.join(names[:3])}"
            continue
        for name, tensor in state.items():
            if not tensor.isfinite().all():
                rejected[client] = f"{name} is not finite"
                break
            if name.endswith("running_var") and (tensor < 0).any():
                rejected[client] = f"{name} is negative"
                break
    return rejected


def stack_updates(round_: int, updates: Mapping[str, Update], rejected: Collection[str]) -> Updates:
    """Stack the updates that were not rejected, in the order of sorted names."""
    clients = tuple(sorted(set(updates) - set(rejected)))
    accepted = [updates[client] for client in clients]
    names = accepted[0].state if accepted else {}
    descriptors = [u.descriptor for u in accepted if u.descriptor is not None]
    return Updates(
        round=round_,
        clients=clients,
        state={name: torch.stack([u.state[name] for u in accepted]) for name in names},
        descriptor=torch.stack(descriptors) if descriptors else None,
        examples=torch.tensor([u.examples for u in accepted], dtype=torch.float64),
    )


def mix(weights: Tensor, state: Mapping[str, Tensor]) -> State:
    """Return each client's own mixture, ``theta_i = sum_j W_ij theta_j``.

    Parameters
    ----------
    weights : Tensor
        W, row-stochastic, [N, N].
    state : mapping of str to Tensor
        Each [N, *shape].

    Returns
    -------
    dict of Tensor
        The same names, shapes and dtypes.
    """
    return {name: (weights.to(t.dtype) @ t.reshape(len(t), t[0].numel())).reshape(t.shape) for name, t in state.items()}


def check_row_stochastic(weights: Tensor, clients: int) -> str | None:
    """Return what is wrong with a collaboration matrix, or None."""
    if tuple(weights.shape) != (clients, clients):
        return f"shape {list(weights.shape)}, expected [{clients}, {clients}]"
    if not weights.isfinite().all():
        return "not finite"
    if (least := weights.min().item()) < -1e-6:
        return f"an entry is {least:.2g}, expected 0 or more"
    off = (weights.sum(dim=1) - 1).abs().max().item()
    return f"a row sums to 1 +- {off:.2g}, expected 1 within 1e-4" if off > 1e-4 else None
