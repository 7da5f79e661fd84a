"""Who sees which samples when: a pure function of (config, client)."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.contracts import TestSet, to_tensor
from fedtta_flwr.data.orders import parse_group_orders
from fedtta_flwr.data.sampling import draw_samples
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.seeding import numpy_rng

if TYPE_CHECKING:
    from torch import Tensor

MIXED = "mixed"


def group_of(client: int, clients: int, groups: int) -> int:
    """Return the group in 0..groups-1 of a client: contiguous groups of equal size, up to one."""
    return client * groups // clients


def position_schedule(positions: int, slots_per_position: int, shift_length: int) -> list[int]:
    """Return the position (index into the corruption order) of every slot.

    Each position's slots are cut into runs of `shift_length` (the last may be shorter); the stream takes one run of
    each position in turn, then the second of each, and so on (FedTSA section 5.1; TH = 1 / shift_length).

    Returns
    -------
    list of int
        ``positions * slots_per_position`` entries.
    """
    schedule: list[int] = []
    for start in range(0, slots_per_position, shift_length):
        run = min(shift_length, slots_per_position - start)
        for position in range(positions):
            schedule += [position] * run
    return schedule


def corruption_of(position: int, group: int, corruptions: int, groups: int) -> int:
    """Return the corruption that a group sees at a position: the order, rotated by ceil(group * C / groups).

    For the papers' 15 corruptions and 4 groups the offsets are 0, 4, 8, 12.
    """
    return (position + math.ceil(group * corruptions / groups)) % corruptions


def gradual_severities(positions: Sequence[int], peak: int) -> list[int]:
    """Return the severity of every slot: from one shift to the next it rises from 1 to `peak` and falls back to 1.

    A run that is too short for all 2 * peak - 1 levels takes evenly spaced ones of them; a single slot has the peak.

    Parameters
    ----------
    positions : sequence of int
        The position of every slot (`position_schedule`).
    peak : int
        The highest severity, 1 to 5.
    """
    levels = [*range(1, peak), *range(peak, 0, -1)]
    severities: list[int] = []
    for _, group in itertools.groupby(positions):
        length = len(list(group))
        severities += [levels[(2 * i + 1) * len(levels) // (2 * length)] for i in range(length)]
    return severities


@dataclass(frozen=True)
class Stream:
    """The batches of one client, in order.

    Attributes
    ----------
    client : str
        Its name.
    group : int
        Clients of one group see the same corruption at the same time.
    domains : tuple of str
        The corruption of every slot, or "mixed".
    rows : tuple of ndarray
        The sample indices of every slot; the last of a corruption may be shorter than the others.
    severity : int
        Of every slot for which `severities` says nothing else.
    source : TestSet
        Where the samples are.
    severities : tuple of int
        Of every slot; empty where it never changes.
    mixture : tuple of tuple of str
        The corruption of every sample of every slot; empty where a slot has one corruption.
    """

    client: str
    group: int
    domains: tuple[str, ...]
    rows: tuple[NDArray[np.int64], ...]
    severity: int
    source: TestSet
    severities: tuple[int, ...] = ()
    mixture: tuple[tuple[str, ...], ...] = ()

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.domains)

    def batch(self, slot: int) -> tuple["Tensor", NDArray[np.int64] | None]:
        """Return a slot's images [B, 3, H, W] in [0, 1] and labels [B], or None where there are none."""
        rows = self.rows[slot]
        severity = self.severities[slot] if self.severities else self.severity
        if self.mixture:
            images = self._mixed(rows, np.array(self.mixture[slot]), severity)
        else:
            images = self.source.images(self.domains[slot], severity)[rows]
        x = to_tensor(images)
        return x, self.source.labels[rows]

    def _mixed(self, rows: NDArray[np.int64], names: NDArray[np.str_], severity: int) -> NDArray[np.uint8]:
        images: NDArray[np.uint8] | None = None
        for name in np.unique(names):
            part = self.source.images(str(name), severity)[rows[names == name]]
            if images is None:
                images = np.empty((len(rows), *part.shape[1:]), np.uint8)
            images[names == name] = part
        return images if images is not None else self.source.images("none", severity)[rows]


def make_stream(config: RunConfig, client: str, source: TestSet) -> Stream:
    """Cut one client's stream from a test set.

    Its samples are those of `draw_samples`, the same ones for each corruption; which corruption comes when is decided
    by ``spatial-heterogeneity`` or ``group-orders``, and by ``shift-length``.

    Raises
    ------
    ConfigError
        If the client is none of this run's, or the stream would need more samples than there are.
    """
    names = config.client_names()
    if client not in names:
        raise ConfigError(f"client {client!r}: not of this run; allowed: {names[0]} to {names[-1]}")
    samples = draw_samples(config, client, source.labels, source.classes)
    corruptions = config.corruption_names()
    group, order = _order(config, client)
    if config.mixed_domains:
        rows, mixture = _mix(config, client, samples, source.labels)
        return Stream(client, group, (MIXED,) * len(rows), rows, config.severity, source, mixture=mixture)
    batches = [samples[i : i + config.batch_size] for i in range(0, len(samples), config.batch_size)]
    schedule = position_schedule(len(corruptions), len(batches), config.shift_length)
    seen = [0] * len(corruptions)
    domains, own_rows = [], []
    for position in schedule:
        domains.append(corruptions[order[position]])
        own_rows.append(batches[seen[position]])
        seen[position] += 1
    gradual = config.severity_schedule == "gradual"
    severities = tuple(gradual_severities(schedule, config.severity)) if gradual else ()
    return Stream(client, group, tuple(domains), tuple(own_rows), config.severity, source, severities)


def _order(config: RunConfig, client: str) -> tuple[int, list[int]]:
    """Return a client's group, and which corruption it meets at each position."""
    rank, corruptions = config.client_names().index(client), len(config.corruption_names())
    first = 0
    for group, order in enumerate(parse_group_orders(config.group_orders)):
        if rank < first + order.clients:
            return group, order.positions(corruptions, config.seed, client)
        first += order.clients
    groups = config.groups()
    group = group_of(rank, config.num_clients, groups)
    return group, [corruption_of(position, group, corruptions, groups) for position in range(corruptions)]


def _mix(
    config: RunConfig, client: str, samples: NDArray[np.int64], labels: NDArray[np.int64]
) -> tuple[tuple[NDArray[np.int64], ...], tuple[tuple[str, ...], ...]]:
    """Deal the corruptions out one by one, each with the samples in an order of its own."""
    corruptions = config.corruption_names()
    columns = []
    for name in corruptions:
        column = numpy_rng(config.seed, client, "mixed", name).permutation(samples)
        if config.stream_order == "class-sorted":
            column = column[np.argsort(labels[column], kind="stable")]
        columns.append(column)
    rows = np.stack(columns, axis=1).reshape(-1)
    names = corruptions * len(samples)
    starts = range(0, len(rows), config.batch_size)
    return (
        tuple(rows[i : i + config.batch_size] for i in starts),
        tuple(names[i : i + config.batch_size] for i in starts),
    )
