"""How a benchmark goes: a table that is kept up to date on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from fedtta_flwr.bench.runner import Running
from fedtta_flwr.bench.spec import Cell
from fedtta_flwr.files import Outage

EVERY = 60.0  # seconds between two lines


class Lines:
    """Prints a line when a cell ends, and one a minute meanwhile.

    Parameters
    ----------
    cells : int
        To be run.
    """

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._ended, self._failed = 0, 0
        self._outage = Outage(Path("standard output"))
        self._given = dict[str, float]()  # cell -> what share of it had been before this
        self._began = self._printed = time.monotonic()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is left to be done."""

    def started(self, cell: Cell) -> None:
        """Say nothing: its end is soon enough."""

    def advanced(self, running: Sequence[Running]) -> None:
        """Print a line if the last one is a minute old."""
        if running and time.monotonic() - self._printed > EVERY:
            rounds = ", ".join(f"{one.cell.id} {one.done}/{one.rounds}" for one in running)
            self.say(f"{rounds}; {self.left(running)}")

    def ended(self, cell: Cell, fault: str, seconds: float) -> None:
        """Print what became of a cell."""
        self._ended += 1
        if fault:
            self._failed += 1
            self._given.pop(cell.id, None)
        what = f"FAILED: {fault}" if fault else f"{seconds:.0f} s"
        self.say(f"[{self._ended}/{self._cells}] {cell.id}: {what}")

    def left(self, running: Sequence[Running]) -> str:
        """Return in words how long it will take, judged by what has been."""
        self._given |= {one.cell.id: one.before / one.rounds for one in running if one.rounds}
        done = self._ended - self._failed + sum(one.done / one.rounds for one in running if one.rounds)
        new = done - sum(self._given.values())
        if new < 0.02:
            return "time left not known yet"
        seconds = (time.monotonic() - self._began) / new * (self._cells - self._failed - done)
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"about {hours} h {minutes} min left" if hours else f"about {minutes} min left"

    def say(self, text: str) -> None:
        """Print a line; where it cannot be, all goes on: a log may be on a full disk, and who reads may have gone."""
        self._printed = time.monotonic()
        with self._outage.endured():
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, flush=True)


class Live(Lines):
    """Keeps a table of the running cells on the terminal; what has ended is printed above it."""

    def __init__(self, cells: int) -> None:
        super().__init__(cells)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=sys.stdout),
        )
        self._all = self._bars.add_task("cells", total=cells, note="")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Take the terminal's last lines."""
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Give them back."""
        self._bars.stop()

    def started(self, cell: Cell) -> None:
        """Add a row."""
        self._tasks[cell.id] = self._bars.add_task(cell.id, total=None, note="")

    def advanced(self, running: Sequence[Running]) -> None:
        """Move the bars."""
        for one in running:
            note = f"{time.monotonic() - one.began:.0f} s"
            self._bars.update(self._tasks[one.cell.id], completed=one.done, total=one.rounds or None, note=note)
        failed = f", {self._failed} failed" if self._failed else ""
        self._bars.update(self._all, completed=self._ended, note=self.left(running) + failed)

    def ended(self, cell: Cell, fault: str, seconds: float) -> None:
        """Remove the row and print what became of the cell."""
        self._bars.remove_task(self._tasks.pop(cell.id))
        super().ended(cell, fault, seconds)

    def _print(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)
