"""Files of a run directory, read with mistrust: they may come from elsewhere, or be of a run that was cut short."""

import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError, model_validator

from fedtta_flwr.errors import ConfigError, first_fault

Arrays = Mapping[str, NDArray[Any]]
NUMBERS, NAMES = "iu", "U"  # numpy's kinds of whole numbers and of texts
MOST_BYTES = 2**31  # of the arrays in a file


class _PerClass(BaseModel):
    seen: list[int]
    correct: list[int]

    @model_validator(mode="after")
    def _of_the_same_classes(self) -> Self:
        if len(self.seen) != len(self.correct):
            raise ValueError(f"{len(self.seen)} classes seen, {len(self.correct)} predicted")
        return self


class _MajorMinor(BaseModel):
    classes: dict[str, tuple[int, int]]
    per_client: dict[str, tuple[float, float]]
    per_corruption: dict[str, tuple[float | None, float | None]]


class _Accuracy(BaseModel):
    micro: float
    macro: float
    macro_all_classes: float
    per_corruption: dict[str, float]
    per_client: dict[str, float]
    # later than the rest, so missing in older runs:
    mean_clients: float | None = None
    per_corruption_mean_clients: dict[str, float] = {}
    per_corruption_macro_all_classes: dict[str, float] = {}
    per_client_macro_all_classes: dict[str, float] = {}
    per_class: _PerClass | None = None
    major_minor: _MajorMinor | None = None


class _Bytes(BaseModel):
    up: float
    down: float


class _Seconds(BaseModel):
    client: float
    server: float
    transport: float
    total: float


class _Memory(BaseModel):
    client: int | None = None
    server: int | None = None
    cuda: int | None = None


class Summary(BaseModel):
    """What a report takes from summary.json."""

    finished: bool
    rounds: int
    accuracy: dict[str, _Accuracy]
    bytes: _Bytes
    seconds: _Seconds
    memory: _Memory | None = None
    collaboration: dict[str, float] | None = None
    screened: dict[str, int] = {}
    steps: int = 0
    rolled_back: int = 0
    undone: dict[str, int] = {}
    collapsed: dict[str, int] = {}
    clipped: dict[str, int] = {}


class About(BaseModel):
    """What a report takes from config.json."""

    config: dict[str, bool | int | float | str]
    clients: list[str]
    rounds: int
    versions: dict[str, str] = {}
    machine: str = ""  # where the server ran; earlier runs do not know it


class _Cell(BaseModel):
    id: Annotated[str, Field(pattern=r"^[^/\\]*[^/\\.][^/\\]*$")]  # the name of a folder, not a way to others
    labels: dict[str, str]
    seed: int
    config: dict[str, bool | int | float | str] = {}


class Bench(BaseModel):
    """What a report takes from bench.json."""

    spec: dict[str, Any]
    overrides: dict[str, bool | int | float | str] = {}
    machine: str = ""
    started: str = ""
    cells: list[_Cell]


class Line(BaseModel):
    """What a report takes from a line of rounds.jsonl."""

    round: int
    collaboration: dict[str, float | None] | None


def read_part(path: Path, part: type[BaseModel], wanted: str = "a run's or a benchmark's") -> dict[str, Any]:
    """Read a JSON file that holds at least what `part` names; a folder is `wanted` where there is none.

    Raises
    ------
    ConfigError
        If it does not, or is absent.
    """
    try:
        content = json.loads(path.read_text())
        part.model_validate(content)
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: no run directory, {path.name} is absent; name {wanted} folder") from None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent}: is no folder; name {wanted} folder") from None
    except ValidationError as error:
        raise ConfigError(f"{path.parent}: its {path.name} is damaged ({first_fault(error)})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path.parent}: its {path.name} is damaged ({error})") from None
    return dict(content)


def read_lines(path: Path, faults: list[str]) -> list[dict[str, Any]]:
    """Read a file of JSON lines, up to the first that is damaged."""
    lines = []
    try:
        for text in path.read_text().splitlines():
            line = json.loads(text)
            Line.model_validate(line)
            lines.append(line)
    except FileNotFoundError:
        faults.append(f"{path.name} is absent")
    except (OSError, ValueError, RecursionError):
        faults.append(f"{path.name}: line {len(lines) + 1} cannot be read; what follows is left out")
    return lines


def read_arrays(path: Path, fault: Callable[[Arrays, int], str], clients: int, faults: list[str]) -> Arrays | None:
    """Read an archive that `fault` finds nothing wrong with."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (size := sum(member.file_size for member in archive.infolist())) > MOST_BYTES:
                raise ValueError(f"it holds {size:,} bytes, at most {MOST_BYTES:,} are read")
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in file.files}
        if wrong := fault(found, clients):
            raise ValueError(wrong)
    except FileNotFoundError:
        faults.append(f"{path.name} is absent")
        return None
    except KeyError as error:
        faults.append(f"{path.name} cannot be read: it has no {error.args[0]}")
        return None
    except (OSError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        faults.append(f"{path.name} cannot be read: {error}")
        return None
    return found


def timeline_fault(arrays: Arrays, clients: int) -> str:
    """Return what is wrong with the arrays of timeline.npz; nothing if all is well."""
    rounds, scores = len(arrays["rounds"]), len(arrays["scores"])
    fault = _misshapen(
        arrays, {"domain": (rounds, clients)} | dict.fromkeys(("seen", "correct"), (scores, rounds, clients))
    )
    fault = fault or _of_another_kind(arrays, NUMBERS, "rounds", "domain", "seen", "correct")
    if "confidence" in arrays:  # earlier runs have none
        fault = fault or _misshapen(arrays, {"confidence": (rounds, clients)})
        fault = fault or _of_another_kind(arrays, "f", "confidence")
    fault = fault or _of_another_kind(arrays, NAMES, "scores", "domains")
    domain, known = arrays["domain"], len(arrays["domains"])
    if not fault and domain.size and not (domain.min() >= -1 and domain.max() < known):
        return f"domain goes from {domain.min()} to {domain.max()}, and there are {known} domains"
    return fault


def collaboration_fault(arrays: Arrays, clients: int) -> str:
    """Return what is wrong with the arrays of collaboration.npz; nothing if all is well."""
    fault = _misshapen(arrays, {"weights": (len(arrays["rounds"]), clients, clients)})
    fault = fault or _of_another_kind(arrays, NUMBERS, "rounds")
    return fault or ("" if np.isfinite(arrays["weights"]).all() else "weights holds numbers that are not finite")


def heads_fault(arrays: Arrays, clients: int) -> str:
    """Return what is wrong with the arrays of heads.npz; nothing if all is well."""
    bins, sets = len(arrays["edges"]) - 1, len(arrays["sets"])
    fault = _misshapen(arrays, {"histogram": (sets, len(arrays["clients"]), bins)})
    fault = fault or _of_another_kind(arrays, NUMBERS, "histogram") or _of_another_kind(arrays, NAMES, "sets")
    if not fault and len(arrays["clients"]) > clients:
        return f"it has {len(arrays['clients'])} clients, the run {clients}"
    return fault or ("" if np.isfinite(arrays["edges"]).all() else "edges are not finite")


def _misshapen(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]]) -> str:
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            return f"{name} is {list(arrays[name].shape)}, not {list(shape)}"
    return ""


def _of_another_kind(arrays: Arrays, kinds: str, *names: str) -> str:
    return next(
        (f"{name} holds {arrays[name].dtype.name}" for name in names if arrays[name].dtype.kind not in kinds), ""
    )
