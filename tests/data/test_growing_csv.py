"""A table that grows, also where a disk is full in the middle of a row."""

import errno
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr import files
from fedtta_flwr.data.growing_csv import GrowingCsv
from fedtta_flwr.errors import DataError

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
        with pytest.raises(DataError, match=r"rows.csv: cannot be written \(No space left on device\)"):
            table.append([("b, b", "2")])  # four bytes end within the quotes, which would swallow all that follows
    assert path.read_bytes() == before
    table.append([("c", "3"), ("d, d", "4")])
    assert GrowingCsv(path, HEADER, key=("file",)).keys() == {("a",), ("c",), ("d, d",)} == table.keys()
