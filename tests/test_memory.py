"""Clients find their states again: in the same context, in another process, after a restart, after a checkpoint."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.files import write_tensors
from fedtta_flwr.memory import KEPT_DAYS, Cursor, Memory, Remembered, state_folder
from fedtta_flwr.records import from_arrays, to_arrays


def state(number: int) -> Remembered:
    tensors = {"teacher.weight": torch.full((2, 3), float(number)), "count": torch.tensor([number])}
    return Remembered(
        Cursor(number, number - 1, number, number - 1), {"local": to_arrays(tensors), "lone": to_arrays({})}
    )


def number_of(found: Remembered | None) -> int:
    assert found is not None
    assert set(found.parts) == {"local", "lone"}
    tensors = from_arrays(found.parts["local"])
    assert tensors["teacher.weight"].dtype == torch.float32
    assert tensors["teacher.weight"].shape == (2, 3)
    number = int(tensors["count"])
    assert found.cursor == Cursor(slot=number, late=number - 1, round=number, seen=number - 1)
    return number


def test_a_client_that_was_never_here_has_none(tmp_path: Path) -> None:
    assert Memory(RecordDict(), None).recall("a") is None
    assert Memory(RecordDict(), tmp_path).recall("a") is None
    assert Memory(RecordDict(), tmp_path).recall("a", until=3) is None


def test_the_latest_state_is_found_by_name() -> None:
    records = RecordDict()
    memory = Memory(records, None)
    memory.keep({"a": state(1), "a/b": state(2)})
    memory.keep({"a": state(3)})
    assert number_of(Memory(records, None).recall("a")) == 3
    assert number_of(Memory(records, None).recall("a/b")) == 2
    assert list(records.config_records) == ["a", "a/b"]


def test_a_node_that_restarts_finds_its_clients_on_disk(tmp_path: Path) -> None:
    Memory(RecordDict(), tmp_path / "run").keep({"a": state(1), "../b c": state(2)})
    again = Memory(RecordDict(), tmp_path / "run")
    assert number_of(again.recall("a")) == 1
    assert number_of(again.recall("../b c")) == 2
    assert Memory(RecordDict(), tmp_path / "other").recall("a") is None
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == ["run", "run"]


def test_where_no_node_restarts_alone_only_checkpoints_are_written(tmp_path: Path) -> None:
    memory = Memory(RecordDict(), tmp_path, restarts=False)
    for number in range(1, 12):
        memory.keep({"a": state(number)}, checkpoint=number if number % 3 == 0 else 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a@6.safetensors", "a@9.safetensors"]
    assert number_of(memory.recall("a")) == 11
    assert number_of(Memory(RecordDict(), tmp_path).recall("a", until=8)) == 6


def test_the_state_of_a_checkpoint_outlives_later_visits(tmp_path: Path) -> None:
    memory = Memory(RecordDict(), tmp_path)
    for number in range(1, 12):
        memory.keep({"a": state(number)}, checkpoint=number if number % 3 == 0 else 0)
    found = Memory(RecordDict(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "a@6.safetensors", "a@9.safetensors"]
    assert number_of(found.recall("a")) == 11
    assert [number_of(found.recall("a", until=n)) for n in (11, 10, 9, 8, 6)] == [11, 9, 9, 6, 6]
    assert found.recall("a", until=5) is None  # only two are kept


def test_a_client_that_was_away_at_the_checkpoint_has_its_last_state_before_it(tmp_path: Path) -> None:
    memory = Memory(RecordDict(), tmp_path)
    memory.keep({"a": state(3)}, checkpoint=3)
    memory.keep({"a": state(5)})
    assert number_of(Memory(RecordDict(), tmp_path).recall("a", until=6)) == 5


def test_a_copy_that_somebody_made_of_a_state_is_none(tmp_path: Path) -> None:
    memory = Memory(RecordDict(), tmp_path)
    memory.keep({"a": state(3)}, checkpoint=3)
    (tmp_path / "a@3-backup.safetensors").write_bytes((tmp_path / "a@3.safetensors").read_bytes())
    memory.keep({"a": state(5)}, checkpoint=5)
    assert number_of(Memory(RecordDict(), tmp_path).recall("a", until=6)) == 5


@pytest.mark.parametrize("restarts", [False, True])
def test_a_client_that_was_away_at_the_checkpoint_writes_that_state_when_it_returns(
    tmp_path: Path, restarts: bool
) -> None:
    memory = Memory(RecordDict(), tmp_path, restarts=restarts)
    for number, checkpoint in ((2, 0), (3, 3), (5, 3), (7, 6), (8, 6)):
        memory.keep({"a": state(number)}, checkpoint)
    if restarts:  # the node itself was restarted while the client was away
        shutil.copytree(tmp_path, tmp_path / "copy")
        Memory(RecordDict(), tmp_path / "copy").keep({"a": state(10)}, checkpoint=9)
        assert number_of(Memory(RecordDict(), tmp_path / "copy").recall("a", until=9)) == 8
    again = Memory(RecordDict(), tmp_path)
    assert [number_of(again.recall("a", until=n)) for n in (6, 3)] == [5, 3]


def test_a_resumed_client_whose_answer_was_lost_does_not_go_back(tmp_path: Path) -> None:
    Memory(RecordDict(), tmp_path).keep({"a": state(2)}, checkpoint=2)
    memory = Memory(RecordDict(), tmp_path)
    assert number_of(memory.recall("a", until=2)) == 2
    memory.keep({"a": state(3)})
    assert number_of(memory.recall("a", until=2)) == 3  # the server does not know yet that it has gone on


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("before", [9, 20])
def test_a_checkpoint_of_an_attempt_that_was_given_up_is_nobodys(tmp_path: Path, before: int, restarts: bool) -> None:
    first = Memory(RecordDict(), tmp_path, restarts=restarts)
    first.keep({"a": state(9)}, checkpoint=9)
    first.keep({"a": state(before)}, checkpoint=20 if before == 20 else 0)
    first.keep({"a": state(21)}, checkpoint=20)  # the server dies before it has written its own
    second = Memory(RecordDict(), tmp_path, restarts=restarts)
    assert number_of(second.recall("a", until=10)) == 9
    second.keep({"a": state(19)}, checkpoint=10)
    second.keep({"a": state(22)}, checkpoint=20)  # it was away after 19
    assert number_of(Memory(RecordDict(), tmp_path).recall("a", until=20)) == 19


def test_a_checkpoint_keeps_no_state_of_after_it(tmp_path: Path) -> None:
    memory = Memory(RecordDict(), tmp_path)
    memory.keep({"a": state(5)})
    memory.keep({"a": state(6)}, checkpoint=4)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_damaged_state_is_passed_over(tmp_path: Path, warned: list[str]) -> None:
    memory = Memory(RecordDict(), tmp_path)
    memory.keep({"x": state(4)}, checkpoint=state(4).cursor.round)
    memory.keep({"x": state(6)}, checkpoint=state(4).cursor.round)
    (tmp_path / "x.safetensors").write_bytes(b"")
    assert Memory(RecordDict(), tmp_path).recall("x") is None
    (line,) = [line for line in warned if "x.safetensors" in line]
    assert "cannot be read as saved tensors" in line
    assert "\n" not in line
    found = Memory(RecordDict(), tmp_path).recall("x", until=state(4).cursor.round)  # one of a checkpoint is there
    assert found is not None
    assert found.cursor == state(4).cursor


def test_a_folder_that_cannot_be_written_is_one_line_a_visit_and_ends_nothing(
    tmp_path: Path, warned: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    memory = Memory(RecordDict(), tmp_path / "file")
    memory.keep({"a": state(1), "b": state(1)}, checkpoint=1)
    assert number_of(memory.recall("a")) == number_of(memory.recall("b")) == 1
    (line,) = warned
    assert "\n" not in line
    assert "2 of 2 states cannot be written, the first that of a (Not a directory); make room there" in line


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the names of files begin with that the disk has no room for."""
    prefixes: list[str] = []

    def write(path: Path, *content: Any) -> None:
        if any(path.name.startswith(prefix) for prefix in prefixes):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tensors(path, *content)

    monkeypatch.setattr("fedtta_flwr.memory.write_tensors", write)
    return prefixes


