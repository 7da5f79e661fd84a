"""What is known of a round, and who is told."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedtta_flwr.adaptation.collapse import COLLAPSED
from fedtta_flwr.config import RunConfig


@dataclass(frozen=True)
class Counts:
    """Samples seen and predicted correctly, per class, of one client under one corruption.

    Attributes
    ----------
    round : int
        The round whose batches were scored.
    client, domain, score : str
        Whose, under which corruption, and which prediction (`source`, `local`, `pre`, `tta`, `post`).
    seen, correct : ndarray of int64
        [K].
    """

    round: int
    client: str
    domain: str
    score: str
    seen: NDArray[np.int64]
    correct: NDArray[np.int64]


@dataclass
class Round:
    """What one exchange with the clients brought.

    Attributes
    ----------
    number : int
        From 1; the closing exchange, which only brings the last `post` scores, is one more than the last.
    clients : tuple of str
        Those whose updates were accepted, in the order of the rows of `weights`.
    weights : Tensor or None
        W [N, N], or None for the closing exchange and for a method without one.
    domains : dict of str to frozenset of str
        Client -> the corruptions that it saw.
    interpolation : dict of (str, str) to ndarray of int64
        (client, test set) -> how many samples [BINS] gave the global head which weight, in equal bins on [0, 1].
    missing : dict of str to str
        Client -> why it took no part.
    unreached : set of str
        Those of them that could not be reached, or did not answer in time.
    steps, undone : dict of str to int
        Client -> steps that its adapter took, and those of them that were undone: their result was not finite.
    largest_share : dict of str to float
        Client -> share of one class in its predictions lately; of those that have predicted enough.
    confidence : dict of str to float
        Client -> mean probability, from 1/K to 1, that its predictions of the round had when it adapted.
    losses : dict of str to float
        Client -> mean loss of its training, where two heads are trained.
    own : dict of str to float or None
        What the method says of itself; None for what is not finite.
    clipped : tuple of str
        Clients whose change was scaled down.
    forgot : tuple of str
        Clients that went on without the states that they had kept at home: new ones, or after a restart.
    bytes_up, bytes_down : int
        Of all arrays, all clients together; as if each were a device of its own, but for the counts, which are padded
        to a node's longest visit.
    seconds : dict of str to float
        ``client`` (the clients' compute, summed), ``server``, ``transport`` (waiting while no client computed) and
        ``total``.
    memory : dict of str to int
        Peak of the resident memory of a process so far, bytes: ``client`` (the largest) and ``server``, and ``cuda`` of
        the client that allocated most there.
    """

    number: int
    closing: bool = False
    clients: tuple[str, ...] = ()
    weights: Tensor | None = None
    domains: dict[str, frozenset[str]] = field(default_factory=dict)
    counts: list[Counts] = field(default_factory=list)
    interpolation: dict[tuple[str, str], NDArray[np.int64]] = field(default_factory=dict)
    samples: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    unreached: set[str] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)
    undone: dict[str, int] = field(default_factory=dict)
    largest_share: dict[str, float] = field(default_factory=dict)
    confidence: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    own: dict[str, float | None] = field(default_factory=dict)
    clipped: tuple[str, ...] = ()
    forgot: tuple[str, ...] = ()
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """Mean loss of the clients that trained; None if nobody did."""
        return fmean(self.losses.values()) if self.losses else None

    @property
    def mean_confidence(self) -> float | None:
        """Mean confidence of the clients that predicted; None if nobody did."""
        return fmean(self.confidence.values()) if self.confidence else None

    @property
    def collapsed(self) -> tuple[str, ...]:
        """Clients that predict hardly anything but one class."""
        return tuple(sorted(client for client, share in self.largest_share.items() if share > COLLAPSED))


class Observer(Protocol):
    """Somebody who is told how a run goes: the progress line, the run directory, a tracker."""

    def on_start(self, config: RunConfig, clients: tuple[str, ...], rounds: int) -> None:
        """Hear that the run begins."""

    def on_round(self, round_: Round) -> None:
        """Hear what a round brought."""

    def on_end(self) -> None:
        """Hear that the run has ended well."""


def busy_seconds(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
