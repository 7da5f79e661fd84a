"""A round's replies as stacked tensors: screening, and mixing. Pure torch."""

import math
import re
from collections.abc import Collection, Container, Iterable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]
BLOCK = 65_536  # columns of [N, P] that are mixed at once: more gains nothing, and fewer would have to be copied back
#: means and variances by name: those of BatchNorm, of one class, of a teacher; a parameter may well be a ``log_var``
STATISTIC = re.compile(r"(?:.*[._])?(?:running|class|teacher)_(?:mean|var)")
LARGEST = 1e18  # that a client may send: squares of much more are no float32, and one client must end nobody's run


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
    began : tuple of dict
        The states from which the N clients began this round, not stacked: a client's last personal state, or the
        source model's.
    expendable : bool
        Whether nobody needs `state` once it is mixed, so that the mixture may take its place.
    """

    round: int
    clients: tuple[str, ...]
    state: State
    descriptor: Tensor | None
    examples: Tensor
    began: tuple[State, ...] = ()
    expendable: bool = False

    def __len__(self) -> int:
        """Return N."""
        return len(self.clients)


@dataclass(frozen=True)
class Update:
    """One client's reply."""

    state: State
    descriptor: Tensor | None
    examples: int

    def described(self) -> State:
        """Return the descriptor by its name, if there is one."""
        return {} if self.descriptor is None else {"descriptor": self.descriptor}


def screen(updates: Mapping[str, Update], expected: Update) -> dict[str, str]:
    """Return the reason for each client whose update cannot take part.

    Left out are: tensors that differ in name, shape or dtype from those that were asked for, entries that are not
    finite or beyond `LARGEST`, and negative variances. (A variance of zero is that of a constant channel; BatchNorm's
    epsilon copes with it.)

    Parameters
    ----------
    updates : mapping of str to Update
        By client name.
    expected : Update
        One of the right form, wherever its tensors are; their values do not count.

    Returns
    -------
    dict of str to str
        Client name -> one line.
    """
    state, descriptor = (
        {name: form(t.detach().cpu()) for name, t in part.items()} for part in (expected.state, expected.described())
    )
    rejected: dict[str, str] = {}
    for client, update in updates.items():
        fault = check_states(update.state, state, "what was asked for", LARGEST)
        # Apart: a state may have a tensor of that name.
        if fault := fault or check_states(update.described(), descriptor, "what was asked for", LARGEST):
            rejected[client] = fault
    return rejected


def stack_updates(
    round_: int,
    updates: Mapping[str, Update],
    rejected: Collection[str],
    personal: Mapping[str, State] | None = None,
    source: State | None = None,
    *,
    expendable: bool = False,
) -> Updates:
    """Stack copies of the updates that were not rejected, in the order of sorted names.

    `personal` holds the states that were sent, by client; one that was sent none began from `source`.
    """
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
        began=tuple((personal or {}).get(client, source or {}) for client in clients),
        expendable=expendable,
    )


def is_statistic(name: str) -> bool:
    """Return whether a tensor of this name holds means or variances of a normalisation layer, not parameters."""
    return STATISTIC.fullmatch(name) is not None


def is_variance(name: str) -> bool:
    """Return whether a tensor of this name holds variances."""
    return is_statistic(name) and name.endswith("_var")


def means_of(name: str, among: Container[str]) -> str | None:
    """Return the name of the means that belong to variances of this name, if it is one of these; None without any.

    Of means that do not travel the server knows no differences.
    """
    means = name.removesuffix("_var") + "_mean"
    return means if is_variance(name) and means in among else None


