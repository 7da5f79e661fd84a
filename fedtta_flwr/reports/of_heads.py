"""The figures of two heads: accuracy by test set, and how much the global head counted (BTFL, figure 6)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtta_flwr.data.btgfl import SETS
from fedtta_flwr.reports.drawing import FAINT, WIDE, Draw, colour
from fedtta_flwr.reports.figures import Figure, figure, of_column
from fedtta_flwr.reports.interpolation import FILE
from fedtta_flwr.reports.layout import rows_and_columns, title
from fedtta_flwr.reports.mistrust import Arrays, heads_fault, read_arrays
from fedtta_flwr.reports.of_run import score_names
from fedtta_flwr.reports.read import BenchOf, Run


def head_figures(run: Run) -> list[Figure]:
    """Return accuracy by test set, and the distribution of the global head's weight where heads were weighed."""
    names = [score_names(run)[score] for score in run.scores()]
    values = [_by_set(run, score) for score in run.scores()]
    return _sets("sets", "Accuracy by test set", names, values, range(len(names))) + _weights(run, "weights", "")


def head_bench_figures(bench: BenchOf) -> list[Figure]:
    """Return the same for each column of the main table: a bar for each row; weights of the first seed."""
    rows, columns = rows_and_columns(bench)
    sets, weights = list[Figure](), list[Figure]()
    for k, column in enumerate(columns):
        where = of_column(column)
        found = {i: runs for i, row in enumerate(rows) if (runs := bench.runs(row | column))}
        names = [title(rows[i]) or bench.spec.score for i in found]
        values = [_mean([_by_set(run, bench.spec.score) for run in runs]) for runs in found.values()]
        sets += _sets(f"sets-{k + 1}", f"Accuracy by test set{where}", names, values, list(found))
        for name, (i, runs) in zip(names, found.items(), strict=True):
            weights += _weights(runs[0], f"weights-{k + 1}-{i + 1}", f"{where}: {name}")
    return sets + weights


def _mean(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over seeds."""
    return {
        name: float(np.mean([values[name] for values in several if name in values]))
        for name in SETS
        if any(name in values for values in several)
    }


def _sets(
    file: str, heading: str, names: Sequence[str], values: Sequence[Mapping[str, float]], colours: Sequence[int]
) -> list[Figure]:
    sets = [name for name in SETS if any(name in of_head for of_head in values)]
    if not sets:
        return []
    spoken = (f"{name}: {', '.join(f'{v:.2f} %' for v in of.values())}" for name, of in zip(names, values, strict=True))
    drawn = bars(sets, names, [[of_head.get(name) for name in sets] for of_head in values], colours)
    return [figure(file, heading, "; ".join(spoken), drawn, (WIDE, 3.4))]


def _weights(run: Run, file: str, of: str) -> list[Figure]:
    path = run.path / FILE
    weights = read_arrays(path, heads_fault, len(run.clients), run.faults) if path.exists() else None
    if weights is None or not len(weights["sets"]):
        return []
    about = "; ".join(f"{name} mean {mean:.2f}" for name, mean in zip(weights["sets"], _means(weights), strict=True))
    size = (WIDE, 0.8 + 1.1 * len(weights["sets"]))
    return [figure(file, f"Weight of the global head, by test set{of}", about, ridges(weights), size)]


def _by_set(run: Run, score: str) -> dict[str, float]:
    found: dict[str, float] = run.summary["accuracy"].get(score, {}).get("per_corruption_mean_clients", {})
    return found


def _means(weights: Arrays) -> list[float]:
    """Return the mean weight of each test set, from the middles of the bins."""
    edges, table = weights["edges"], weights["histogram"].sum(axis=1)
    middles = (edges[1:] + edges[:-1]) / 2
    return [float(row @ middles / max(1, row.sum())) for row in table]


def bars(
    sets: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float | None]], colours: Sequence[int]
) -> Draw:
    """Draw a group of bars for each test set, a bar for each head."""

    def draw(canvas: Any, dark: bool) -> None:
        axes = canvas.add_subplot()
        width = 0.8 / max(1, len(names))
        for i, (name, several, number) in enumerate(zip(names, values, colours, strict=True)):
            heights = [np.nan if value is None else value for value in several]
            place = np.arange(len(sets)) + (i - (len(names) - 1) / 2) * width
            drawn = axes.bar(place, heights, width, color=colour(number, dark), label=name)
            axes.bar_label(drawn, fmt="%.0f", fontsize=7)
        axes.set_xticks(range(len(sets)), sets)
        axes.set_ylabel("accuracy in %")
        axes.grid(axis="y", color=FAINT[dark], alpha=0.3, linewidth=0.5)
        axes.legend(frameon=False, fontsize=8, ncols=min(len(names), 5), loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return draw


def ridges(weights: Arrays) -> Draw:
    """Draw one histogram below the other, with a line at the mean."""

    def draw(canvas: Any, dark: bool) -> None:
        edges, sets = weights["edges"], weights["sets"].tolist()
        parts = canvas.subplots(len(sets), 1, sharex=True, squeeze=False)[:, 0]
        for i, (axes, name, mean) in enumerate(zip(parts, sets, _means(weights), strict=True)):
            counts = weights["histogram"][i].sum(axis=0)
            axes.stairs(counts / max(1, counts.sum()), edges, fill=True, color=colour(i, dark), alpha=0.75)
            axes.axvline(mean, color=FAINT[dark], linestyle=":")
            axes.set_title(f"{name}, mean {mean:.2f}", fontsize=8, loc="left")
            axes.set_xlim(0, 1)
        parts[-1].set_xlabel("weight of the global head: 0 the personal head alone, 1 the global head alone")
        canvas.supylabel("share of the samples", fontsize=9)

    return draw
