"""A disk that is full for a while, or to the end, on a small file system of its own."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import FederationError, StorageError
from fedtta_flwr.files import append
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.reports import run_directory
from fedtta_flwr.server import federation
from fedtta_flwr.strategies.rounds import Round
from tests.conftest import TINY

BALLAST = "ballast"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if (done := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / BALLAST).open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"." * 4096)


class Filled:
    """An observer that fills a disk after a round, and makes room after another one."""

    def __init__(self, disk: Path, full: int, room: int = 0, raises: int = 0) -> None:
        self.disk, self.full, self.room, self.raises = disk, full, room, raises

    def on_start(self, config: RunConfig, clients: tuple[str, ...], rounds: int) -> None: ...

    def on_round(self, round_: Round) -> None:
        if round_.number == self.full:
            fill(self.disk)
        if round_.number == self.room:
            (self.disk / BALLAST).unlink()
        if round_.number == self.raises:
            raise FederationError("the first error")

    def on_end(self) -> None: ...


@pytest.fixture
def start(apps: tuple[Any, Any], tmp_path: Path) -> Callable[..., None]:
    def run(observer: Filled | None = None, **overrides: Any) -> None:
        flat = TINY | {"checkpoint-every": 1, "state-dir": str(tmp_path / "states")} | overrides
        with federation(flat) as strategy:
            strategy.observers += [observer] if observer else []
            strategy.start(LocalGrid(apps[1], RunConfig.from_flat(flat).to_flat(), 2))

    return run


def found(path: Path) -> tuple[Any, ...]:
    """What a run found, without how long it took."""
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((path / "summary.json").read_text())
    return [(line["round"], line["accuracy"]) for line in lines], summary["accuracy"], summary["finished"]


@pytest.mark.parametrize("save_every", [0.0, 30.0])
def test_what_could_not_be_written_is_when_there_is_room(
    start: Callable[..., None],
    disk: Path,
    tmp_path: Path,
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
    save_every: float,
) -> None:
    monkeypatch.setattr(run_directory, "SAVE_EVERY", save_every)
    start(**{"output-dir": str(tmp_path / "whole")})
    del warned[:]
    start(Filled(disk, full=1, room=3), **{"output-dir": str(disk / "run")})
    assert found(disk / "run") == found(tmp_path / "whole")
    assert len(found(disk / "run")[0]) == 4
    full = [line for line in warned if line.endswith("cannot be written (No space left on device): the run goes on; "
                                                     "make room")]  # fmt: skip
    assert len(full) == len({line.split()[0] for line in full}) == 2  # directory and checkpoint, each once
    assert len([line for line in warned if line.endswith("is written again")]) >= 1
    assert {path.name for path in (disk / "run").iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_a_run_that_cannot_write_its_end_says_how_to_go_on(
    start: Callable[..., None], disk: Path, tmp_path: Path
) -> None:
    start(**{"output-dir": str(tmp_path / "whole")})
    run = disk / "run"
    with pytest.raises(StorageError, match=rf"^{run}: cannot be written \(No space.*--resume {run}`$") as caught:
        start(Filled(disk, full=5), **{"output-dir": str(run)})  # after the last checkpoint
    assert "\n" not in str(caught.value)
    assert found(run)[2] is False  # and no line is cut short
    (disk / BALLAST).unlink()
    start(resume=str(run))
    assert found(run) == found(tmp_path / "whole")


def test_a_full_disk_hides_no_error(start: Callable[..., None], disk: Path, warned: list[str]) -> None:
    with pytest.raises(FederationError, match="the first error"):
        start(Filled(disk, full=2, raises=3), **{"output-dir": str(disk / "run")})
    assert any("lacks results" in line for line in warned)


def test_a_disk_that_is_full_at_the_start(start: Callable[..., None], disk: Path) -> None:
    fill(disk)
    with pytest.raises(StorageError, match="run it again"):
        start(**{"output-dir": str(disk / "run")})


def test_half_a_line_is_taken_back(disk: Path) -> None:
    path = disk / "lines"
    append(path, b"one\n")
    fill(disk)
    with pytest.raises(OSError, match="No space"):
        append(path, b"x" * 10000)  # begins in the page that the file has
    assert path.read_bytes() == b"one\n"
    (disk / BALLAST).unlink()
    append(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
