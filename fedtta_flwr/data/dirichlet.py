"""Class skew: each client's class shares drawn from a Dirichlet distribution.

Two samplers. `overlapping` is pFedBBN's (its published class counts come out exactly): every client draws on its own,
with replacement where a class is too small. `disjoint` gives each sample to one client at most.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.seeding import numpy_rng

Indices = NDArray[np.int64]


def class_shares(delta: float, clients: int, classes: int, seed: int) -> tuple[NDArray[np.float64], object]:
    """Draw the clients' class shares q [N, K], each row ~ Dirichlet(delta, ..., delta).

    The legacy generator is part of the protocol: numpy's newer one draws another matrix.

    Returns
    -------
    shares : ndarray of float64
        [N, K], rows sum to 1.
    generator : numpy.random.RandomState
        As the draw left it.
    """
    generator = np.random.RandomState(seed)
    shares = generator.dirichlet(np.full(classes, delta), size=clients)
    # For a tiny delta all of a row's gamma variates underflow, and the row is 0 / 0. The limit is one class alone.
    for client in np.flatnonzero(~np.isfinite(shares).all(axis=1)):
        only = numpy_rng(seed, "only class", int(client)).integers(classes)
        shares[client] = np.eye(classes)[only]
    return shares, generator


def overlapping(labels: Indices, *, delta: float, clients: int, samples: int, classes: int, seed: int) -> list[Indices]:
    """Draw `samples` samples for every client, independently, in the order of their classes.

    Parameters
    ----------
    labels : ndarray of int64
        [N], in 0..classes-1.
    delta : float
        Concentration, > 0; the smaller, the fewer classes a client sees.
    clients, samples, classes, seed : int
        How many clients, samples of each and classes; the seed of all draws.

    Returns
    -------
    list of ndarray
        For each client [samples], positions in `labels`.

    References
    ----------
    pFedBBN (arXiv 2511.18066), appendix, tables 4 and 5; the sampler is that of Fling, on which it is built.
    """
    return _overlapping(labels.tobytes(), delta, clients, samples, classes, seed)


def disjoint(labels: Indices, *, delta: float, clients: int, samples: int, classes: int, seed: int) -> list[Indices]:
    """Share the samples out, `samples` to every client, none twice, in the order of their classes.

    Clients choose one after the other; who finds a class used up takes more of the others, by its own shares and,
    where these are 0, by what is left. A client takes at most K such steps, so it always ends.

    Parameters
    ----------
    labels : ndarray of int64
        [N], in 0..classes-1, N >= clients * samples.
    delta : float
        Concentration, > 0.
    clients, samples, classes, seed : int
        How many clients, samples of each and classes; the seed of all draws.

    Returns
    -------
    list of ndarray
        For each client [samples], positions in `labels`.

    Raises
    ------
    ValueError
        There are fewer than clients * samples samples.
    """
    if clients * samples > len(labels):
        raise ValueError(f"{clients} clients x {samples} samples > {len(labels)}")
    return _disjoint(labels.tobytes(), delta, clients, samples, classes, seed)


# Kept for the last few questions, since every client of a process asks the same one. Bytes can be a key, arrays cannot.
@lru_cache(maxsize=4)
def _overlapping(
    labels_bytes: bytes, delta: float, clients: int, samples: int, classes: int, seed: int
) -> list[Indices]:
    labels = np.frombuffer(labels_bytes, dtype=np.int64)
    members = [np.flatnonzero(labels == k) for k in range(classes)]
    shares, state = class_shares(delta, clients, classes, seed)
    generator: np.random.RandomState = state  # type: ignore[assignment]
    result = []
    for client in range(clients):
        left, chosen = samples, []
        for k in range(classes):
            wanted = int(samples * shares[client, k] + 0.5) if k < classes - 1 else left
            wanted = min(wanted, left)
            if len(members[k]) == 0:
                continue  # a class without a sample: the last one takes its share, or nobody does
            left -= wanted
            chosen.append(generator.choice(members[k], wanted, replace=wanted > len(members[k])))
        if left:  # only where classes are empty
            pool = np.arange(len(labels))
            chosen.append(generator.choice(pool, left, replace=left > len(pool)))
        drawn = np.concatenate(chosen).astype(np.int64)
        result.append(drawn[np.argsort(labels[drawn], kind="stable")])
    return result


@lru_cache(maxsize=4)
def _disjoint(labels_bytes: bytes, delta: float, clients: int, samples: int, classes: int, seed: int) -> list[Indices]:
    labels = np.frombuffer(labels_bytes, dtype=np.int64)
    rng = numpy_rng(seed, "disjoint classes")
    pools = [rng.permutation(np.flatnonzero(labels == k)) for k in range(classes)]
    left = np.array([len(pool) for pool in pools])
    shares, _ = class_shares(delta, clients, classes, seed)
    result: list[Indices] = [np.empty(0, np.int64)] * clients
    for client in rng.permutation(clients):  # not by number: the last to choose have the least choice
        taken = np.zeros(classes, dtype=np.int64)
        while (short := samples - int(taken.sum())) > 0:
            free = left - taken
            weights = np.where(free > 0, shares[client], 0.0)
            if weights.sum() <= 0:
                weights = free.astype(np.float64)
            taken += np.minimum(_apportion(short, weights / weights.sum()), free)
        parts = []
        for k in np.flatnonzero(taken):
            parts.append(pools[k][left[k] - taken[k] : left[k]])
        left -= taken
        result[client] = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return result


def _apportion(total: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Split a whole number by shares that sum to 1 (largest remainders)."""
    exact = total * shares
    parts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - parts), kind="stable")
    parts[order[: total - int(parts.sum())]] += 1
    return parts
