"""A table that grows, also where a disk is full in the middle of a row."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr import files
from fedtta_flwr.data.growing_csv import GrowingCsv

HEADER = ("file", "class")


class Full:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(content[: self._room])
        self._room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_row_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    table = GrowingCsv(path, HEADER, key=("file",))
    table.append([("a", "1")])
    before = path.read_bytes()

    class Disk(type(Path())):  # type: ignore[misc]
        def open(self, *arguments: Any, **how: Any) -> Any:
            file = super().open(*arguments, **how)
            return Full(file, room=4) if how.get("buffering") == 0 else file

    with monkeypatch.context() as patch:
        original = files.append
        patch.setattr("fedtta_flwr.data.growing_csv.append", lambda path, content: original(Disk(path), content))
        table.append([("b, b", "2")])  # four bytes end within the quotes, which would swallow all that follows
    assert path.read_bytes() == before
    assert GrowingCsv(path, HEADER, key=("file",)).keys() == {("a",)}
    assert table.keys() == {("a",), ("b, b",)}  # what is in memory only is known, too
    table.append([("c", "3"), ("d, d", "4")])
    assert path.read_bytes() == before + b'"b, b",2\nc,3\n"d, d",4\n'
    assert GrowingCsv(path, HEADER, key=("file",)).keys() == {("a",), ("b, b",), ("c",), ("d, d",)} == table.keys()


def full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_rows_in_memory_outlast_a_file_that_is_removed_and_wait_for_a_call_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.csv"
    table = GrowingCsv(path, HEADER, key=("file",))
    table.append([("a", "1")])
    with monkeypatch.context() as patch:
        patch.setattr("fedtta_flwr.data.growing_csv.append", full)
        table.append([("b", "2")])
    path.unlink()
    assert table.keys() == {("b",)}
    table.append(())
    assert path.read_bytes() == b"file,class\nb,2\n"
    table.append(())
    assert path.read_bytes() == b"file,class\nb,2\n"


def test_a_file_that_was_emptied_or_put_back_from_a_copy_holds_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    table = GrowingCsv(path, HEADER, key=("file",))
    table.append([("a", "1")])
    copy = path.read_bytes()
    table.append([("b", "2")])
    assert table.keys() == {("a",), ("b",)}
    path.write_bytes(copy)
    assert table.keys() == {("a",)}
    path.write_bytes(b"")
    assert table.keys() == set()
    table.append([("c", "3")])
    assert path.read_bytes() == b"file,class\nc,3\n"


def test_a_disk_that_is_found_full_after_the_write_gets_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = GrowingCsv(tmp_path / "rows.csv", HEADER, key=("file",))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        table.append([("a", "1")])
    table.append([("b", "2")])
    assert (tmp_path / "rows.csv").read_bytes() == b"file,class\na,1\nb,2\n"
