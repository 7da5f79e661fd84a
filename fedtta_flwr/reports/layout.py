"""How a benchmark is laid out: its rows, its columns, and what was published for its cells."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from fedtta_flwr.bench.spec import Labels, Published
from fedtta_flwr.reports.read import BenchOf, Run

#: how far a published figure can be trusted
FLAGS = {"sound": "", "doubtful": "?", "copied": "=", "invalid": "!"}
MOST_NAMED = 6  # figures that a note names one by one
FLAG_NOTE = "Published figures: ? doubtful, = copied from another paper, ! invalid as a target."


def title(labels: Mapping[str, str]) -> str:
    """Return labels in words."""
    return " ".join(labels.values())


def note_of(note: str, where: Sequence[str]) -> str:
    """Return a note about published figures, and about which."""
    of = ", ".join(dict.fromkeys(where)) if len(set(where)) <= MOST_NAMED else f"{len(set(where))} figures"
    return f"Published ({of}): {note.rstrip('.')}."


def rows_and_columns(bench: BenchOf) -> tuple[list[Labels], list[Labels]]:
    """Return the labels of the rows and of the columns of the main table.

    Of combinations that the spec skips altogether, only those of which something was published.
    """

    def combinations(names: list[str]) -> list[Labels]:
        every = itertools.product(*(bench.spec.axes[name] for name in names))
        return [dict(zip(names, points, strict=True)) for points in every]

    skipped = (labels for labels in combinations(list(bench.spec.axes)) if bench.spec.skips(labels))
    shown = [cell.labels for cell in bench.cells] + [labels for labels in skipped if published(bench, labels)]

    def shown_of(names: list[str]) -> list[Labels]:
        return [one for one in combinations(names) if any(one.items() <= labels.items() for labels in shown)]

    return shown_of(bench.spec.rows), shown_of(bench.spec.columns)


def every_cell(bench: BenchOf) -> Iterator[tuple[Labels, list[Run]]]:
    """Give the labels of each cell that has finished runs, and these, column after column."""
    rows, columns = rows_and_columns(bench)
    for column, row in itertools.product(columns, rows):
        labels = {axis: (row | column)[axis] for axis in bench.spec.axes}
        if runs := bench.runs(labels):
            yield labels, runs


def published(bench: BenchOf, labels: Mapping[str, str]) -> tuple[float, Published] | None:
    """Return what was published for a cell, and the entry that says so."""
    for entry in bench.spec.published:
        point = labels.get(entry.over)
        if point in entry.values and entry.at.items() <= labels.items():
            return entry.values[point], entry
    return None


def published_within(bench: BenchOf, labels: Mapping[str, str], within: str) -> dict[str, Published]:
    """Return corruption (position, class, client) of a cell -> the entry with what was published for it."""
    entries = [] if within in bench.spec.axes else bench.spec.published  # `over` is that axis then
    there = [e for e in entries if e.over == within and e.at.items() <= labels.items()]
    return {name: entry for entry in reversed(there) for name in entry.values}
