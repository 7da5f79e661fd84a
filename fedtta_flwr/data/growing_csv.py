"""A CSV file that only grows, and may do so in several processes; only what is new is read."""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from fedtta_flwr.errors import DataError
from fedtta_flwr.files import Outage, append


class GrowingCsv:
    """A table with a fixed header.

    Rows that cannot be written, on a full disk say, are kept in memory and written before the next ones. They end with
    the process: whoever opens the table then does not find them.

    Parameters
    ----------
    path : Path
        The file; it and its folder are made with the first row.
    header : sequence of str
        Its first line.
    key : sequence of str
        The columns that `keys` is about.

    Raises
    ------
    DataError
        The file is there and begins otherwise, is damaged, or cannot be read.
    """

    def __init__(self, path: Path, header: Sequence[str], key: Sequence[str]) -> None:
        self._path, self._header = path, tuple(header)
        self._columns = [self._header.index(name) for name in key]
        self._keys: set[tuple[str, ...]] = set()
        self._end = 0
        self._unwritten: list[Sequence[str]] = []
        self._outage = Outage(path)
        self.keys()

    def keys(self) -> set[tuple[str, ...]]:
        """Return what the columns of the key hold in all complete rows, and in those that are not written yet.

        The set is live, and not to be changed.
        """
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._end:  # it was replaced or emptied
                    self._begin_again()
                file.seek(self._end)
                self._end += self._read(file)
        except FileNotFoundError:
            self._begin_again()
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error.strerror})") from None
        return self._keys

    def append(self, rows: Sequence[Sequence[str]]) -> None:
        """Append rows, all or none, after those that could not be written before; the file is made if it is absent.

        Where they cannot be written the log says so once, and they are kept for the next call, which may bring no rows.
        """
        self._unwritten += rows
        self._keys.update(map(self._key, rows))
        if self._unwritten:
            with self._outage.endured():
                self._write()
                self._unwritten = []

    def _read(self, file: BinaryIO) -> int:
        """Add the keys of the rows from here on, line by line since there may be millions; return how many bytes."""
        taken = 0

        def lines() -> Iterator[str]:
            nonlocal taken
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it was cut off, by a full disk say, and counts as not written
                taken += len(line)
                yield line.decode(errors="surrogateescape")

        rows, header = csv.reader(lines()), list(self._header)
        try:
            if self._end == 0 and (first := next(rows, header)) != header:
                raise DataError(f"{self._path}: begins with {first}, expected {','.join(header)}; move it away")
            self._keys.update(self._key(row) for row in rows if len(row) == len(header) and row != header)
        except csv.Error as error:
            raise DataError(f"{self._path}: damaged ({error}); mend it, or move it away") from None
        return taken

    def _write(self) -> None:
        text = io.StringIO()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            end = file.tell()
            if end == 0:
                text.write(_line(self._header))
            else:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text.write("\n")
            text.writelines(map(_line, self._unwritten))
            append(self._path, text.getvalue().encode(errors="surrogateescape"))
            try:
                os.fsync(file.fileno())
            except OSError:  # network file systems say only now that there is no room
                file.truncate(end)
                raise

    def _begin_again(self) -> None:
        self._keys, self._end = set(map(self._key, self._unwritten)), 0

    def _key(self, row: Sequence[str]) -> tuple[str, ...]:
        return tuple(row[column] for column in self._columns)


def _line(row: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(row)  # what holds either of them is quoted: file names may
    return line.getvalue().removesuffix("\r\n") + "\n"