def test_a_full_disk_costs_the_others_nothing(tmp_path: Path, full: list[str], warned: list[str]) -> None:
    memory = Memory(RecordDict(), tmp_path)
    memory.keep({"a": state(1), "b": state(1)}, checkpoint=1)
    full.append("a")
    memory.keep({"a": state(2), "b": state(2)}, checkpoint=2)
    assert number_of(memory.recall("a")) == number_of(memory.recall("b")) == 2
    again = Memory(RecordDict(), tmp_path)
    assert again.recall("a") is None  # not its older state, with which a batch would come by again
    assert number_of(again.recall("b")) == 2
    assert len(warned) == 1
    assert "1 of 2 states cannot be written, the first that of a (No space left on device)" in warned[0]
    full.clear()
    memory.keep({"a": state(3)})
    assert number_of(Memory(RecordDict(), tmp_path).recall("a")) == 3


def test_a_resumed_client_never_finds_a_state_that_is_newer_than_the_checkpoint(
    tmp_path: Path, full: list[str]
) -> None:
    memory = Memory(RecordDict(), tmp_path)
    for number in range(1, 8):
        full[:] = ["a@4"]
        memory.keep({"a": state(number)}, checkpoint=number if number % 2 == 0 else 0)
    found = Memory(RecordDict(), tmp_path)
    assert [number_of(found.recall("a", until=n)) for n in (7, 6, 4, 2)] == [7, 6, 2, 2]
    assert found.recall("a", until=1) is None


