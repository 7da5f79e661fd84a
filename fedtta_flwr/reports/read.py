"""Run and benchmark directories as plain data: what is there, and what is missing or broken, in words."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedtta_flwr.bench.runner import FILE as BENCH
from fedtta_flwr.bench.runner import cell_folder
from fedtta_flwr.bench.spec import Labels, Spec, make_spec
from fedtta_flwr.config import SCORES, differing_key
from fedtta_flwr.errors import ConfigError, first_fault
from fedtta_flwr.reports.mistrust import (
    About,
    Arrays,
    Bench,
    Summary,
    collaboration_fault,
    read_arrays,
    read_lines,
    read_part,
    timeline_fault,
)

#: keys of the run config that a report names
KEYS = ("strategy", "adapter", "dataset", "model", "num-clients", "batch-size", "seed")


@dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes
    ----------
    config : dict
        Run config, flat.
    about, summary : dict
        The rest of config.json; summary.json.
    lines : list of dict
        rounds.jsonl.
    timeline : mapping or None
        The arrays of timeline.npz; None where they cannot be read.
    faults : list of str
        What is missing or broken.
    """

    path: Path
    config: dict[str, Any]
    about: dict[str, Any]
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    timeline: Arrays | None
    faults: list[str] = field(default_factory=list)

    @property
    def two_heads(self) -> bool:
        """Whether a global and a personal head were combined (``task = "tgfl"``)."""
        return self.config.get("task") == "tgfl"

    @property
    def clients(self) -> list[str]:
        """The clients, in the order of all arrays."""
        return list(self.about["clients"])

    def scores(self) -> list[str]:
        """Return the scores that there are accuracies of, in their order."""
        return [score for score in SCORES if score in self.summary["accuracy"]]

    def accuracy(self, score: str, metric: str) -> float | None:
        """Return one accuracy in percent; None where nothing was scored, or the run is older than the metric."""
        found = self.summary["accuracy"].get(score, {}).get(metric)
        return None if found is None else float(found)

    def collaboration(self) -> Arrays | None:
        """Read collaboration.npz, which may be large; None where it cannot be read, which `faults` names."""
        return read_arrays(self.path / "collaboration.npz", collaboration_fault, len(self.clients), [])

    def confidence(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return rounds [R] and the mean probability [R, N] of what clients predicted, NaN where it is not known.

        No rounds of a run that is older than it, or whose timeline cannot be read.
        """
        if self.timeline is None or "confidence" not in self.timeline:
            return np.zeros(0), np.zeros((0, len(self.clients)))
        return self.timeline["rounds"], self.timeline["confidence"]

    def groups(self) -> list[list[int]]:
        """Return the clients, as columns, that always saw the same corruption; one group if nothing is known.

        Rounds in which one of two clients was absent say nothing about them.
        """
        if self.timeline is None or not len(self.timeline["rounds"]):
            return [list(range(len(self.clients)))]
        groups: list[list[int]] = []
        known: list[NDArray[Any]] = []  # of each group, what any of its clients saw
        for i, column in enumerate(self.timeline["domain"].T):
            for group, of_group in zip(groups, known, strict=True):
                both = (column >= 0) & (of_group >= 0)
                if both.any() and (column[both] == of_group[both]).all():
                    group.append(i)
                    np.maximum(of_group, column, out=of_group)
                    break
            else:
                groups.append([i])
                known.append(column.copy())
        return groups


def shifts(domain: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where a corruption is another than the one before, over the rounds in which there is any.

    Parameters
    ----------
    domain : ndarray
        [R, N], the index of a corruption, -1 for none.

    Returns
    -------
    ndarray
        [R, N]; False in the first round.
    """
    last = np.where(domain >= 0, np.arange(len(domain))[:, None], 0)
    filled = np.take_along_axis(domain, np.maximum.accumulate(last, axis=0), axis=0)
    found = np.zeros(domain.shape, dtype=bool)
    found[1:] = (filled[1:] != filled[:-1]) & (filled[:-1] >= 0)
    return found


@dataclass(frozen=True)
class CellOf:
    """A cell of a benchmark, and its run if that can be read."""

    id: str
    labels: Labels
    seed: int
    run: Run | None
    fault: str = ""


@dataclass(frozen=True)
class BenchOf:
    """A benchmark directory."""

    path: Path
    spec: Spec
    about: dict[str, Any]
    cells: list[CellOf]

    def machines(self) -> str:
        """Return on what the runs were timed; earlier ones did not know it, but their benchmark did."""
        before = self.about.get("machine", "an unknown machine")
        return "; ".join(sorted({c.run.about.get("machine", before) for c in self.cells if c.run is not None}))

    def runs(self, labels: Mapping[str, str]) -> list[Run]:
        """Return the finished runs with these labels, seed by seed."""
        return [c.run for c in self.cells if c.run is not None and labels.items() <= c.labels.items()]

    def by_seed(self, labels: Mapping[str, str]) -> dict[int, Run]:
        """Return the finished runs with these labels by seed."""
        return {c.seed: c.run for c in self.cells if c.run is not None and labels.items() <= c.labels.items()}


def is_bench(path: Path) -> bool:
    """Return whether a folder is that of a benchmark."""
    return (path / BENCH).is_file()


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises
    ------
    ConfigError
        If it is none.
    """
    about, summary = read_part(path / "config.json", About), read_part(path / "summary.json", Summary)
    config = about["config"]
    if missing := [key for key in KEYS if key not in config]:
        raise ConfigError(f"{path}: its config.json is damaged (no key {missing[0]})")
    faults: list[str] = []
    if not summary.get("finished"):
        faults.append("the run has not finished: what is here is what it had written by then")
    clients = len(about["clients"])
    lines = read_lines(path / "rounds.jsonl", faults)
    if summary.get("finished") and not faults and len(lines) < summary["rounds"]:
        faults.append(f"rounds.jsonl has {len(lines)} rounds of {summary['rounds']}")
    timeline = read_arrays(path / "timeline.npz", timeline_fault, clients, faults)
    run = Run(path, config, about, summary, lines, timeline, faults)
    read_arrays(path / "collaboration.npz", collaboration_fault, clients, faults)
    return run


def read_bench(path: Path) -> BenchOf:
    """Read a benchmark directory; a cell that cannot be read is named with the reason.

    Raises
    ------
    ConfigError
        If its bench.json is damaged.
    """
    try:
        about = json.loads((path / BENCH).read_text())
        bench = Bench.model_validate(about)
        spec = make_spec(bench.spec, str(path / BENCH))
    except ValidationError as error:
        raise ConfigError(f"{path / BENCH}: damaged ({first_fault(error)}); run the benchmark again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path / BENCH}: damaged ({error}); run the benchmark again") from None
    cells = []
    for cell in bench.cells:
        folder = cell_folder(path, cell.id)
        words = _last_words(folder)
        run, fault = None, f"did not get as far as its first round{words}" if words else "has not been run"
        if folder.is_dir():
            try:
                run = read_run(folder)
                fault = "; ".join(run.faults)
            except ConfigError as error:
                fault = str(error)
            if run is not None and not run.summary.get("finished"):
                run, fault = None, f"has not finished{_last_words(folder)}"
            elif run is not None and (key := differing_key(cell.config, run.config)):
                was, now = run.config.get(key), cell.config[key]
                run, fault = None, f"was run with {key} = {was!r}, the benchmark has {now!r}: run it again"
        cells.append(CellOf(cell.id, cell.labels, cell.seed, run, fault))
    return BenchOf(path, spec, about, cells)


def _last_words(folder: Path) -> str:
    """Return the last line that a cell has printed."""
    try:
        lines = folder.with_name(f"{folder.name}.log").read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((f"; its log ends: {line.strip()[:200]}" for line in reversed(lines) if line.strip()), "")
