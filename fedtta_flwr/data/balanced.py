"""FedTHE's partition: class shares from a Dirichlet distribution, clients of nearly equal size, no sample twice."""

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.seeding import numpy_rng

Indices = NDArray[np.int64]
#: clients among whom one part of the data is dealt out ("auxiliary workers"): with all at once, the last would starve
AUXILIARY = 10
SMALLEST = 0.5  # of a fair share; a deal that leaves anybody less is drawn anew
ATTEMPTS = 10_000


def balanced_dirichlet(labels: Indices, *, alpha: float, clients: int, classes: int, seed: int) -> list[Indices]:
    r"""Deal all samples out to the clients, each class by shares drawn from a Dirichlet distribution.

    The shuffled samples are cut into one part for every `AUXILIARY` clients, in proportion to their number. Within a
    part, class by class, shares :math:`q \sim \mathrm{Dir}(\alpha, \ldots, \alpha)` are drawn over its clients; who
    holds a fair share already gets none of that class, and the others' shares are scaled up. A part is drawn anew
    until its smallest client has half a fair share.

    Parameters
    ----------
    labels : ndarray of int64
        [N], in 0..classes-1.
    alpha : float
        Concentration, > 0; the smaller, the fewer classes a client has.
    clients, classes, seed : int
        How many clients and classes; the seed of all draws.

    Returns
    -------
    list of ndarray
        For each client its positions in `labels`, about N / clients; together every position once.

    Raises
    ------
    ValueError
        No deal was balanced: too few samples for so many clients, or so small an alpha for so few classes.

    References
    ----------
    Jiang, Lin. FedTHE. ICLR 2023 (arXiv 2205.10920), section 4; BTFL (KDD 2025) takes it over. In the code of both
    the auxiliary workers are 10.
    """
    rng = numpy_rng(seed, "balanced classes")
    order = rng.permutation(len(labels)).astype(np.int64)
    firsts = [*range(0, clients, AUXILIARY), clients]
    cuts = [first * len(labels) // clients for first in firsts]
    shared: list[Indices] = []
    for i in range(len(firsts) - 1):
        part = order[cuts[i] : cuts[i + 1]]
        shared += _deal(rng, part, labels[part], alpha, firsts[i + 1] - firsts[i], classes)
    return shared


def _deal(
    rng: np.random.Generator, rows: Indices, labels: Indices, alpha: float, clients: int, classes: int
) -> list[Indices]:
    fair = len(rows) / clients
    members = [rows[labels == k] for k in range(classes)]
    for _ in range(ATTEMPTS):
        held = np.zeros(clients, dtype=np.int64)
        hands: list[list[Indices]] = [[] for _ in range(clients)]
        for own in members:
            shares = rng.dirichlet(np.full(clients, alpha)) * (held < fair)
            if not (total := shares.sum()) > 0:  # also NaN, where a tiny alpha underflows
                shares, total = (held < fair).astype(np.float64), float((held < fair).sum())
            ends = (np.cumsum(shares / total)[:-1] * len(own)).astype(np.int64)
            for client, dealt in enumerate(np.split(own, ends)):
                hands[client].append(dealt)
                held[client] += len(dealt)
        if held.min() >= max(1, int(SMALLEST * fair)):
            return [rng.permutation(np.concatenate(hand)) for hand in hands]
    raise ValueError(f"{len(rows)} samples cannot be dealt out to {clients} clients in nearly equal numbers")
