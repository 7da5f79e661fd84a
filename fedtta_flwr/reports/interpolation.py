"""How much the global head counted in predictions by two heads: heads.npz in the run directory."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta_flwr.files import write_atomically
from fedtta_flwr.records import BINS
from fedtta_flwr.strategies.rounds import Round

FILE = "heads.npz"


class Interpolation:
    """Histograms of the global head's weight e, by test set and client."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[str, str], NDArray[np.int64]] = {}  # (test set, client) -> [BINS]

    def add(self, round_: Round) -> None:
        """Enter what a round brought."""
        for (client, name), histogram in round_.interpolation.items():
            self._histograms[name, client] = self._histograms.get((name, client), 0) + histogram

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the arrays of the file.

        Returns
        -------
        dict
            ``edges`` [BINS + 1], of the bins, from 0 (the personal head alone) to 1 (the global head alone); ``sets``
            [S] and ``clients`` [N], names; ``histogram`` [S, N, BINS], numbers of samples.
        """
        sets = sorted({name for name, _ in self._histograms})
        clients = sorted({client for _, client in self._histograms})
        table = np.zeros((len(sets), len(clients), BINS), dtype=np.int64)
        for (name, client), histogram in self._histograms.items():
            table[sets.index(name), clients.index(client)] = histogram
        return {
            "edges": np.linspace(0.0, 1.0, BINS + 1),
            "sets": np.array(sets, dtype=str),
            "clients": np.array(clients, dtype=str),
            "histogram": table,
        }

    def write(self, folder: Path) -> None:
        """Write the file, atomically; nothing where no heads were combined."""
        if self._histograms:
            arrays = self.arrays()
            write_atomically(folder / FILE, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))

    def snapshot(self) -> tuple[Tensor, list[tuple[str, str]]]:
        """Return what `restore` needs: the histograms [M, BINS] and whose they are."""
        stacked = np.stack(list(self._histograms.values())) if self._histograms else np.zeros((0, BINS), np.int64)
        return torch.from_numpy(stacked), list(self._histograms)

    def restore(self, histograms: Tensor, keys: list[tuple[str, str]]) -> None:
        """Go on from a snapshot."""
        self._histograms = {
            (name, client): row.copy() for (name, client), row in zip(keys, histograms.numpy(), strict=True)
        }