def flat(state: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Return the named tensors, each [N, *shape], as one matrix [N, P] with a client's values in a row."""
    return torch.cat([t.reshape(len(t), t.numel() // len(t)) for t in (state[name] for name in names)], dim=1)


def mix(weights: Tensor, state: Mapping[str, Tensor], *, moments: bool = False) -> State:
    r"""Return each client's own mixture, ``theta_i = sum_j W_ij theta_j``.

    Parameters
    ----------
    weights : Tensor
        W, row-stochastic, [N, M].
    state : mapping of str to Tensor
        Each [M, *shape]; M = N but where a client has several states.
    moments : bool
        Whether variances are those of the mixture of the clients' data,
        :math:`\sum_j W_{ij} (v_j + (m_j - m_i)^2)` with the mixed mean :math:`m_i` (law of total variance). False:
        their weighted mean, as all published codes have it.

    Returns
    -------
    dict of Tensor
        The same names and dtypes, each [N, *shape].
    """
    copy = {name: t.clone(memory_format=torch.contiguous_format) for name, t in state.items()}
    return {name: t.contiguous() for name, t in mix_(weights, copy, moments=moments).items()}


def mix_(weights: Tensor, state: MutableMapping[str, Tensor], *, moments: bool = False) -> State:
    """Do what `mix` does in the memory of the states themselves, which must be contiguous.

    It needs no more than `BLOCK` columns beside them, and is the faster for it. `state` is empty afterwards: who still
    asked for a client's own state would get a mixture. Where all rows of W are the same, clients have one mixture, as
    views; where W is the identity, nothing is done.
    """
    mixed = dict(state)
    state.clear()
    clients = len(weights)
    if torch.equal(weights, torch.eye(clients, dtype=weights.dtype)):
        return mixed
    if (weights == weights[:1]).all():
        weights = weights[:1]
    weights_as = {dtype: weights.to(dtype) for dtype in {t.dtype for t in mixed.values()}}
    # With moments variances come first: they need the means as they were.
    for name in sorted(mixed, key=is_variance, reverse=True) if moments else list(mixed):
        t = mixed[name]
        w, columns = weights_as[t.dtype], t.numel() // len(t)
        values = t.view(len(t), columns)
        own = means_of(name, mixed) if moments else None
        means = mixed[own].view_as(values) if own else None
        if columns <= BLOCK or len(w) != len(t):
            mixed[name] = _product(w, values, means).expand(clients, columns).view(clients, *t.shape[1:])
            continue
        for start in range(0, columns, BLOCK):
            block = slice(start, start + BLOCK)
            values[:, block] = _product(w, values[:, block], None if means is None else means[:, block])
    return mixed


def _product(weights: Tensor, values: Tensor, means: Tensor | None) -> Tensor:
    """Return W @ values [N, P]; of variances whose `means` are given, those of the mixed data."""
    product = weights.mm(values)
    if means is not None:
        # About each mixture's own mean, not by a difference of squares: of that a client far away takes all digits,
        # even with a weight of 0. In blocks of rows: no [N, N, P].
        spread = torch.vmap(lambda row, mean: row @ (means - mean).square(), chunk_size=16)
        product += spread(weights, weights.mm(means))
    return product


def check_row_stochastic(weights: object, clients: int) -> str | None:
    """Return what is wrong with a collaboration matrix and what to do, or None."""
    if not isinstance(weights, Tensor):
        return f"{type(weights).__name__}, expected a Tensor [{clients}, {clients}]: return one"
    if weights.layout != torch.strided:
        return f"{weights.layout}, expected all entries of [{clients}, {clients}]: return its to_dense()"
    if tuple(weights.shape) != (clients, clients):
        return f"shape {list(weights.shape)}, expected [{clients}, {clients}]: one row and column a client"
    if weights.dtype not in (torch.float32, torch.float64):
        return f"{weights.dtype}, expected torch.float32 or torch.float64: convert what it is computed from"
    if not weights.isfinite().all():
        return "not finite: guard its divisions and logarithms, e.g. for clients that are equal"
    if (least := weights.min().item()) < -1e-6:
        return f"an entry is {least:.2g}, expected 0 or more: clamp it, or override `personalize` instead"
    off = (weights.sum(dim=1) - 1).abs().max().item()
    return f"a row sums to 1 +- {off:.2g}, expected 1 within 1e-4: divide each by its sum" if off > 1e-4 else None


def form(t: object) -> str:
    """Return dtype, shape and device of a tensor in words."""
    if not isinstance(t, Tensor):
        return type(t).__name__
    return f"{t.dtype} {list(t.shape)} on {t.device}{' with a gradient' if t.requires_grad else ''}"


def check_states(
    states: object, forms: Mapping[str, str], like: str = "updates.state", largest: float = math.inf
) -> str | None:
    """Return what is wrong with states that shall be of these forms, those of `like`, and no larger, or None."""
    if not isinstance(states, Mapping):
        return f"{type(states).__name__}, expected tensors by name: return a dict"
    if states.keys() != forms.keys():
        names = ", ".join(sorted(map(str, states.keys() ^ forms.keys()))[:3])
        return f"{len(states)} tensors, expected the {len(forms)} of {like}; first that differ: {names}"
    for name, expected in forms.items():
        if (found := form(states[name])) != expected:
            return f"{name} is {found}, expected {expected}, as in {like}"
    return _unsound(states, largest)


def _unsound(state: Mapping[str, Tensor], largest: float = math.inf) -> str | None:
    """Return the first tensor that no network can work with, and why, or None; variances may reach the square."""
    for name, t in state.items():
        if t.dim() and t.stride(0) == 0:  # one mixture for all: one row
            t = t[:1]
        # One pass over all that was sent, without a copy; both ends are NaN where an entry is.
        low, high = (end.item() for end in t.aminmax()) if t.numel() else (0.0, 0.0)
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"{name} is not finite"
        if is_variance(name) and low < 0:
            return f"{name} is negative"
        if max(-low, high) > (allowed := largest**2 if is_variance(name) else largest):
            return f"{name} reaches {max(-low, high):.2g}, allowed: {allowed:.0e}"
    return None
