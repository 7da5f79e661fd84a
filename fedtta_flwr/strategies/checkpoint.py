"""Checkpoints of a run: one file in the run directory from which a killed server goes on to the same result."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flwr.common.logger import log
from torch import Tensor

from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.files import Outage, is_finished, read_tensors, write_tensors
from fedtta_flwr.paths import expanded
from fedtta_flwr.records import code_fingerprint

if TYPE_CHECKING:
    from fedtta_flwr.strategies.base import PersonalizedStrategy

FILE = "checkpoint.safetensors"
KEYS = ("round", "run", "code", "clients", "same", "keeper")  # of what is said beside the tensors


class Keeper(Protocol):
    """Whoever has to remember something of the run beside the strategy: the run directory."""

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors, and what JSON can hold, from which `restore` goes on; OSError where files fail."""

    def restore(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Install what `snapshot` returned."""


class Checkpoints:
    """Saves a run every so many rounds, and brings it back.

    What is saved: every client's personal state, what the strategy remembers, and what the run directory has counted.
    The states that clients keep at home stay there; they write them themselves in the same rounds.

    Parameters
    ----------
    folder : Path
        The run directory.
    every : int
        Rounds between two checkpoints; 0 = none are written.
    keeper : Keeper
        Saved along.
    resume : bool
        Whether `restore` shall bring back what the folder holds.
    """

    def __init__(self, folder: Path, every: int, keeper: Keeper, *, resume: bool = False) -> None:
        self.path = folder / FILE
        self._every = every
        self._keeper = keeper
        self._outage = Outage(self.path)
        self._saved = read_tensors(self.path) if resume else None

    def is_due(self, round_: int) -> bool:
        """Return whether a checkpoint is written after this round."""
        return self.last_due(round_) == round_

    def last_due(self, round_: int) -> int:
        """Return the last round, this one included, after which a checkpoint is written; 0 if there is none."""
        return round_ - round_ % self._every if self._every else 0

    def save(self, strategy: "PersonalizedStrategy", round_: int) -> None:
        """Write a checkpoint if one is due; the last one is replaced when the new one is complete.

        A full disk is reported and ends nothing: the run goes on without this checkpoint.
        """
        if self.is_due(round_):
            with self._outage.endured():
                self._save(strategy, round_)

    def _save(self, strategy: "PersonalizedStrategy", round_: int) -> None:
        kept, about = self._keeper.snapshot()
        clients = sorted(strategy.personal)
        tensors = {f"keeper/{name}": t for name, t in kept.items()}
        # Copies: what a method remembers may share memory, also with what the clients have been given.
        tensors |= {f"memory/{name}": t.clone() for name, t in strategy.remembered().items()}
        first, same = dict[object, str](), dict[str, str]()  # what clients share is written once
        for i, client in enumerate(clients):
            for name, t in strategy.personal[client].items():
                key = f"personal/{i}/{name}"
                written = first.setdefault((t.data_ptr(), t.shape, t.dtype), key)
                if written == key:
                    tensors[key] = t
                else:
                    same[key] = written
        head = (round_, strategy.run, code_fingerprint(), clients, same, about)
        write_tensors(self.path, tensors, dict(zip(KEYS, head, strict=True)))

    def restore(self, strategy: "PersonalizedStrategy") -> int:
        """Bring back the run that is resumed and return its last round; 0 if none is.

        Raises
        ------
        CheckpointError
            If the checkpoint does not belong to this strategy and source model, or another version wrote it.
        """
        if self._saved is None:
            return 0
        tensors, about = self._saved
        self._saved = None
        if lacks := [key for key in KEYS if key not in about]:
            raise CheckpointError(
                f"{self.path}: says nothing of {lacks[0]!r}: resume it with the version that wrote it"
            )
        if about["code"] != code_fingerprint():
            log(logging.WARNING, "%s was written by other code than this: results may differ", self.path)
        groups: dict[str, dict[str, Tensor]] = {"keeper": {}, "memory": {}}
        for key, t in tensors.items():
            group, _, name = key.partition("/")
            if group in groups:
                groups[group][name] = t
        for client, state in personal(tensors, about).items():
            if strategy.source and {k: t.shape for k, t in state.items()} != {
                k: t.shape for k, t in strategy.source.items()
            }:
                raise CheckpointError(f"{self.path}: holds states of another source model; name the one of that run")
            strategy.personal[client] = state
        strategy.load_memory(groups["memory"])
        strategy.run = about["run"]
        self._keeper.restore(groups["keeper"], about["keeper"])
        log(logging.INFO, "resumed after round %d from %s", about["round"], self.path)
        return int(about["round"])


def personal(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return every client's personal state of what `read_tensors` has read from a checkpoint."""
    states: dict[str, dict[str, Tensor]] = {client: {} for client in about["clients"]}
    written = {key: key for key in tensors if key.startswith("personal/")}
    for key, other in (written | about["same"]).items():
        _, i, name = key.split("/", 2)
        states[about["clients"][int(i)]][name] = tensors[other]
    return states


def resumable(folder: str) -> Path:
    """Return the run directory that a run config wants to resume.

    Raises
    ------
    ConfigError
        If the path is relative, or no checkpoint is there, or the run has finished.
    """
    path = expanded("resume", folder)
    if not path.is_absolute():
        raise ConfigError(f"resume = {folder!r}: relative; allowed: an absolute path or one that begins with ~")
    if is_finished(path):  # to score its last round again takes what the clients have forgotten by now
        raise ConfigError(f"resume = {folder!r}: that run has finished; `fedtta report` shows its results")
    if not (path / FILE).is_file():
        raise ConfigError(
            f"resume = {folder!r}: holds no {FILE}: checkpoint-every was 0, or it ended before the first; run it anew"
        )
    return path
