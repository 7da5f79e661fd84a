"""The figures of a report: accuracies with their spread, and accuracy and collaboration over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.bench.spec import Labels
from fedtta_flwr.reports.drawing import (
    CONFIDENCE,
    MICRO,
    NARROW,
    SHARE,
    Curve,
    Draw,
    Mark,
    Strip,
    dots,
    drawn,
    lines,
    lines_size,
    runs_of,
)
from fedtta_flwr.reports.layout import published, rows_and_columns, title
from fedtta_flwr.reports.of_run import STRUCTURE
from fedtta_flwr.reports.read import BenchOf, Run

POINTS = 150  # of a curve: of more, neighbours are averaged
MOST_GROUPS = 20  # with a curve, and so a colour, of their own
MOST_ROWS = 12  # of corruptions below the curves
MOST_SAID = 30  # corruptions of a group that the words name one by one


@dataclass(frozen=True)
class Figure:
    """A figure, drawn for pages and for papers.

    Attributes
    ----------
    name : str
        For the files.
    text : str
        What it shows, in words, for who does not see it.
    light, dark : bytes
        PNG.
    vector : bytes
        The light one as PDF.
    width : int
        On a page, in CSS pixels.
    """

    name: str
    title: str
    text: str
    light: bytes
    dark: bytes
    vector: bytes
    width: int


def accuracy_figures(bench: BenchOf) -> list[Figure]:
    """Return the accuracies of each column of the main table."""
    rows, columns = rows_and_columns(bench)
    score, metric, figures = bench.spec.score, bench.spec.metric, list[Figure]()
    for k, column in enumerate(columns):
        accuracies = [[run.accuracy(score, metric) for run in bench.runs(row | column)] for row in rows]
        values = [[value for value in several if value is not None] for several in accuracies]
        there = [i for i, several in enumerate(values) if several]
        if there:
            names = [title(rows[i]) or score for i in there]
            known = [values[i] for i in there]
            marks = [_mark(bench, rows[i] | column) for i in there]
            text = "; ".join(f"{name} {np.mean(v):.2f} %" for name, v in zip(names, known, strict=True))
            size = (NARROW, 0.9 + 0.36 * len(names))
            draw = dots(names, known, marks, there)
            figures.append(figure(f"accuracy-{k + 1}", f"{score}{of_column(column)}", text, draw, size))
    return figures


def bench_figures(bench: BenchOf) -> list[Figure]:
    """Return, for each column of the main table, accuracy and weight within groups over time."""
    rows, columns = rows_and_columns(bench)
    score, figures = bench.spec.score, list[Figure]()
    for k, column in enumerate(columns):
        where = of_column(column)
        runs = {i: several for i, row in enumerate(rows) if (several := bench.runs(row | column))}
        strip = _common([_strip(run) for several in runs.values() for run in several])
        # Of runs with rounds of other lengths the slots are what they have in common.
        slots = len({run.config.get("aggregate-every", 1) for several in runs.values() for run in several}) > 1
        names = [title(row) or score for row in rows]  # a row has the same colour in every figure
        when = "slot" if slots else "round"
        long = {i: int(r[0].config.get("aggregate-every", 1)) if slots else 1 for i, r in runs.items()}
        curves = {
            i: _mean([_curve(run, score, range(len(run.clients))) for run in r], long[i]) for i, r in runs.items()
        }
        figures += _over_time(f"time-{k + 1}", f"{score} over time{where}", MICRO, names, curves, strip, when)
        grouped = {i: r for i, r in runs.items() if any(len(run.groups()) > 1 for run in r)}  # else all is within
        curves = {i: _mean([_of_lines(run, "within_group") for run in r], long[i]) for i, r in grouped.items()}
        figures += _over_time(f"within-{k + 1}", f"Weight within a group{where}", SHARE, names, curves, strip, when)
    return figures


def run_figures(run: Run) -> list[Figure]:
    """Return every score and the confidence over time, a curve for each group of clients; and what W is like."""
    figures, strip, groups = list[Figure](), _strip(run), run.groups()
    names, by = [group_name(run, group) for group in groups], ", by group"
    if len(groups) > MOST_GROUPS:
        groups, names, by = [list(range(len(run.clients)))], ["all clients"], ""
    for score in run.scores():
        curves = {i: _thinned(*_curve(run, score, group)) for i, group in enumerate(groups)}
        figures += _over_time(f"time-{score}", f"{score} over time{by}", MICRO, names, curves, strip)
    if len(groups) == 1 and len(run.clients) <= MOST_GROUPS:  # one client's change is not to be lost in a mean
        groups, names, by = [[i] for i in range(len(run.clients))], run.clients, ", by client"
    rounds, sure = run.confidence()
    curves = {i: _thinned(*_known_mean(rounds, sure[:, group])) for i, group in enumerate(groups)}
    figures += _over_time("time-confidence", f"Confidence over time{by}", CONFIDENCE, names, curves, strip)
    found = {i: _thinned(*_of_lines(run, key)) for i, key in enumerate(STRUCTURE)}
    names = list(STRUCTURE.values())
    return figures + _over_time("collaboration", "W over time", SHARE, names, found, strip)


def of_column(column: Labels) -> str:
    """Return what follows a figure's heading, where the main table has columns."""
    return f": {title(column)}" if column else ""


