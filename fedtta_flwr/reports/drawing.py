"""How the figures of a report are drawn: matplotlib, for light and for dark pages and for papers, on nothing."""

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.errors import ConfigError, install
from fedtta_flwr.reports.read import shifts

INK = {False: "#1f2328", True: "#e6edf3"}  # by darkness of the page
FAINT = {False: "#8c959f", True: "#6e7681"}
MOST_SHIFTS = 60  # more dotted lines than these hide the curves
WIDE, NARROW = 9.6, 5.2  # inches
PERCENT, MICRO, SHARE = "accuracy in %", "micro accuracy in %", "share, from 0 to 1"
CONFIDENCE = "mean probability of what is predicted"

Curve = tuple[NDArray[Any], NDArray[Any]]  # rounds, values
Mark = tuple[float, bool]  # a published figure, whether it is sound
Draw = Callable[[Any, bool], None]  # on a matplotlib Figure, for a dark page


@dataclass(frozen=True)
class Strip:
    """Which corruption each group of clients saw when.

    Attributes
    ----------
    domain : ndarray
        [groups, rounds], indices into `domains`; -1 = none.
    """

    domain: NDArray[Any]
    domains: list[str]
    groups: list[str]


def drawn(draw: Draw, size: tuple[float, float], *formats: str, dark: bool) -> list[bytes]:
    """Return a drawing of `size` in inches in each format, ``png`` or ``pdf``.

    Raises
    ------
    ConfigError
        If matplotlib is absent.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ConfigError(f"figures need matplotlib; {install('plots')}") from None
    ink = INK[dark]
    settings: dict[Any, Any] = {f"{part}.color": ink for part in ("text", "xtick", "ytick")}
    settings |= {"axes.labelcolor": ink, "axes.edgecolor": FAINT[dark], "axes.facecolor": "none", "font.size": 9}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "legend.labelcolor": ink}
    settings |= {"text.parse_math": False}  # names come from outside
    settings |= {"pdf.fonttype": 42}  # TrueType: many a publisher refuses the default, Type 3
    with rc_context(settings):
        canvas = Canvas(figsize=size, layout="constrained")
        draw(canvas, dark)
        return [_saved(canvas, kind) for kind in formats]


def _saved(canvas: Any, kind: str) -> bytes:
    output = io.BytesIO()
    undated = {"CreationDate": None} if kind == "pdf" else None  # the same drawing is the same file
    canvas.savefig(output, format=kind, dpi=160, transparent=True, metadata=undated)
    return output.getvalue()


def dots(
    names: Sequence[str], values: Sequence[Sequence[float]], marks: Sequence[Mark | None], colours: Sequence[int]
) -> Draw:
    """Draw means with the spread of their values, beside published marks; the axis need not begin at 0."""

    def draw(canvas: Any, dark: bool) -> None:
        axes = canvas.add_subplot()
        means = [float(np.mean(several)) for several in values]
        for i, (mean, several) in enumerate(zip(means, values, strict=True)):
            spread = float(np.std(several, ddof=1)) if len(several) > 1 else None
            axes.errorbar(
                mean, i, xerr=spread, fmt="o", color=colour(colours[i], dark), markersize=7, capsize=3, elinewidth=1.6
            )
            axes.annotate(
                f"{mean:.1f}", (mean, i), (0, 6), textcoords="offset points", ha="center", fontsize=8, color=INK[dark]
            )
        for sound, shape, label in ((True, "D", "published"), (False, "x", "published, doubtful or copied")):
            known = [(mark[0], i) for i, mark in enumerate(marks) if mark is not None and mark[1] == sound]
            if known:
                x, y = zip(*known, strict=True)
                fill = {"facecolors": "none", "edgecolors": INK[dark]} if sound else {"color": FAINT[dark]}
                axes.scatter(x, y, marker=shape, s=26, zorder=3, label=label, **fill)
        if any(mark is not None for mark in marks):
            axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, borderpad=0, ncols=2)
        axes.margins(x=0.1)
        axes.set_ylim(len(names) - 0.5, -0.75)
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="both", color=FAINT[dark], alpha=0.3, linewidth=0.5)
        axes.set_xlabel(PERCENT)

    return draw


def lines(
    names: Sequence[str],
    curves: Sequence[Curve],
    strip: Strip | None,
    colours: Sequence[int],
    label: str,
    when: str = "round",
) -> Draw:
    """Draw curves over rounds or slots; below, which corruption was seen when, and dotted lines at the shifts."""

    def draw(canvas: Any, dark: bool) -> None:
        below = 0.09 * len(strip.groups) if strip else 0
        parts = canvas.subplots(2, 1, sharex=True, height_ratios=[1, below]) if strip else [canvas.add_subplot()]
        for i, (name, (x, y)) in enumerate(zip(names, curves, strict=True)):
            # Neighbours differ by more than colour, and so do the 21st and the first, which have the same.
            style = ("-", "--", ":", "-.")[(colours[i] % 2 + 2 * (colours[i] // 20)) % 4]
            parts[0].plot(x, y, style, color=colour(colours[i], dark), label=name, linewidth=1.4)
        parts[0].set_ylabel(label)
        if label == SHARE:
            parts[0].set_ylim(-0.02, 1.02)
        parts[0].grid(color=FAINT[dark], alpha=0.3, linewidth=0.5)
        columns = min(len(names), 4)
        parts[0].legend(frameon=False, fontsize=8, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        parts[-1].set_xlabel(when)
        parts[-1].locator_params(axis="x", integer=True)  # there is no round 1.5
        if strip is None:
            return
        marks = np.flatnonzero(shifts(strip.domain.T).any(axis=1)) + 0.5
        for mark in marks if len(marks) <= MOST_SHIFTS else []:
            parts[0].axvline(mark, color=FAINT[dark], linewidth=0.8, linestyle=":")
        _draw_strip(parts[1], strip, dark)

    return draw


def lines_size(strip: Strip | None) -> tuple[float, float]:
    """Return the size of `lines` in inches."""
    return (WIDE, 4.0 + (0.34 * len(strip.groups) if strip else 0))


def _draw_strip(axes: Any, strip: Strip, dark: bool) -> None:
    rounds, of_domain = strip.domain.shape[1], [colour(i, dark) for i in range(len(strip.domains))]
    for g, row in enumerate(strip.domain):
        spans = [(start, width) for start, width in runs_of(row) if row[start] >= 0]
        # In one piece: a bar by itself takes milliseconds, and a long run has thousands.
        bars, colours = [(start + 0.5, width) for start, width in spans], [of_domain[row[start]] for start, _ in spans]
        axes.broken_barh(bars, (g - 0.43, 0.86), facecolor=colours, alpha=0.55, linewidth=0)
        for start, width in spans:
            if width / rounds > 0.045:  # long enough for a word
                name = strip.domains[row[start]].replace("_", " ")
                size = 7 if width / rounds > 0.012 * len(name) else 5.5
                axes.text(start + 0.5 + width / 2, g, name.replace(" ", "\n"), ha="center", va="center", fontsize=size)
    axes.set_yticks(range(len(strip.groups)), strip.groups, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0.5, rounds + 0.5)


def runs_of(row: NDArray[Any]) -> list[tuple[int, int]]:
    """Return where each run of equal numbers in `row` begins, and how long it is."""
    edges = [0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), len(row)]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


def colour(index: int, dark: bool) -> Any:
    """Return the colour of a curve: ten colours, then the same ten further from the page, which is light or dark.

    The contrast to the page is at least 3 to 1, as WCAG 2.1 (1.4.11) has it for graphics: too few of tab20 have it on
    white, where they are darkened.
    """
    from matplotlib import colormaps

    again = index % 20 // 10
    if dark:
        return colormaps["tab20"](2 * index % 20 + again)  # which has each colour and then a paler one
    *rgb, _ = colormaps["tab10"](index % 10)
    return tuple(part * (0.5 if again else 0.8) for part in rgb)
