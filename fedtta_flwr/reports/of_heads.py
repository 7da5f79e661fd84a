"""The figures of a run of two heads: accuracy by test set, and how much the global head counted (BTFL, figure 6)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtta_flwr.data.btgfl import SETS
from fedtta_flwr.reports.drawing import FAINT, WIDE, Draw, colour
from fedtta_flwr.reports.figures import Figure, figure
from fedtta_flwr.reports.interpolation import FILE
from fedtta_flwr.reports.mistrust import Arrays, heads_fault, read_arrays
from fedtta_flwr.reports.read import Run
from fedtta_flwr.reports.terminal import HEAD_TITLES


def head_figures(run: Run) -> list[Figure]:
    """Return accuracy by test set, and the distribution of the global head's weight where heads were weighed."""
    sets = [name for name in SETS if any(name in _by_set(run, score) for score in run.scores())]
    if not sets:
        return []
    names = [HEAD_TITLES.get(score, str(run.config.get("head", score))) for score in run.scores()]
    values = [[_by_set(run, score).get(name) for name in sets] for score in run.scores()]
    known = [[value for value in several if value is not None] for several in values]
    text = "; ".join(f"{name}: {', '.join(f'{v:.2f} %' for v in v_)}" for name, v_ in zip(names, known, strict=True))
    made = [figure("sets", "Accuracy by test set", text, bars(sets, names, values), (WIDE, 3.4))]
    path = run.path / FILE
    weights = read_arrays(path, heads_fault, len(run.clients), run.faults) if path.exists() else None
    if weights is not None and len(weights["sets"]):
        about = "; ".join(
            f"{name} mean {mean:.2f}" for name, mean in zip(weights["sets"], _means(weights), strict=True)
        )
        size = (WIDE, 0.8 + 1.1 * len(weights["sets"]))
        made.append(figure("weights", "Weight of the global head, by test set", about, ridges(weights), size))
    return made


def _by_set(run: Run, score: str) -> dict[str, float]:
    return dict(run.summary["accuracy"][score]["per_corruption"])


def _means(weights: Arrays) -> list[float]:
    """Return the mean weight of each test set, from the middles of the bins."""
    edges, table = weights["edges"], weights["histogram"].sum(axis=1)
    middles = (edges[1:] + edges[:-1]) / 2
    return [float(row @ middles / max(1, row.sum())) for row in table]


def bars(sets: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float | None]]) -> Draw:
    """Draw a group of bars for each test set, a bar for each head."""

    def draw(canvas: Any, dark: bool) -> None:
        axes = canvas.add_subplot()
        width = 0.8 / max(1, len(names))
        for i, (name, several) in enumerate(zip(names, values, strict=True)):
            heights = [np.nan if value is None else value for value in several]
            place = np.arange(len(sets)) + (i - (len(names) - 1) / 2) * width
            drawn = axes.bar(place, heights, width, color=colour(i), label=name)
            axes.bar_label(drawn, fmt="%.0f", fontsize=7)
        axes.set_xticks(range(len(sets)), sets)
        axes.set_ylabel("accuracy in %")
        axes.grid(axis="y", color=FAINT[dark], alpha=0.3, linewidth=0.5)
        axes.legend(frameon=False, fontsize=8, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return draw


def ridges(weights: Arrays) -> Draw:
    """Draw one histogram below the other, with a line at the mean."""

    def draw(canvas: Any, dark: bool) -> None:
        edges, sets = weights["edges"], weights["sets"].tolist()
        parts = canvas.subplots(len(sets), 1, sharex=True, squeeze=False)[:, 0]
        for i, (axes, name, mean) in enumerate(zip(parts, sets, _means(weights), strict=True)):
            counts = weights["histogram"][i].sum(axis=0)
            axes.stairs(counts / max(1, counts.sum()), edges, fill=True, color=colour(i), alpha=0.75)
            axes.axvline(mean, color=FAINT[dark], linestyle=":")
            axes.set_title(f"{name}, mean {mean:.2f}", fontsize=8, loc="left")
            axes.set_xlim(0, 1)
        parts[-1].set_xlabel("weight of the global head: 0 the personal head alone, 1 the global head alone")
        canvas.supylabel("share of the samples", fontsize=9)

    return draw
