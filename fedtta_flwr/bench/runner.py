"""Running the cells of a benchmark, several at a time, each in a process of its own; what is finished stays.

A cell that is stopped half-way leaves a checkpoint, from which the same code goes on to the same result.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from fedtta_flwr.bench.spec import Cell, Spec, Table
from fedtta_flwr.config import RunConfig, Scalar, differing_key
from fedtta_flwr.errors import ConfigError, FedTTAError, StorageError
from fedtta_flwr.files import is_finished, locked, write_json
from fedtta_flwr.plugins import plugin_fingerprints
from fedtta_flwr.processes import as_command, end_with_parent, stop
from fedtta_flwr.records import code_fingerprint
from fedtta_flwr.strategies.checkpoint import FILE as CHECKPOINT

FILE = "bench.json"
POLL = 0.5  # seconds between two looks at the running cells
STOP_SECONDS = 20.0
#: keys that say what a run needs before it can begin
NEEDS = ("task", "dataset", "data-dir", "stream", "model", "checkpoint", "adapter", "head")
EVERY = 25  # rounds between two checkpoints, where the run config names no other number


class Watcher(Protocol):
    """Who is told how a benchmark goes."""

    def started(self, cell: Cell) -> None:
        """Hear that a cell begins."""

    def advanced(self, running: Sequence["Running"]) -> None:
        """See what runs now."""

    def ended(self, cell: Cell, fault: str, seconds: float) -> None:
        """Hear that a cell has finished, or why it has not."""


@dataclass
class Running:
    """A cell that runs.

    Attributes
    ----------
    done, rounds : int
        Rounds that have been, of all; 0 of 0 until the run has begun.
    before : int
        Those of them that had been before it was started again.
    """

    cell: Cell
    process: subprocess.Popen[bytes]
    folder: Path
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    rounds: int = 0
    before: int = 0
    _read: int = 0

    def look(self) -> None:
        """Count the rounds that have been written down."""
        try:
            if not self.rounds:
                self.rounds = int(json.loads((self.folder / "config.json").read_text())["rounds"])
            with (self.folder / "rounds.jsonl").open("rb") as file:
                if again := file.seek(0, os.SEEK_END) < self._read:  # it goes on from a checkpoint before its last line
                    self.done = self._read = 0
                file.seek(self._read)
                new = file.read()
        except OSError:
            return
        self._read += len(new)
        self.done += new.count(b"\n")
        if again:
            self.before = min(self.before, self.done)


def cell_folder(folder: Path, cell: str) -> Path:
    """Return the run directory of a cell."""
    return folder / "cells" / cell


def is_of_this_code(made: Mapping[str, Any], cell: Cell) -> bool:
    """Return whether a config.json is of a run of the present code, the user's own that the cell names included."""
    ran = (made.get("code"), made.get("plugins", {}))
    return ran == (code_fingerprint(), plugin_fingerprints(cell.config))


def open_bench(
    folder: Path, spec: Spec, table: Table, cells: Sequence[Cell], overrides: Mapping[str, Scalar], *, quick: bool
) -> tuple[list[Cell], list[str]]:
    """Make a benchmark's folder, or go on with one.

    Returns
    -------
    cells : list of Cell
        Those that are not finished.
    stale : list of str
        Finished ones that other code than this has made.

    Raises
    ------
    ConfigError
        If the folder holds something else, another benchmark, or cells of another config, finished ones or ones with a
        checkpoint, or if a run of an earlier benchmark still writes there.
    """
    path = folder / FILE
    about: dict[str, Any] = {}
    if path.is_file():
        try:
            about = json.loads(path.read_text())
            name = about["spec"]["name"]
        except (ValueError, KeyError, TypeError):
            about, name = {}, spec.name  # it is written anew: the runs themselves say what they are
        if name != spec.name:
            raise ConfigError(f"--output {folder}: holds the benchmark {name}, not {spec.name}; name another folder")
    elif folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--output {folder}: holds files already; name a new or an empty folder, or a benchmark's")
    left, stale = [], []
    for cell in cells:
        own = cell_folder(folder, cell.id)
        finished = is_finished(own)
        if not finished and own.is_dir():
            _await_writer(own, f"--output {folder}: {cell.id}")
            finished = is_finished(own)
        made = _made(own) if finished or (own / CHECKPOINT).is_file() else None
        if made is not None and (key := differing_key(cell.config, made["config"])):
            raise ConfigError(
                f"--output {folder}: {cell.id} was {'run' if finished else 'begun'} with {key} = "
                f"{made['config'].get(key)!r}, now it is {cell.config[key]!r}; name another folder"
            )
        if not finished:
            left.append(cell)
        elif made is not None and not is_of_this_code(made, cell):
            stale.append(cell.id)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about = {
        "spec": table,
        "quick": quick,
        "overrides": dict(overrides),
        "code": code_fingerprint(),
        "started": about.get("started", now),
        "cells": [{"id": c.id, "labels": c.labels, "seed": c.seed, "config": c.config} for c in cells],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, about)
    except OSError as error:
        raise StorageError(
            f"--output {folder}: cannot be written ({error.strerror}); make room, or name another"
        ) from None
    return left, stale


