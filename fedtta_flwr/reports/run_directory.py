"""The run directory: config.json, rounds.jsonl, collaboration.npz, timeline.npz, heads.npz and summary.json."""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtta_flwr.config import SCORES, RunConfig
from fedtta_flwr.errors import ConfigError, StorageError
from fedtta_flwr.files import Outage, append, write_atomically, write_json
from fedtta_flwr.paths import expanded, in_home
from fedtta_flwr.plugins import plugin_fingerprints
from fedtta_flwr.records import code_fingerprint
from fedtta_flwr.reports.interpolation import Interpolation
from fedtta_flwr.reports.matrices import Matrices
from fedtta_flwr.reports.scoreboard import Scoreboard
from fedtta_flwr.reports.timeline import Timeline
from fedtta_flwr.reports.totals import Totals
from fedtta_flwr.strategies.checkpoint import FILE as CHECKPOINT
from fedtta_flwr.strategies.rounds import Round
from fedtta_flwr.strategies.structure import structure

SAVE_EVERY = 30.0  # seconds between two writes of what must be rewritten whole
PAUSE = 20.0  # and so many times as long as the last one took: a fleet's matrices take seconds
PACKAGES = ("flwr", "torch", "numpy", "ray")


class RunDirectory:
    """Writes down a run while it goes on; whenever it ends, the directory is valid.

    ``summary.json`` says ``"finished": false`` until the run has ended well. ``rounds.jsonl`` gets a round's line
    when its `post` score has come, which is with the replies of the next round. Where a disk is full the run goes on,
    and what could not be written is once there is room.

    Parameters
    ----------
    path : Path
        A new or an empty folder.
    resume : bool
        Whether the folder is that of a run that goes on, instead.

    Raises
    ------
    ConfigError
        If it holds files, or cannot be made.

    Attributes
    ----------
    board : Scoreboard
        What has been counted so far.
    line : dict or None
        The latest line of rounds.jsonl that this process has made.
    ended : bool
        Whether the run has ended well and all of it is written.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.board = Scoreboard()
        self.line: dict[str, Any] | None = None
        self.ended = False
        self._resume = resume
        self._known = not resume  # what has been: until it is restored, nothing may take the place of the files
        if not resume and path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"output-dir = {str(path)!r}: holds files already; name a new or an empty folder")
        there = next(p for p in (path, *path.parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ConfigError(f"output-dir = {str(path)!r}: {there} is no folder that can be written; name another")
        self._held: dict[str, Any] | None = None
        self._lines: list[str] = []  # those that are not written yet
        self._outage = Outage(path)
        self._totals = Totals()
        self._rounds = 0
        self._due = 0.0
        self._clients: tuple[str, ...] = ()
        self._matrices, self._timeline = Matrices(()), Timeline(())
        self._interpolation = Interpolation()

    def on_start(self, config: RunConfig, clients: tuple[str, ...], rounds: int) -> None:
        """Write config.json, and a summary that says that nothing is finished.

        Raises
        ------
        StorageError
            If they cannot be written.
        """
        self._clients = clients
        self.board = Scoreboard(config.corruption_names())
        self._matrices, self._timeline = Matrices(clients), Timeline(clients)
        about: dict[str, Any] = {
            "config": config.to_flat(),
            "hash": config.fingerprint(),
            "code": code_fingerprint(),
            "plugins": plugin_fingerprints(config.to_flat()),
            "versions": _versions() | {"python": platform.python_version()},
            "machine": _machine(),
            "clients": list(clients),
            "rounds": rounds,
            "started": _now(),
        }
        if self._resume:
            before = json.loads((self.path / "config.json").read_text())
            about = before | {"resumed": [*before.get("resumed", ()), about["started"]]}
        with self._needed():
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "config.json", about)
            if not self._resume:
                self._save(finished=False)

    def on_round(self, round_: Round) -> None:
        """Append the previous round's line, which is complete now, and hold this one's back."""
        self.board.add(round_.counts)
        self._timeline.add(round_)
        self._interpolation.add(round_)
        if self._held is not None:
            self._held["accuracy"] = self._timeline.accuracy(self._held["round"])
            self._release()
        self._totals.add(round_)
        if round_.closing:
            return
        self._rounds = round_.number
        found = None
        if round_.weights is not None:
            self._matrices.add(round_.number, round_.clients, round_.weights)
            found = structure(round_.weights, [round_.domains.get(client) or None for client in round_.clients])
            self._totals.add_structure(found)
        self._held = {
            "round": round_.number,
            "clients": len(round_.clients),
            "samples": round_.samples,
            "steps": sum(round_.steps.values()),
            "rolled_back": sum(round_.undone.values()),
            "undone": dict(sorted(round_.undone.items())),
            "clipped": list(round_.clipped),
            "predictions": {
                "confidence": round_.mean_confidence,
                "largest_share": fmean(round_.largest_share.values()) if round_.largest_share else None,
                "collapsed": list(round_.collapsed),
            },
            "loss": round_.loss,
            "accuracy": self._timeline.accuracy(round_.number),
            "collaboration": found,
            "own": round_.own,
            "bytes": {"up": round_.bytes_up, "down": round_.bytes_down},
            "seconds": {key: round(value, 6) for key, value in round_.seconds.items()},
            "time": _now(),
            "screened": dict(sorted(round_.missing.items())),
            "forgot": list(round_.forgot),
        }
        due = time.monotonic() > self._due
        if due or not self._outage.lasts:
            with self._outage.endured():
                self._save(finished=False) if due else self._append()

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what `restore` needs beside the files, which are brought up to date."""
        self._save(finished=False)
        tallies = self.board.tallies()
        board = np.stack(list(tallies.values())) if tallies else np.zeros((0, 2, 0), dtype=np.int64)
        tensors = {"board": torch.from_numpy(board)}
        timeline, domains = self._timeline.snapshot()
        tensors |= {f"timeline.{key}": t for key, t in timeline.items()}
        about = {
            "board": list(tallies),
            "held": self._held,
            "rounds": self._rounds,
            "domains": domains,
            "every": self._matrices.every,
        } | self._totals.snapshot()
        tensors["heads"], about["heads"] = self._interpolation.snapshot()
        return tensors, about

    def restore(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Go on from a snapshot; lines and matrices of later rounds are dropped."""
        tallies = zip(about["board"], tensors["board"].numpy(), strict=True)
        self.board.load({tuple(key): tally for key, tally in tallies})
        self._held, self._rounds = about["held"], about["rounds"]
        if self._held is not None:  # earlier versions did not look at these
            nothing: dict[str, Any] = {"confidence": None, "largest_share": None, "collapsed": []}
            self._held = {"undone": {}, "clipped": []} | self._held
            self._held["predictions"] = nothing | self._held.get("predictions", {})
        self._totals.restore(about)
        prefix = "timeline."
        timeline = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        self._timeline.restore(timeline, about["domains"])
        self._interpolation.restore(tensors["heads"], about["heads"])
        self._matrices.restore(self.path, self._rounds, about.get("every", 1))
        path = self.path / "rounds.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        # A line that a kill cut short is of a later round, too.
        write_atomically(path, lambda file: file.writelines(lines[: self._rounds - 1]))
        self._known = True

    def on_end(self) -> None:
        """Write the final collaboration.npz and summary.json."""
        self.close(finished=True)
        self.ended = True

    def close(self, *, finished: bool) -> None:
        """Write what is known now; a run that was broken off is marked as not finished.

        Raises
        ------
        StorageError
            If it cannot be written.
        """
        if not self._clients or not self._known:
            return  # it never began, or has not gone on
        if self._held is not None:
            self._release()
        with self._needed():
            self._save(finished=finished)

    def summary(self, *, finished: bool) -> dict[str, Any]:
        """Return the content of summary.json."""
        return {
            "finished": finished,
            "rounds": self._rounds,
            "accuracy": {score: self.board.accuracy(score) for score in SCORES if score in self.board.scores()},
        } | self._totals.summary(self._rounds * len(self._clients))

    def again(self) -> str:
        """Return what is to be done where the run has ended too early."""
        if (self.path / CHECKPOINT).exists():
            return f"`fedtta run --resume {self.path}`"
        if not (self.path / "config.json").exists():
            return "run it again"
        return "run it anew, in another folder: there is no checkpoint yet to go on from (checkpoint-every)"

    @contextmanager
    def _needed(self) -> Iterator[None]:
        """Say what is to be done where there is no going on without what is written here."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written ({error.strerror or error}), and lacks results; make room there, "
                f"then {self.again()}"
            ) from None

    def _release(self) -> None:
        """Have the line that was held back written next."""
        self._lines.append(json.dumps(self._held, allow_nan=False) + "\n")
        self.line, self._held = self._held, None

    def _append(self) -> None:
        if self._lines:
            append(self.path / "rounds.jsonl", "".join(self._lines).encode())
            self._lines.clear()

    def _save(self, *, finished: bool) -> None:
        began = time.monotonic()
        self._due = began + SAVE_EVERY  # also where it fails: the next attempt is not due before
        self._append()
        for part in (self._matrices, self._timeline, self._interpolation):
            part.write(self.path)
        write_json(self.path / "summary.json", self.summary(finished=finished))
        took = time.monotonic() - began
        self._due = began + max(SAVE_EVERY, PAUSE * took)


def default_path(config: RunConfig) -> Path:
    """Return a new path in ~/fedtta-runs, named by time and methods."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    first, second = (name.rpartition(":")[2] for name in config.methods())
    return in_home("fedtta-runs", f"{stamp}-{first}-{second}")


def run_path(config: RunConfig) -> Path:
    """Return the run directory's path.

    Raises
    ------
    ConfigError
        If ``output-dir`` is relative: a Flower process works in a folder of its own.
    """
    if not config.output_dir:
        return default_path(config)
    path = expanded("output-dir", config.output_dir)
    if not path.is_absolute():
        raise ConfigError(
            f"output-dir = {config.output_dir!r}: relative; allowed: an absolute path or one that begins with ~ "
            f"(`fedtta run --output DIR` takes relative ones)"
        )
    return path


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    """Return the versions of the packages that are there; a deployed server needs no Ray."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _machine() -> str:
    """Return what the server runs on, in words."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"
