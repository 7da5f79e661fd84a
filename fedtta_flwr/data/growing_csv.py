"""A CSV file that only grows, and may do so in several processes; only what is new is read."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from fedtta_flwr.errors import DataError


class GrowingCsv:
    """A table with a fixed header.

    Parameters
    ----------
    path : Path
        The file; it and its folder are made with the first row.
    header : sequence of str
        Its first line.

    Raises
    ------
    DataError
        The file is there and begins otherwise, or cannot be read.
    """

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        self._path, self._header = path, tuple(header)
        self._rows: list[list[str]] = []
        self._end = 0
        self.rows()

    def rows(self) -> list[list[str]]:
        """Return all complete rows without the header."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._end:  # it was replaced or emptied
                    self._rows, self._end = [], 0
                file.seek(self._end)
                new = file.read()
        except FileNotFoundError:
            self._rows, self._end = [], 0
            return self._rows
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error.strerror})") from None
        new = new[: new.rfind(b"\n") + 1]  # a line that was cut off, by a full disk say, counts as not written
        rows = list(csv.reader(io.StringIO(new.decode(errors="surrogateescape"), newline="")))
        if self._end == 0 and rows and tuple(rows[0]) != self._header:
            raise DataError(f"{self._path}: begins with {rows[0]}, expected {','.join(self._header)}; move it away")
        self._rows += [row for row in rows if len(row) == len(self._header) and tuple(row) != self._header]
        self._end += len(new)
        return self._rows

    def append(self, rows: Sequence[Sequence[str]]) -> None:
        """Append rows in one write; make the file where it is not there yet.

        Raises
        ------
        DataError
            It cannot be written.
        """
        if not rows:
            return
        text = io.StringIO()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab+") as file:
                if file.tell() == 0:
                    csv.writer(text, lineterminator="\n").writerow(self._header)
                else:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        text.write("\n")
                csv.writer(text, lineterminator="\n").writerows(rows)
                file.write(text.getvalue().encode(errors="surrogateescape"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(
                f"{self._path}: cannot be written ({error.strerror}); free space or set predictions-dir"
            ) from None
