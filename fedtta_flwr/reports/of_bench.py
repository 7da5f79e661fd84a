"""The tables of a benchmark."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from fedtta_flwr.bench.spec import Labels, Published
from fedtta_flwr.config import SCORES
from fedtta_flwr.reports.claims import claims_table
from fedtta_flwr.reports.of_run import METRICS, STRUCTURE, cost_table, major_and_minor
from fedtta_flwr.reports.read import BenchOf, Run
from fedtta_flwr.reports.tables import Table, number, signed, spread

#: how far a published figure can be trusted
FLAGS = {"sound": "", "doubtful": "?", "copied": "=", "invalid": "!"}
FLAG_NOTE = "Published figures: ? doubtful, = copied from another paper, ! invalid as a target."


def bench_tables(bench: BenchOf) -> list[Table]:
    """Return all tables of a benchmark, the main one first."""
    tables = [main_table(bench)]
    if bench.spec.claims:
        tables.append(claims_table(bench))
    for score in SCORES:
        for metric, title in METRICS.items():
            if (score, metric) != (bench.spec.score, bench.spec.metric):
                tables.append(_grid(bench, score, metric, title))
    tables += [_parts(bench), _classes(bench), _clients(bench), _costs(bench), _structure(bench), _missing(bench)]
    return [table for table in tables if table.rows]


def rows_and_columns(bench: BenchOf) -> tuple[list[Labels], list[Labels]]:
    """Return the labels of the rows and of the columns of the main table."""
    axes = bench.spec.axes

    def combinations(names: list[str]) -> list[Labels]:
        return [dict(zip(names, points, strict=True)) for points in itertools.product(*(axes[name] for name in names))]

    return combinations(bench.spec.rows), combinations(bench.spec.columns)


def published(bench: BenchOf, labels: Mapping[str, str]) -> tuple[float, Published] | None:
    """Return what was published for a cell, and the entry that says so."""
    for entry in bench.spec.published:
        point = labels.get(entry.over)
        if point in entry.values and entry.at.items() <= labels.items():
            return entry.values[point], entry
    return None


def main_table(bench: BenchOf) -> Table:
    """Return the spec's score and metric, beside each published figure and the difference to it."""
    spec = bench.spec
    rows, columns = rows_and_columns(bench)
    known = [any(published(bench, row | column) for row in rows) for column in columns]
    heads = []
    for column, has in zip(columns, known, strict=True):
        name = title(column) or spec.score
        heads += [name, f"{name} published", f"{name} Δ"] if has else [name]
    body, notes = [], []
    for row in rows:
        cells: list[str] = []
        for column, has in zip(columns, known, strict=True):
            values = [run.accuracy(spec.score, spec.metric) for run in bench.runs(row | column)]
            cells.append(spread(values))
            if not has:
                continue
            there = published(bench, row | column)
            if there is None:
                cells += ["", ""]
                continue
            value, entry = there
            mean = [v for v in values if v is not None]
            difference = float(np.mean(mean)) - value if mean and entry.flag != "invalid" else None
            cells += [number(value) + FLAGS[entry.flag], signed(difference)]
            if entry.note and entry.note not in notes:
                notes.append(entry.note)
        body.append([*row.values(), *cells])
    seeds = sorted({cell.seed for cell in bench.cells})
    about = f"{spec.score}, {METRICS[spec.metric]}, in %; mean ± standard deviation over up to {len(seeds)} seeds."
    extra = [FLAG_NOTE, *(f"Published: {note}." for note in notes)] if any(known) else []
    return Table("main", spec.title, [*spec.rows, *heads], body, labels=len(spec.rows), notes=[about, *extra])


def title(labels: Mapping[str, str]) -> str:
    """Return labels in words."""
    return " ".join(labels.values())


def _grid(bench: BenchOf, score: str, metric: str, words: str) -> Table:
    rows, columns = rows_and_columns(bench)
    body = []
    for row in rows:
        cells = [spread([run.accuracy(score, metric) for run in bench.runs(row | column)]) for column in columns]
        if any(cells):
            body.append([*row.values(), *cells])
    heads = [*bench.spec.rows, *(title(column) or score for column in columns)]
    name = f"{score}-{metric.replace('_', '-')}"
    return Table(name, f"{score}, {words}, in %", heads, body, labels=len(bench.spec.rows))


def _all(bench: BenchOf) -> Iterator[tuple[Labels, list[Run]]]:
    rows, columns = rows_and_columns(bench)
    for column, row in itertools.product(columns, rows):
        labels = {axis: (row | column)[axis] for axis in bench.spec.axes}
        if runs := bench.runs(labels):
            yield labels, runs