def test_what_fails_otherwise_leaves_the_client_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    memory = Memory(RecordDict(), tmp_path)
    memory.keep({"a": state(1)})
    monkeypatch.setattr("fedtta_flwr.memory.write_tensors", fails)
    with pytest.raises(MemoryError):
        memory.keep({"a": state(2)})
    assert number_of(memory.recall("a")) == 1


@pytest.mark.parametrize(
    ("own", "common", "expected"), [("/own", "/common", "/own/1f"), ("", "/common", "/common/1f"), ("", "", None)]
)
def test_the_node_has_the_first_word(
    tiny_config: Callable[..., RunConfig], own: str, common: str, expected: str | None
) -> None:
    node_config: dict[str, Any] = {"state-dir": own} if own else {}
    context = Context(1, 2, node_config, RecordDict(), {})
    found = state_folder(tiny_config(**{"state-dir": common}), context, "1f")
    assert found == (None if expected is None else Path(expected))


@pytest.mark.parametrize(("folder", "run"), [("states", "1f"), ("/states", "../1f"), ("/states", "")])
def test_paths_from_outside_are_checked(tiny_config: Callable[..., RunConfig], folder: str, run: str) -> None:
    context = Context(1, 2, {"state-dir": folder}, RecordDict(), {})
    with pytest.raises(ConfigError, match="allowed"):
        state_folder(tiny_config(), context, run)


OLD, NEW = "0123456789abcdef" * 2, "f" * 32


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then), follow_symlinks=False)


def visit(folder: Path, run: str, config: RunConfig) -> None:
    """What a visit does, in a folder of the node's own unless the run config names one."""
    context = Context(1, 2, {} if config.state_dir else {"state-dir": str(folder)}, RecordDict(), {})
    Memory(RecordDict(), state_folder(config, context, run)).keep({"a": state(1), "b/c": state(1)}, checkpoint=1)


def test_a_node_forgets_past_runs_when_another_begins(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    visit(tmp_path, OLD, tiny_config())
    visit(tmp_path, NEW, tiny_config())
    (tmp_path / OLD / ".a.safetensors.7.fedtta-tmp").write_bytes(b"of a writer that was killed")
    age(tmp_path / OLD, KEPT_DAYS + 1)
    visit(tmp_path, NEW, tiny_config())
    assert sorted(path.name for path in tmp_path.iterdir()) == [OLD, NEW]  # it was here before
    age(tmp_path / NEW, KEPT_DAYS - 1)
    visit(tmp_path, "e" * 32, tiny_config())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e" * 32, NEW]


def test_nothing_but_past_runs_is_forgotten(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    names = ["notes", OLD[:-1], OLD.upper(), *(digit * 32 for digit in "01234")]
    for name in names:
        visit(tmp_path, name, tiny_config())
    (tmp_path / ("0" * 32) / "mine.txt").write_text("")
    (tmp_path / ("1" * 32) / "mine.safetensors").mkdir()
    (tmp_path / ("2" * 32) / "mine.safetensors").symlink_to(tmp_path / "notes" / "a.safetensors")
    (tmp_path / ("4" * 32)).rename(tmp_path / "elsewhere")
    (tmp_path / ("4" * 32)).symlink_to(tmp_path / "elsewhere")
    for name in (*names[:-1], "elsewhere"):
        age(tmp_path / name, 2 * KEPT_DAYS)
    os.utime(tmp_path / ("3" * 32) / "b%2Fc.safetensors")  # of two clients one is still there
    before = sorted(tmp_path.rglob("*"))
    visit(tmp_path, NEW, tiny_config())
    assert [path for path in sorted(tmp_path.rglob("*")) if NEW not in path.parts] == before


def test_the_folder_of_a_run_config_is_its_users(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = tiny_config(**{"state-dir": str(tmp_path)})
    visit(tmp_path, OLD, config)
    age(tmp_path / OLD, 2 * KEPT_DAYS)
    visit(tmp_path, NEW, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == [OLD, NEW]


def test_a_folder_that_may_not_be_entered_keeps_nobody_out(
    tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(path: Path, *_: Any, **__: Any) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", locked)
    assert Memory(RecordDict(), tmp_path).recall("client-00") is None
    assert "Permission denied" in warned[0]
    monkeypatch.setattr(Path, "exists", locked)
    context = Context(1, 2, {"state-dir": str(tmp_path)}, RecordDict(), {})
    assert state_folder(RunConfig(), context, "0" * 32) == tmp_path / ("0" * 32)
