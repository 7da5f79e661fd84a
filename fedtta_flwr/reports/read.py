"""Run and benchmark directories as plain data: what is there, and what is missing or broken, in words."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.bench.runner import FILE as BENCH
from fedtta_flwr.bench.runner import cell_folder
from fedtta_flwr.bench.spec import Labels, Spec, make_spec
from fedtta_flwr.config import SCORES
from fedtta_flwr.errors import ConfigError

Arrays = Mapping[str, NDArray[Any]]


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
    timeline, collaboration : mapping or None
        The arrays of timeline.npz and collaboration.npz; None where they cannot be read.
    faults : list of str
        What is missing or broken.
    """

    path: Path
    config: dict[str, Any]
    about: dict[str, Any]
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    timeline: Arrays | None
    collaboration: Arrays | None
    faults: list[str] = field(default_factory=list)

    @property
    def clients(self) -> list[str]:
        """The clients, in the order of all arrays."""
        return list(self.about["clients"])

    def scores(self) -> list[str]:
        """Return the scores that there are accuracies of, in their order."""
        return [score for score in SCORES if score in self.summary["accuracy"]]

    def accuracy(self, score: str, metric: str) -> float | None:
        """Return one accuracy in percent; None where nothing was scored."""
        found = self.summary["accuracy"].get(score)
        return None if found is None else float(found[metric])

    def groups(self) -> list[list[int]]:
        """Return the clients, as columns, that always saw the same corruption; one group if nothing is known."""
        if self.timeline is None or not len(self.timeline["rounds"]):
            return [list(range(len(self.clients)))]
        alike: dict[bytes, list[int]] = {}
        for i, column in enumerate(np.ascontiguousarray(self.timeline["domain"].T)):
            alike.setdefault(column.tobytes(), []).append(i)
        return list(alike.values())


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
    try:
        about = json.loads((path / "config.json").read_text())
        summary = json.loads((path / "summary.json").read_text())
        config = about["config"]
        if not isinstance(about["clients"], list) or not isinstance(summary["accuracy"], dict):
            raise TypeError("not what a run writes")
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise ConfigError(f"{path}: no run directory, {name} is absent; name a run's or a benchmark's folder") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: its config.json or summary.json is damaged ({error})") from None
    faults: list[str] = []
    if not summary.get("finished"):
        faults.append("the run has not finished: what is here is what it had written by then")
    return Run(
        path,
        config,
        about,
        summary,
        _lines(path / "rounds.jsonl", faults),
        _arrays(path / "timeline.npz", ("rounds", "domains", "domain", "scores", "seen", "correct"), faults),
        _arrays(path / "collaboration.npz", ("rounds", "weights"), faults),
        faults,
    )


def read_bench(path: Path) -> BenchOf:
    """Read a benchmark directory; a cell that cannot be read is named with the reason.

    Raises
    ------
    ConfigError
        If its bench.json is damaged.
    """
    try:
        about = json.loads((path / BENCH).read_text())
        spec = make_spec(about["spec"], str(path / BENCH))
        entries = [(str(c["id"]), dict(c["labels"]), int(c["seed"])) for c in about["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / BENCH}: damaged ({error}); run the benchmark again") from None
    cells = []
    for name, labels, seed in entries:
        run, fault = None, "has not been run"
        folder = cell_folder(path, name)
        if folder.is_dir():
            try:
                run = read_run(folder)
                fault = "; ".join(run.faults)
            except ConfigError as error:
                fault = str(error)
            if run is not None and not run.summary.get("finished"):
                run, fault = None, "has not finished"
        cells.append(CellOf(name, labels, seed, run, fault))
    return BenchOf(path, spec, about, cells)


def _lines(path: Path, faults: list[str]) -> list[dict[str, Any]]:
    lines = []
    try:
        for text in path.read_text().splitlines():
            lines.append(json.loads(text))
    except FileNotFoundError:
        faults.append(f"{path.name} is absent")
    except (OSError, ValueError):
        faults.append(f"{path.name}: line {len(lines) + 1} cannot be read; what follows is left out")
    return lines


def _arrays(path: Path, needed: tuple[str, ...], faults: list[str]) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in file.files}
        if missing := set(needed) - set(found):
            raise ValueError(f"it has no {min(missing)}")
    except FileNotFoundError:
        faults.append(f"{path.name} is absent")
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        faults.append(f"{path.name} cannot be read: {error}")
        return None
    return found
