"""The tables of a benchmark that look into its cells: by corruption, position, class and client."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedtta_flwr.bench.spec import Labels, Published
from fedtta_flwr.errors import few
from fedtta_flwr.reports.layout import FLAG_NOTE, FLAGS, every_cell, note_of, published_within, title
from fedtta_flwr.reports.of_run import MAJOR_NOTE, METRICS, by_class, major_and_minor
from fedtta_flwr.reports.read import BenchOf, Run, shifts
from fedtta_flwr.reports.tables import Table, number, signed, spread

MOST = 40  # columns of a table
ALSO = {"corruption": ("macro_all_classes", "mean_clients"), "client": ("macro_all_classes",)}  # metrics beside micro

Values = Mapping[str, float | None]  # accuracy in percent by what is within a cell


def tables_within(bench: BenchOf) -> list[Table]:
    """Return the spec's score by corruption, position, class and client, beside what was published by one of them.

    Micro; by corruption and client as the spec's metric is, where they can be. By position only where clients see
    different corruptions at a time, or where something was published so.
    """
    together = all(len(run.groups()) == 1 for _, runs in every_cell(bench) for run in runs)
    asked = "position" not in bench.spec.axes and any(entry.over == "position" for entry in bench.spec.published)
    metric = bench.spec.metric
    ways: dict[str, Callable[[Run, str], Values]] = {"corruption": _by("corruption", metric)}
    if asked or not together:
        ways["position"] = _by_position
    ways |= {"class": by_class, "client": _by("client", metric)}
    made = [_within(bench, within, way) for within, way in ways.items()]
    return [table for table in made if table.rows or table.notes]  # that all cells are left out is said, too


def major_and_minor_tables(bench: BenchOf) -> list[Table]:
    """Return the accuracies on the clients' major and minor classes, by corruption and by client, if not too many."""
    axes, score, made = list(bench.spec.axes), bench.spec.score, []
    for within, name in (("corruption", "major-and-minor"), ("client", "major-and-minor-by-client")):
        cells = [
            (labels, [found for run in runs if (found := major_and_minor(run, score, within))])
            for labels, runs in every_cell(bench)
        ]
        names = list(dict.fromkeys(name for _, found in cells for one in found for name in one))
        body = [
            [*labels.values(), kind, *(spread([one.get(name, (None, None))[part] for one in found]) for name in names)]
            for labels, found in cells
            if found and len(names) <= MOST
            for part, kind in enumerate(("major", "minor"))
        ]
        words = f"{score} on the clients' major and minor classes, by {within}, in %"
        made.append(Table(name, words, [*axes, "class", *names], body, len(axes) + 1, [MAJOR_NOTE]))
    return made


def clients_table(bench: BenchOf) -> Table:
    """Return how the clients differ, and the means over them that the papers print."""
    score, body = bench.spec.score, []
    for labels, runs in every_cell(bench):
        found = [run.summary["accuracy"][score] for run in runs if score in run.scores()]
        micro = [list(accuracy["per_client"].values()) for accuracy in found]
        macro = [list(accuracy.get("per_client_macro_all_classes", {}).values()) for accuracy in found]
        spans = [[float(f(v)) for v in micro if v] for f in (min, np.median, max, np.mean)]
        spans.append([float(np.mean(v)) for v in macro if v])
        if spans[0]:
            body.append([*labels.values(), *map(spread, spans)])
    axes = list(bench.spec.axes)
    heads = [*axes, "worst client", "median client", "best client", "mean of clients", "mean of clients' macro, all K"]
    return Table("clients", f"{score} of the clients, micro, in %", heads, body, labels=len(axes))


def positions(run: Run, score: str) -> list[float | None]:
    """Return the accuracy in percent of all clients together, from one shift of a client's corruption to the next."""
    timeline = run.timeline
    if timeline is None or score not in timeline["scores"].tolist() or not len(timeline["rounds"]):
        return []
    at = timeline["scores"].tolist().index(score)
    place = shifts(timeline["domain"]).cumsum(axis=0).ravel()
    seen, correct = (np.bincount(place, timeline[key][at].ravel()) for key in ("seen", "correct"))
    return [100 * float(c / s) if s else None for s, c in zip(seen, correct, strict=True)]


def _by(within: str, metric: str) -> Callable[[Run, str], Values]:
    """Return what reads a mapping of summary.json."""
    key = f"per_{within}_{metric}" if metric in ALSO.get(within, ()) else f"per_{within}"

    def values(run: Run, score: str) -> Values:
        found: Values = run.summary["accuracy"].get(score, {}).get(key, {})
        return found

    return values


def _by_position(run: Run, score: str) -> Values:
    return {str(i): value for i, value in enumerate(positions(run, score), 1)}


def _within(bench: BenchOf, within: str, values: Callable[[Run, str], Values]) -> Table:
    """Return one of `tables_within`; cells with too many columns are left out, which a note says."""
    axes, score = list(bench.spec.axes), bench.spec.score
    cells: list[tuple[Labels, list[Values], dict[str, Published]]] = []
    left_out = 0
    for labels, runs in every_cell(bench):
        found = [values(run, score) for run in runs]
        if max(map(len, found)) > MOST:
            left_out += 1
        elif any(found):
            cells.append((labels, found, published_within(bench, labels, within)))
    names = list(dict.fromkeys(name for _, found, _ in cells for one in found for name in one))
    paired = any(entries for *_, entries in cells)
    body: list[list[str]] = []
    for labels, found, entries in cells:
        columns = [[one.get(name) for one in found] for name in names]
        body.append([*labels.values(), *(["here"] if paired else []), *map(spread, columns)])
        if entries:
            body += [[*labels.values(), kind, *texts] for kind, texts in _compared(entries, names, columns)]
    noted: dict[str, list[str]] = {}
    for labels, _, entries in cells:
        for note in dict.fromkeys(entry.note for entry in entries.values() if entry.note):
            noted.setdefault(note, []).append(title(labels))
    notes = [FLAG_NOTE, *(note_of(note, where) for note, where in noted.items())] if paired else []
    if within == "position" and body:
        notes.append("A position lasts from one shift of a client's corruption to the next; all clients together.")
    if absent := [name for name in dict.fromkeys(n for *_, entries in cells for n in entries) if name not in names]:
        notes.append(f"Published, and not here: {few(absent)}.")
    if left_out:
        notes.append(f"{left_out} cells with more than {MOST} columns are left out.")
    heads = [*axes, *(["what"] if paired else []), *names]
    labels_ = len(axes) + paired
    metric = METRICS[bench.spec.metric if bench.spec.metric in ALSO.get(within, ()) else "micro"]
    words = "test set" if within == "corruption" and bench.spec.two_heads else within
    return Table(f"by-{within}", f"{score} by {words}, {metric}, in %", heads, body, labels_, notes)


def _compared(
    entries: Mapping[str, Published], names: Sequence[str], columns: Sequence[Sequence[float | None]]
) -> list[tuple[str, list[str]]]:
    """Return the rows with the published figures and with the differences to them."""
    marked, differences = [], []
    for name, column in zip(names, columns, strict=True):
        entry, ours = entries.get(name), [value for value in column if value is not None]
        marked.append("" if entry is None else number(entry.values[name]) + FLAGS[entry.flag])
        target = entry.values[name] if entry is not None and entry.flag != "invalid" else None
        differences.append("" if target is None or not ours else signed(float(np.mean(ours)) - target))
    return [("published", marked), ("Δ", differences)]
