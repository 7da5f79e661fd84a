"""The tables of a benchmark."""

import numpy as np

from fedtta_flwr.bench.spec import RUN_COLUMNS
from fedtta_flwr.config import SCORES
from fedtta_flwr.reports.claims import claims_table
from fedtta_flwr.reports.layout import FLAG_NOTE, FLAGS, every_cell, note_of, published, rows_and_columns, title
from fedtta_flwr.reports.of_run import COSTS, METRICS, STRUCTURE, cost_table, costs
from fedtta_flwr.reports.of_within import clients_table, major_and_minor_tables, tables_within
from fedtta_flwr.reports.read import BenchOf
from fedtta_flwr.reports.tables import Table, number, signed, spread


def bench_tables(bench: BenchOf) -> list[Table]:
    """Return all tables of a benchmark, the main one first."""
    tables = [main_table(bench)]
    if bench.spec.claims:
        tables.append(claims_table(bench))
    for score in SCORES:
        for metric, words in METRICS.items():
            if (score, metric) != (bench.spec.score, bench.spec.metric):
                tables.append(_grid(bench, score, metric, words))
    within = tables_within(bench)
    tables += [*major_and_minor_tables(bench), clients_table(bench)]
    tables += [_costs(bench), _structure(bench), _missing(bench)]
    return [table for table in tables if table.rows] + within


def main_table(bench: BenchOf) -> Table:
    """Return the spec's score and metric, beside each published figure and the difference to it."""
    spec = bench.spec
    rows, columns = rows_and_columns(bench)
    known = [any(published(bench, row | column) for row in rows) for column in columns]
    heads = []
    for column, has in zip(columns, known, strict=True):
        name = title(column) or spec.score
        heads += [name, f"{name} published", f"{name} Δ"] if has else [name]
    body, notes = [], dict[str, list[str]]()
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
            if entry.note:
                notes.setdefault(entry.note, []).append(title(row | column))
        body.append([*row.values(), *cells])
    seeds = sorted({cell.seed for cell in bench.cells})
    fewer = _fewer(bench, seeds)
    over = f"over {'up to ' if fewer else ''}{len(seeds)} seeds"
    spread_of = f"mean ± standard deviation {over}" if len(seeds) > 1 else "one seed"
    about = f"{spec.score}, {METRICS[spec.metric]}, in %; {spread_of}."
    extra = [FLAG_NOTE, *(note_of(note, where) for note, where in notes.items())] if any(known) else []
    extra += [*fewer, *_of_several_codes(bench)]
    return Table("main", spec.title, [*spec.rows, *heads], body, labels=len(spec.rows), notes=[about, *extra])


def runs_table(bench: BenchOf) -> Table:
    """Return what every finished run has reached and cost, a row a value, unrounded: for programs, long for a page."""
    body = []
    for cell in bench.cells:
        if (run := cell.run) is None:
            continue
        found = [(score, metric, run.accuracy(score, metric)) for score in SCORES for metric in METRICS]
        for (name, (unit, _)), cost in zip(COSTS.items(), costs(run), strict=True):
            found.append(("", name, None if cost is None else cost / unit))
        row = [*cell.labels.values(), str(cell.seed)]
        body += [[*row, score, metric, str(value)] for score, metric, value in found if value is not None]
    heads = [*bench.spec.axes, *RUN_COLUMNS]
    return Table("runs", "Run by run", heads, body, labels=len(heads) - 1)


def _fewer(bench: BenchOf, seeds: list[int]) -> list[str]:
    """Return a note about the cells whose mean is over fewer seeds than there are."""
    by_number: dict[int, list[str]] = {}
    for labels, runs in every_cell(bench):
        by_number.setdefault(len(runs), []).append(title(labels))
    fewer = sorted(number for number in by_number if number < len(seeds))
    return [f"With {number} of {len(seeds)} seeds only: {', '.join(by_number[number])}." for number in fewer]


def _of_several_codes(bench: BenchOf) -> list[str]:
    """Return a note about the cells whose mean is over runs of different versions of the user's own code."""
    codes = {title(labels): {str(run.about.get("plugins")) for run in runs} for labels, runs in every_cell(bench)}
    mixed = [name for name, found in codes.items() if len(found) > 1]
    return [f"Over runs of several versions of your own code: {', '.join(mixed)}."] if mixed else []


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


def _costs(bench: BenchOf) -> Table:
    table = cost_table({"\t".join(labels.values()): runs for labels, runs in every_cell(bench)}, list(bench.spec.axes))
    table.notes.append(f"Measured on {bench.machines()}; other work may have run beside.")
    return table


def _structure(bench: BenchOf) -> Table:
    body = []
    for labels, runs in every_cell(bench):
        found = [run.summary.get("collaboration") or {} for run in runs]
        if any(found):
            body.append([*labels.values(), *(spread([f.get(key) for f in found], 3) for key in STRUCTURE)])
    axes = list(bench.spec.axes)
    heads = [*axes, *STRUCTURE.values()]
    return Table("collaboration", "The collaboration matrix W, mean over the rounds", heads, body, labels=len(axes))


def _missing(bench: BenchOf) -> Table:
    body = [[cell.id, cell.fault] for cell in bench.cells if cell.fault]
    return Table("missing", "Runs that are not in these tables, or not whole", ["run", "why"], body, labels=2)
