"""Who sees which samples when: a pure function of (config, client)."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.datasets import TestSet
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.seeding import numpy_rng

if TYPE_CHECKING:
    from torch import Tensor


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
        The corruption of every slot.
    rows : tuple of ndarray
        The sample indices of every slot; the last of a corruption may be shorter than the others.
    """

    client: str
    group: int
    domains: tuple[str, ...]
    rows: tuple[NDArray[np.int64], ...]
    severity: int
    source: TestSet

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.domains)

    def batch(self, slot: int) -> tuple["Tensor", NDArray[np.int64] | None]:
        """Return a slot's images [B, 3, H, W] in [0, 1] and labels [B], or None where there are none."""
        import torch

        rows = self.rows[slot]
        images = self.source.images(self.domains[slot], self.severity)[rows]
        x = torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32).div_(255).contiguous()
        return x, self.source.labels[rows]


def make_stream(config: RunConfig, client: str, source: TestSet) -> Stream:
    """Cut one client's stream from a test set.

    Every client draws its samples without replacement and independently of the others, the same ones for each
    corruption (the sampler of the FedTSA and FedCTTA protocol).

    Raises
    ------
    ConfigError
        If the client is none of this run's, or the stream would need more samples than there are.
    """
    names = config.client_names()
    if client not in names:
        raise ConfigError(f"client {client!r}: not of this run; allowed: {names[0]} to {names[-1]}")
    available = len(source.labels)
    slots = config.slots_per_corruption or math.ceil(available / config.batch_size)
    wanted = slots * config.batch_size if config.slots_per_corruption else available
    if max(wanted, config.batch_size) > available:
        raise ConfigError(
            f"batch-size = {config.batch_size} x slots-per-corruption = {slots}: {slots * config.batch_size} "
            f"samples of each corruption; allowed: at most {available}, the size of {config.dataset}'s test part"
        )
    samples = numpy_rng(config.seed, client, "samples").permutation(available)[:wanted]
    batches = [samples[i : i + config.batch_size] for i in range(0, wanted, config.batch_size)]
    corruptions = config.corruption_names()
    groups = max(1, round(config.spatial_heterogeneity * config.num_clients))
    group = group_of(names.index(client), config.num_clients, groups)
    schedule = position_schedule(len(corruptions), slots, config.shift_length)
    seen = [0] * len(corruptions)
    domains, rows = [], []
    for position in schedule:
        domains.append(corruptions[corruption_of(position, group, len(corruptions), groups)])
        rows.append(batches[seen[position]])
        seen[position] += 1
    return Stream(client, group, tuple(domains), tuple(rows), config.severity, source)
