"""The figures of a report, as PNG: each once for light and once for dark pages, on nothing (they are transparent)."""

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.reports.layout import published, rows_and_columns, title
from fedtta_flwr.reports.read import BenchOf, Run, shifts

INK = {False: "#1f2328", True: "#e6edf3"}  # by darkness of the page
FAINT = {False: "#8c959f", True: "#6e7681"}
POINTS = 60  # of a curve: more is averaged
MOST_GROUPS = 20  # with a curve, and so a colour, of their own


@dataclass(frozen=True)
class Figure:
    """A figure, drawn twice.

    Attributes
    ----------
    name : str
        For the files.
    text : str
        What it shows, in words, for who does not see it.
    light, dark : bytes
        PNG.
    width : int
        On a page, in CSS pixels.
    """

    name: str
    title: str
    text: str
    light: bytes
    dark: bytes
    width: int


def bench_figures(bench: BenchOf) -> list[Figure]:
    """Return bars with the spread over the seeds, and accuracy over time, for each column of the main table."""
    rows, columns = rows_and_columns(bench)
    score, figures = bench.spec.score, list[Figure]()
    for k, column in enumerate(columns):
        there = [(row, bench.runs(row | column)) for row in rows]
        there = [
            (row, runs)
            for row, runs in there
            if any(run.accuracy(score, bench.spec.metric) is not None for run in runs)
        ]
        if not there:
            continue
        names = [title(row) or score for row, _ in there]
        colours = [rows.index(row) for row, _ in there]  # a row has the same one in every figure
        accuracies = [[run.accuracy(score, bench.spec.metric) for run in runs] for _, runs in there]
        values = [[v for v in several if v is not None] for several in accuracies]
        marks = [p[0] if (p := published(bench, row | column)) and p[1].flag != "invalid" else None for row, _ in there]
        where = f": {title(column)}" if column else ""
        figures.append(
            _figure(
                f"bars-{k + 1}",
                f"{score}{where}",
                "; ".join(f"{n} {np.mean(v):.2f} %" for n, v in zip(names, values, strict=True)),
                _bars(names, values, marks, colours),
                (6.4, 0.9 + 0.34 * len(names)),
            )
        )
        curves = [_mean_curve(runs, score) for _, runs in there]
        drawn = [i for i, (x, _) in enumerate(curves) if len(x) > 1]
        if drawn:
            strip = next(filter(None, (_strip(run) for _, runs in there for run in runs)), None)
            names = [names[i] for i in drawn]
            about = f"Accuracy of {', '.join(names)} round by round"
            draw = _lines(names, [curves[i] for i in drawn], strip, [colours[i] for i in drawn])
            figures.append(_figure(f"time-{k + 1}", f"{score} over time{where}", about, draw, _size(strip)))
    return figures


def run_figures(run: Run) -> list[Figure]:
    """Return accuracy over time, a curve for each group of clients, of every score; of very many groups the mean."""
    figures = []
    groups = run.groups()
    known, by = [(group_name(run, group), group) for group in groups], ", by group"
    if len(groups) > MOST_GROUPS:
        known, by = [("all clients", list(range(len(run.clients))))], ""
    for score in run.scores():
        curves = {name: curve for name, group in known if len((curve := _curve(run, score, group))[0]) > 1}
        if not curves:
            continue
        strip = _strip(run)
        about = f"Accuracy of {', '.join(curves)} round by round"
        draw = _lines(list(curves), list(curves.values()), strip, range(len(curves)))
        figures.append(_figure(f"time-{score}", f"{score} over time{by}", about, draw, _size(strip)))
    return figures


def group_name(run: Run, group: Sequence[int]) -> str:
    """Return how a group of clients is called."""
    first = run.clients[group[0]]
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more"


def _figure(name: str, heading: str, text: str, draw: Callable[[Any, bool], None], size: tuple[float, float]) -> Figure:
    return Figure(name, heading, text, _png(draw, False, size), _png(draw, True, size), round(96 * size[0]))


def _png(draw: Callable[[Any, bool], None], dark: bool, size: tuple[float, float]) -> bytes:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ConfigError("figures need matplotlib; pip install 'fedtta-flwr[plots]'") from None
    ink = INK[dark]
    colours: dict[Any, Any] = {f"{part}.color": ink for part in ("text", "xtick", "ytick")}
    colours |= {"axes.labelcolor": ink, "axes.edgecolor": FAINT[dark], "axes.facecolor": "none", "font.size": 9}
    colours |= {"axes.spines.top": False, "axes.spines.right": False, "legend.labelcolor": ink}
    colours["text.parse_math"] = "False"  # a dollar sign in a name is one
    with rc_context(colours):
        canvas = Canvas(figsize=size, layout="constrained")
        draw(canvas, dark)
        output = io.BytesIO()
        canvas.savefig(output, format="png", dpi=160, transparent=True)
    return output.getvalue()


