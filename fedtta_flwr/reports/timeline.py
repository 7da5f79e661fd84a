"""Who saw what when, and how well it was predicted: timeline.npz in the run directory."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta_flwr.config import SCORES
from fedtta_flwr.files import write_atomically
from fedtta_flwr.strategies.rounds import Round

FILE = "timeline.npz"


class Timeline:
    """Samples seen and predicted correctly, by score, round and client; each visit's corruption and confidence.

    Parameters
    ----------
    clients : tuple of str
        In the order of the columns.
    """

    def __init__(self, clients: tuple[str, ...]) -> None:
        self._column = {client: i for i, client in enumerate(clients)}
        self._domains: dict[str, int] = {}  # name -> index; a stream of one's own may have a new one for every slot
        self._counts: dict[int, NDArray[np.int32]] = {}  # round -> [seen or correct, S, N]
        self._domain: dict[int, NDArray[np.int32]] = {}  # round -> [N]
        self._confidence: dict[int, NDArray[np.float32]] = {}  # round -> [N]

    def add(self, round_: Round) -> None:
        """Enter what a round brought; a late `post` belongs to the round whose batch it scores."""
        samples: dict[tuple[str, str], dict[str, int]] = {}
        for entry in round_.counts:
            seen, correct = int(entry.seen.sum()), int(entry.correct.sum())
            if entry.round not in self._counts:  # nothing is counted of a stream without labels
                self._counts[entry.round] = np.zeros((2, len(SCORES), len(self._column)), dtype=np.int32)
            self._counts[entry.round][:, SCORES.index(entry.score), self._column[entry.client]] += (seen, correct)
            if entry.round == round_.number:
                of_scores = samples.setdefault((entry.client, entry.domain), {})
                of_scores[entry.score] = of_scores.get(entry.score, 0) + seen
        if round_.closing:
            return
        # By any score that knows them all: a visit's last slot has no `post` yet.
        number = {key: max(of_scores.values()) for key, of_scores in samples.items()}
        domain = self._domain[round_.number] = np.full(len(self._column), -1, dtype=np.int32)
        for client, domains in sorted(round_.domains.items()):  # in the same order whoever replied first
            if domains:
                most = max(sorted(domains), key=lambda name, client=client: number.get((client, name), 0))  # type: ignore[misc]
                domain[self._column[client]] = self._domains.setdefault(most, len(self._domains))
        confidence = self._confidence[round_.number] = np.full(len(self._column), np.nan, dtype=np.float32)
        for client, mean in round_.confidence.items():
            confidence[self._column[client]] = mean

    def accuracy(self, round_: int) -> dict[str, float]:
        """Return a round's micro accuracy in percent by score, of all that has been entered of it so far."""
        if round_ not in self._counts:
            return {}
        of_scores = zip(SCORES, *self._counts[round_].sum(axis=2).tolist(), strict=True)
        return {score: 100 * correct / seen for score, seen, correct in of_scores if seen}

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the arrays of the file.

        Returns
        -------
        dict
            ``rounds`` [R]; ``clients`` [N], ``scores`` [S] and ``domains`` [D], names; ``domain`` [R, N], the index in
            ``domains`` of the corruption that most of a client's samples had, -1 if it saw none; ``seen`` and
            ``correct`` [S, R, N], labelled samples. Scores that nothing was scored with are left out. ``confidence``
            [R, N], the mean probability of what was predicted, NaN where nothing is known.
        """
        rounds = sorted(self._domain)
        width = len(self._column)
        there = [i for i in range(len(SCORES)) if any(counts[0, i].any() for counts in self._counts.values())]
        seen, correct = np.zeros((2, len(there), len(rounds), width), dtype=np.int32)
        domain = np.full((len(rounds), width), -1, dtype=np.int32)
        confidence = np.full((len(rounds), width), np.nan, dtype=np.float32)
        for row, number in enumerate(rounds):
            domain[row], confidence[row] = self._domain[number], self._confidence[number]
            if number in self._counts:
                seen[:, row], correct[:, row] = self._counts[number][:, there]
        return {
            "rounds": np.array(rounds, dtype=np.int64),
            "clients": np.array(list(self._column), dtype=str),
            "scores": np.array([SCORES[i] for i in there], dtype=str),
            "domains": np.array(list(self._domains), dtype=str),
            "domain": domain,
            "seen": seen,
            "correct": correct,
            "confidence": confidence,
        }

    def write(self, folder: Path) -> None:
        """Write the file, atomically."""
        arrays = self.arrays()
        write_atomically(folder / FILE, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))

    def snapshot(self) -> tuple[dict[str, Tensor], list[str]]:
        """Return what `restore` needs: tensors, and the names of the corruptions."""
        width = len(self._column)
        counts = np.stack(list(self._counts.values())) if self._counts else np.zeros((0, 2, len(SCORES), width))
        domain = np.stack(list(self._domain.values())) if self._domain else np.zeros((0, width))
        confidence = np.stack(list(self._confidence.values())) if self._confidence else np.zeros((0, width))
        tensors = {
            "rounds": torch.tensor(list(self._domain), dtype=torch.int64),
            "counted": torch.tensor(list(self._counts), dtype=torch.int64),
            "counts": torch.from_numpy(counts.astype(np.int32)),
            "domain": torch.from_numpy(domain.astype(np.int32)),
            "confidence": torch.from_numpy(confidence.astype(np.float32)),
        }
        return tensors, list(self._domains)

    def restore(self, tensors: Mapping[str, Tensor], domains: list[str]) -> None:
        """Go on from a snapshot."""
        self._domains = {name: i for i, name in enumerate(domains)}
        rounds, counted = tensors["rounds"].tolist(), tensors.get("counted", tensors["rounds"]).tolist()
        self._domain = dict(zip(rounds, tensors["domain"].numpy().copy(), strict=True))
        self._counts = dict(zip(counted, tensors["counts"].numpy().copy(), strict=True))
        unknown = torch.full((len(rounds), len(self._column)), torch.nan)  # earlier versions did not look at it
        confidence = tensors.get("confidence", unknown).numpy().copy()
        self._confidence = dict(zip(rounds, confidence, strict=True))
