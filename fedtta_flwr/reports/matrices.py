"""The collaboration matrices of a run: collaboration.npz in the run directory."""

from logging import WARNING
from pathlib import Path
from zlib import compress

import numpy as np
from flwr.common.logger import log
from numpy.typing import NDArray
from torch import Tensor

from fedtta_flwr.errors import CheckpointError
from fedtta_flwr.files import write_atomically
from fedtta_flwr.reports.mistrust import collaboration_fault, read_arrays

FILE = "collaboration.npz"
WORTH = 0.5  # of a matrix that compression leaves at most where it is worth its time
BUDGET = 256 * 2**20  # bytes of all that are kept


class Matrices:
    """W of every round; of every 2nd, 4th, ... and of the latest, where all would take more than 256 MiB.

    A run may have thousands of clients, or no end.

    Parameters
    ----------
    clients : tuple of str
        In the order of rows and columns.

    Attributes
    ----------
    every : int
        1, or a power of 2: rounds 1, 1 + every, 1 + 2 every, ... are kept.
    """

    def __init__(self, clients: tuple[str, ...]) -> None:
        self.every = 1
        self._clients = clients
        self._place = {client: i for i, client in enumerate(clients)}
        self._kept: dict[int, NDArray[np.float32]] = {}  # round -> [N, N]

    def add(self, number: int, clients: tuple[str, ...], weights: Tensor) -> None:
        """Enter W [M, M] of a round that these M clients were in; rows and columns of all others are 0."""
        matrix = np.zeros((len(self._clients),) * 2, dtype=np.float32)
        rows = [self._place[client] for client in clients]
        matrix[np.ix_(rows, rows)] = weights.numpy()
        latest = next(reversed(self._kept), 1)
        if not self._stays(latest):
            del self._kept[latest]
        self._kept[number] = matrix
        before = self.every
        while len(self._kept) > 2 and len(self._kept) * matrix.nbytes > BUDGET:
            self.every *= 2
            self._kept = {n: m for n, m in self._kept.items() if self._stays(n) or n == number}
        if self.every > before:
            log(WARNING, "%s keeps one round in %d from now on: all take more than 256 MiB", FILE, self.every)

    def write(self, folder: Path) -> None:
        """Write the file, atomically: ``weights`` [T, N, N], ``rounds`` [T] and ``clients`` [N]."""
        shape = (len(self._kept), len(self._clients), len(self._clients))
        weights = np.array(list(self._kept.values()), dtype=np.float32).reshape(shape)
        rounds, clients = np.array(list(self._kept), dtype=np.int64), np.array(self._clients)
        # Zeros and equal rows are soon next to nothing; weights of which no two are alike take seconds, and stay large.
        latest = weights[-1:].tobytes()
        save = np.savez_compressed if len(compress(latest, 1)) <= WORTH * len(latest) else np.savez
        write_atomically(folder / FILE, lambda file: save(file, weights=weights, rounds=rounds, clients=clients))

    def restore(self, folder: Path, last: int, every: int) -> None:
        """Go on from a file as it was after the round `last`.

        Raises
        ------
        CheckpointError
            If it is not there, or damaged.
        """
        faults: list[str] = []
        found = read_arrays(folder / FILE, collaboration_fault, len(self._clients), faults)
        if found is None:
            raise CheckpointError(f"{folder}: {faults[0]}; restore it from a copy")
        self.every = every
        self._kept = {n: m for n, m in zip(found["rounds"].tolist(), found["weights"], strict=True) if n <= last}

    def _stays(self, number: int) -> bool:
        """Return whether a round is kept when it is no longer the latest."""
        return (number - 1) % self.every == 0