def _colour(index: int) -> Any:
    from matplotlib import colormaps

    # Ten colours, then the same ten paler; tab20 has them in turns.
    return colormaps["tab20"](2 * index % 20 + index % 20 // 10)


def _bars(
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    marks: Sequence[float | None],
    colours: Sequence[int],
) -> Callable[[Any, bool], None]:
    def draw(canvas: Any, dark: bool) -> None:
        axes = canvas.add_subplot()
        place = np.arange(len(names))
        means = [float(np.mean(several)) for several in values]
        spreads = [float(np.std(several, ddof=1)) if len(several) > 1 else 0.0 for several in values]
        axes.barh(place, means, xerr=spreads, color=[_colour(i) for i in colours], ecolor=INK[dark], height=0.7)
        known = [(mark, i) for i, mark in enumerate(marks) if mark is not None]
        if known:
            x, y = zip(*known, strict=True)
            axes.scatter(x, y, marker="D", s=22, color=INK[dark], zorder=3, label="published")
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16 - 0.2 / len(names)))
        left = max(0.0, 5 * (min([*means, *(mark for mark, _ in known)]) // 5) - 5)
        axes.set_xlim(left, max([*means, *(mark for mark, _ in known)]) + 2)
        for i, mean in enumerate(means):
            axes.text(left, i, f" {mean:.1f}", va="center", fontsize=8, color="white", fontweight="bold")
        axes.set_yticks(place, names)
        axes.invert_yaxis()
        axes.set_xlabel("accuracy in %" + (f", from {left:.0f}" if left else ""))

    return draw


Strip = tuple[NDArray[Any], list[str], list[str]]  # index of the corruption [groups, rounds], corruptions, groups
Curve = tuple[NDArray[Any], NDArray[Any]]  # rounds, accuracy in percent


def _lines(
    names: Sequence[str], curves: Sequence[Curve], strip: Strip | None, colours: Sequence[int]
) -> Callable[[Any, bool], None]:
    def draw(canvas: Any, dark: bool) -> None:
        rows = len(strip[2]) if strip else 0
        parts = canvas.subplots(2, 1, sharex=True, height_ratios=[1, 0.09 * rows]) if strip else [canvas.add_subplot()]
        for i, (name, (x, y)) in enumerate(zip(names, curves, strict=True)):
            parts[0].plot(x, y, color=_colour(colours[i]), label=name, linewidth=1.4)
        parts[0].set_ylabel("accuracy in %")
        parts[0].grid(color=FAINT[dark], alpha=0.3, linewidth=0.5)
        parts[0].legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        parts[-1].set_xlabel("round")
        if strip is None:
            return
        domain, domains, groups = strip
        marks = np.flatnonzero(shifts(domain.T).any(axis=1)) + 0.5
        for mark in marks if len(marks) <= 60 else []:
            parts[0].axvline(mark, color=FAINT[dark], linewidth=0.6, linestyle=":")
        _draw_strip(parts[1], domain, domains, groups)

    return draw


def _draw_strip(axes: Any, domain: NDArray[Any], domains: list[str], groups: list[str]) -> None:
    """Draw which corruption each group saw when; a run of rounds that is long enough is labelled."""
    rounds = domain.shape[1]
    for g, row in enumerate(domain):
        edges = [0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), rounds]
        for start, end in itertools.pairwise(edges):
            if row[start] < 0:
                continue
            width = end - start
            axes.barh(g, width, left=start + 0.5, height=0.86, color=_colour(int(row[start])), alpha=0.55)
            if width / rounds > 0.045:
                name = domains[row[start]].replace("_", " ")
                size = 7 if width / rounds > 0.012 * len(name) else 5
                axes.text(start + 0.5 + width / 2, g, name.replace(" ", "\n"), ha="center", va="center", fontsize=size)
    axes.set_yticks(range(len(groups)), groups, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0.5, rounds + 0.5)


def _size(strip: Strip | None) -> tuple[float, float]:
    return (9.6, 4.0 + (0.34 * len(strip[2]) if strip else 0))


def _strip(run: Run) -> Strip | None:
    """Return which corruption each group saw in every round; None where that is too much for a figure, or unknown."""
    groups = run.groups()
    if run.timeline is None or len(groups) > 12 or not len(run.timeline["domains"]):
        return None
    domain = np.stack([run.timeline["domain"][:, group].max(axis=1) for group in groups])
    return domain, run.timeline["domains"].tolist(), [group_name(run, group) for group in groups]


def _curve(run: Run, score: str, clients: Sequence[int]) -> Curve:
    """Return a score over the rounds, averaged over neighbouring ones if there are many."""
    timeline = run.timeline
    if timeline is None or score not in timeline["scores"].tolist():
        return np.zeros(0), np.zeros(0)
    at = timeline["scores"].tolist().index(score)
    seen, correct = (timeline[key][at][:, list(clients)].sum(axis=1) for key in ("seen", "correct"))
    starts = np.unique(np.linspace(0, len(seen), min(POINTS, len(seen)) + 1).astype(int))[:-1]
    seen, correct = np.add.reduceat(seen, starts), np.add.reduceat(correct, starts)
    known = seen > 0
    ends = np.append(starts[1:], len(timeline["rounds"])) - 1
    middles = (timeline["rounds"][starts] + timeline["rounds"][ends]) / 2
    return middles[known], 100 * correct[known] / seen[known]


def _mean_curve(runs: Sequence[Run], score: str) -> Curve:
    """Return the mean of the curves of several seeds, as far as all go."""
    curves = [_curve(run, score, range(len(run.clients))) for run in runs]
    longest = max(len(x) for x, _ in curves)
    curves = [curve for curve in curves if len(curve[0]) == longest]
    return curves[0][0], np.mean([y for _, y in curves], axis=0)