def _goes_on(own: Path, cell: Cell) -> bool:
    """Return whether an unfinished run directory holds a checkpoint of this cell that this code has written."""
    made = _made(own) if (own / CHECKPOINT).is_file() else None
    return made is not None and is_of_this_code(made, cell) and differing_key(cell.config, made["config"]) is None


def _made(own: Path) -> dict[str, Any] | None:
    """Return the config.json of a run, if there is one."""
    try:
        made: dict[str, Any] = json.loads((own / "config.json").read_text())
        dict(made["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return made


def _await_writer(own: Path, which: str) -> None:
    """Wait until nobody writes to a run directory: where a benchmark was killed, its cells end soon, but after it."""
    deadline = time.monotonic() + STOP_SECONDS
    while True:
        try:
            with locked(own, which, "run"):
                return
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL)


def check_some(cells: Sequence[Cell]) -> None:
    """Find out whether there is a cell whose data, source model and adapter can be used.

    Raises
    ------
    ConfigError
        If there is none: all would fail, one after the other. It says what is wrong with the first.
    """
    from fedtta_flwr.server import check_inputs  # on use: it brings torch

    faults: dict[tuple[Scalar, ...], FedTTAError] = {}
    for cell in cells:
        if (needs := tuple(cell.config[key] for key in NEEDS)) in faults:
            continue
        try:
            check_inputs(RunConfig.from_flat(cell.config))
        except FedTTAError as error:
            faults[needs] = error
        else:
            return
    if faults:
        raise ConfigError(f"no run can begin: {next(iter(faults.values()))}")


def run_cells(folder: Path, cells: Sequence[Cell], workers: int, watcher: Watcher) -> dict[str, str]:
    """Run cells, so many at a time; return cell -> why it failed.

    Whatever ends this ends the cells that run; those that have finished are kept.
    """
    waiting, running, faults = list(cells), list[Running](), dict[str, str]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                cell = waiting.pop(0)
                running.append(_start(folder, cell))
                watcher.started(cell)
            time.sleep(POLL)
            for one in list(running):
                one.look()
                if one.process.poll() is None:
                    continue
                running.remove(one)
                if fault := _fault(folder, one):
                    faults[one.cell.id] = fault
                watcher.ended(one.cell, fault, time.monotonic() - one.began)
            watcher.advanced(running)
    finally:
        stop([one.process for one in running], STOP_SECONDS)
    return faults


def _start(folder: Path, cell: Cell) -> Running:
    own = cell_folder(folder, cell.id)
    if not _goes_on(own, cell):
        shutil.rmtree(own, ignore_errors=True)  # what an unfinished run has left
    own.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", "fedtta_flwr.bench.runner", str(folder), cell.id]
    with _log(folder, cell.id).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us, who stop it
            preexec_fn=end_with_parent,
        )
    running = Running(cell, process, own)
    running.look()
    running.before = running.done
    return running


def _log(folder: Path, cell: str) -> Path:
    return folder / "cells" / f"{cell}.log"


def _fault(folder: Path, ended: Running) -> str:
    status = ended.process.returncode
    if status == 0 and is_finished(ended.folder):
        return ""
    lines = _log(folder, ended.cell.id).read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it has said nothing: is the disk full?"
    why = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return last.removeprefix("error: ") if status == 2 and last.startswith("error: ") else f"{why}: {last}"


def main() -> None:
    """Run one cell: BENCH CELL."""
    from fedtta_flwr.launch import forget_states, run_local, with_states

    folder, name = Path(sys.argv[1]), sys.argv[2]
    (cell,) = [c for c in json.loads((folder / FILE).read_text())["cells"] if c["id"] == name]
    own = cell_folder(folder, name).absolute()
    config = cell["config"] | {"output-dir": str(own)}
    config["checkpoint-every"] = config["checkpoint-every"] or EVERY
    config = with_states(config)
    if (own / CHECKPOINT).is_file():
        config["resume"] = str(own)
    as_command(lambda: run_local(config, nodes=1))
    if not cell["config"]["checkpoint-every"]:  # nobody has asked for it
        (own / CHECKPOINT).unlink(missing_ok=True)
    forget_states(config)


if __name__ == "__main__":
    main()