def group_name(run: Run, group: Sequence[int]) -> str:
    """Return how a group of clients is called."""
    first = run.clients[group[0]]
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more"


def figure(name: str, heading: str, text: str, draw: Draw, size: tuple[float, float]) -> Figure:
    """Return a figure, drawn for light and for dark pages, and for papers."""
    light, vector = drawn(draw, size, "png", "pdf", dark=False)
    (dark,) = drawn(draw, size, "png", dark=True)
    return Figure(name, heading, text, light, dark, vector, round(96 * size[0]))


def _over_time(
    name: str,
    heading: str,
    label: str,
    names: Sequence[str],
    curves: Mapping[int, Curve],
    strip: Strip | None,
    when: str = "round",
) -> list[Figure]:
    """Return a figure of those curves that have a length; their keys are indices of names, and of colours."""
    known = {i: curve for i, curve in curves.items() if len(curve[0]) > 1}
    if not known:
        return []
    of = [names[i] for i in known]
    spans = (f"{names[i]} mean {y.mean():.2f}, from {y.min():.2f} to {y.max():.2f}" for i, (_, y) in known.items())
    draw = lines(of, list(known.values()), strip, list(known), label, when)
    text = f"{heading}, {label}: {'; '.join(spans)}{_who_saw_what(strip, when) if strip else ''}"
    return [figure(name, heading, text, draw, lines_size(strip))]


def _who_saw_what(strip: Strip, when: str) -> str:
    """Return in words what is drawn below the curves, or how much that is where nobody would listen to it."""
    texts = []
    for group, row in zip(strip.groups, strip.domain, strict=True):
        runs = runs_of(row)
        saw = (f"{strip.domains[row[i]] if row[i] >= 0 else 'absent'} from {when} {i + 1}" for i, _ in runs)
        texts.append(f"{group}: {', '.join(saw) if len(runs) <= MOST_SAID else f'{len(runs) - 1} shifts'}")
    return f". Below, what each group saw: {'; '.join(texts)}"


def _mark(bench: BenchOf, labels: Labels) -> Mark | None:
    found = published(bench, labels)
    return (found[0], found[1].flag == "sound") if found and found[1].flag != "invalid" else None


def _strip(run: Run) -> Strip | None:
    """Return which corruption each group saw in every round; None where that is too much for a figure, or unknown."""
    groups = run.groups()
    if run.timeline is None or len(groups) > MOST_ROWS or not len(run.timeline["domains"]):
        return None
    domain = np.stack([run.timeline["domain"][:, group].max(axis=1) for group in groups])
    return Strip(domain, run.timeline["domains"].tolist(), [group_name(run, group) for group in groups])


def _common(strips: Sequence[Strip | None]) -> Strip | None:
    """Return what all runs saw when; None where they differ, by their seed or in the lengths of their rounds."""
    known = [strip for strip in strips if strip is not None]
    same = all(
        one.groups == known[0].groups
        and one.domains == known[0].domains
        and np.array_equal(one.domain, known[0].domain)
        for one in known
    )
    return known[0] if known and len(known) == len(strips) and same else None


def _curve(run: Run, score: str, clients: Sequence[int]) -> Curve:
    """Return a score of some clients together over the rounds, in percent."""
    timeline = run.timeline
    if timeline is None or score not in timeline["scores"].tolist():
        return np.zeros(0), np.zeros(0)
    at = timeline["scores"].tolist().index(score)
    seen, correct = (timeline[key][at][:, list(clients)].sum(axis=1) for key in ("seen", "correct"))
    known = seen > 0
    return timeline["rounds"][known], 100 * correct[known] / seen[known]


def _known_mean(rounds: NDArray[Any], values: NDArray[Any]) -> Curve:
    """Return the mean of what is known of values [R, N], in the rounds in which anything is."""
    known = np.isfinite(values)
    there = known.any(axis=1)
    return rounds[there], np.mean(values[there], axis=1, where=known[there])


def _of_lines(run: Run, key: str) -> Curve:
    """Return a number of the structure of W over the rounds."""
    pairs = [(line["round"], (line["collaboration"] or {}).get(key)) for line in run.lines]
    known = [pair for pair in pairs if None not in pair]
    x, y = np.array(known, dtype=np.float64).reshape(-1, 2).T
    return x, y


def _thinned(x: NDArray[Any], y: NDArray[Any]) -> Curve:
    """Average so many neighbours that no more than `POINTS` are left."""
    starts = np.arange(0, len(x), max(1, -(-len(x) // POINTS)))
    if len(starts) == len(x):
        return x, y
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def _mean(curves: Sequence[Curve], slots: int = 1) -> Curve:
    """Return the mean of each round, of the seeds that have it; over slots, where a round has several."""
    rounds = np.unique(np.concatenate([x for x, _ in curves]))
    values = np.full((len(curves), len(rounds)), np.nan)
    for row, (x, y) in zip(values, curves, strict=True):
        row[np.searchsorted(rounds, x)] = y
    return _thinned(rounds * slots, np.nanmean(values, axis=0))