def positions(run: Run, score: str) -> list[float | None]:
    """Return the accuracy in percent of all clients together, from one shift of a client's corruption to the next."""
    timeline = run.timeline
    if timeline is None or score not in timeline["scores"].tolist():
        return []
    at = timeline["scores"].tolist().index(score)
    domain, seen, correct = timeline["domain"], timeline["seen"][at], timeline["correct"][at]
    changed = np.zeros(domain.shape, dtype=np.int64)
    changed[1:] = domain[1:] != domain[:-1]
    place = changed.cumsum(axis=0)
    totals = [(seen[place == p].sum(), correct[place == p].sum()) for p in range(place.max() + 1)]
    return [100 * float(c / s) if s else None for s, c in totals]


def _parts(bench: BenchOf) -> Table:
    """Return accuracies by corruption, or by position where clients see different ones at a time, as in the papers."""
    score = bench.spec.score
    entries = list(_all(bench))
    together = all(len(run.groups()) == 1 for _, runs in entries for run in runs)
    body = []
    names: list[str] = []
    if together:
        found = [
            r.summary["accuracy"][score]["per_corruption"] for _, runs in entries for r in runs if score in r.scores()
        ]
        names = list(dict.fromkeys(name for values in found for name in values))
    for labels, runs in entries:
        if together:
            every = [
                [(r.summary["accuracy"].get(score) or {}).get("per_corruption", {}).get(n) for n in names] for r in runs
            ]
        else:
            every = [positions(run, score) for run in runs]
            names = names or [str(p + 1) for p in range(max(map(len, every), default=0))]
            every = [values + [None] * (len(names) - len(values)) for values in every]
        body.append([*labels.values(), *(spread(column) for column in zip(*every, strict=True))])
    of = "corruption" if together else "position (clients see different corruptions at a time)"
    axes = list(bench.spec.axes)
    return Table("parts", f"{score} by {of}, in %", [*axes, *names], body, labels=len(axes)) if names else _none()


def _classes(bench: BenchOf) -> Table:
    body = []
    for labels, runs in _all(bench):
        pairs = [pair for run in runs if (pair := major_and_minor(run, bench.spec.score)) is not None]
        if pairs:
            body.append([*labels.values(), *(spread(part) for part in zip(*pairs, strict=True))])
    axes = list(bench.spec.axes)
    note = "Major classes have more labelled samples than the mean of the classes that occurred, minor ones the rest."
    heads = [*axes, "major classes", "minor classes"]
    return Table("classes", f"{bench.spec.score} by frequency of the class, in %", heads, body, len(axes), [note])


def _clients(bench: BenchOf) -> Table:
    body = []
    for labels, runs in _all(bench):
        every = [
            list(r.summary["accuracy"][bench.spec.score]["per_client"].values())
            for r in runs
            if bench.spec.score in r.scores()
        ]
        if every:
            spans = [[f(values) for values in every] for f in (min, np.median, max)]
            body.append([*labels.values(), *(spread([float(v) for v in span]) for span in spans)])
    axes = list(bench.spec.axes)
    heads = [*axes, "worst client", "median client", "best client"]
    return Table("clients", f"{bench.spec.score} by client, micro, in %", heads, body, labels=len(axes))


def _costs(bench: BenchOf) -> Table:
    table = cost_table({"\t".join(labels.values()): runs for labels, runs in _all(bench)}, list(bench.spec.axes))
    table.notes.append(
        f"Measured on {bench.about.get('machine', 'an unknown machine')}; other work may have run beside."
    )
    return table


def _structure(bench: BenchOf) -> Table:
    body = []
    for labels, runs in _all(bench):
        found = [run.summary.get("collaboration") or {} for run in runs]
        if any(found):
            body.append([*labels.values(), *(spread([f.get(key) for f in found], 3) for key in STRUCTURE)])
    axes = list(bench.spec.axes)
    heads = [*axes, *STRUCTURE.values()]
    return Table("collaboration", "The collaboration matrix W, mean over the rounds", heads, body, labels=len(axes))


def _missing(bench: BenchOf) -> Table:
    body = [[cell.id, cell.fault] for cell in bench.cells if cell.fault]
    return Table("missing", "Runs that are not in these tables, or not whole", ["run", "why"], body, labels=2)


def _none() -> Table:
    return Table("none", "", [], [])
