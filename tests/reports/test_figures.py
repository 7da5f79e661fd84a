"""Figures: colours, and what is left when something cannot be drawn."""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtta_flwr.bench.spec import make_spec
from fedtta_flwr.reports import drawing, figures
from fedtta_flwr.reports.drawing import Strip
from fedtta_flwr.reports.figures import bench_figures, run_figures
from fedtta_flwr.reports.read import BenchOf, CellOf, read_run


def test_twenty_colours_differ() -> None:
    """And stand out from the page, three to one."""
    for dark, page in ((False, (1.0, 1.0, 1.0)), (True, (0x0D / 255, 0x11 / 255, 0x17 / 255))):
        colours = {tuple(drawing.colour(i, dark))[:3] for i in range(20)}
        assert len(colours) == 20
        for one in colours:
            darker, lighter = sorted((_luminance(one), _luminance(page)))
            assert (lighter + 0.05) / (darker + 0.05) >= 3, (dark, one)


def _luminance(rgb: Sequence[float]) -> float:
    """WCAG 2.1's relative luminance."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_groups_that_cannot_be_drawn(run_local: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    """A group that was never there has no curve; very many groups are drawn as one."""
    path = Path(shutil.copytree(run_local(scores="post").path, tmp_path / "run"))
    with np.load(path / "timeline.npz") as file:
        arrays = dict(file)
    arrays["domain"][:, 0] = -1
    for key in ("seen", "correct"):
        arrays[key][:, :, 0] = 0
    arrays["confidence"][:, 0] = np.nan
    np.savez_compressed(path / "timeline.npz", **arrays)
    run = read_run(path)
    assert len(run.groups()) == 3
    figure, sure, w = run_figures(run)
    assert sure.title == "Confidence over time, by group"
    assert re.findall(r"(client-0\d.*?) mean", sure.text) == ["client-01", "client-02 and 1 more"]
    assert figure.title == "post over time, by group"
    assert re.findall(r"(client-0\d.*?) mean", figure.text) == ["client-01", "client-02 and 1 more"]
    assert w.title == "W over time"
    monkeypatch.setattr(figures, "MOST_GROUPS", 2)
    figure, *_ = run_figures(run)
    assert figure.title == "post over time"
    assert figure.text.startswith("post over time, micro accuracy in %: all clients mean ")
    assert ". Below, what each group saw: client-00: absent from round 1; client-01: " in figure.text
    assert figure.light.startswith(b"\x89PNG")
    assert figure.light != figure.dark
    assert figure.vector.startswith(b"%PDF")


def test_long_curves_are_averaged_evenly() -> None:
    x, y = figures._thinned(np.arange(1.0, 401.0), np.arange(400.0) ** 2)
    assert len(x) == 134  # of three rounds each, and one
    assert x[:2].tolist() == [2, 5]
    assert y[1] == (9 + 16 + 25) / 3
    assert (x[-1], y[-1]) == (400, 399**2)


def test_the_mean_of_a_round_is_of_the_seeds_that_have_it() -> None:
    """One has no labels in its third round, one ends earlier."""
    x, y = figures._mean([(np.array([1, 2, 4]), np.zeros(3)), (np.arange(1, 4), np.full(3, 2.0))])
    assert x.tolist() == [1, 2, 3, 4]
    assert y.tolist() == [1.0, 1.0, 2.0, 0.0]
    x, y = figures._mean([(np.arange(400), np.arange(400) + k) for k in (0.0, 1.0)], 3)
    assert len(x) == len(y) <= figures.POINTS
    assert (x[0], y[0]) == (3.0, 1.5)  # of three rounds of three slots


def test_w_over_time_is_that_of_the_lines(run_local: Callable[..., Any]) -> None:
    run = read_run(run_local(scores="post").path)
    x, y = figures._of_lines(run, "within_group")
    assert x.tolist() == [1, 2, 3, 4]
    assert y.tolist() == [line["collaboration"]["within_group"] for line in run.lines]
    assert run_figures(run)[-1].name == "collaboration"


def test_runs_with_rounds_of_other_lengths_are_drawn_over_slots(
    run_local: Callable[..., Any], tmp_path: Path, monkeypatch: Any
) -> None:
    every = {"one": 1, "two": 2}
    table = {
        "name": "every", "title": "Every", "rows": ["every"], "columns": [], "seeds": [0],
        "axes": {"every": {name: {"aggregate-every": k} for name, k in every.items()}},
    }  # fmt: skip
    runs = {name: read_run(run_local(scores="post", **{"aggregate-every": k}).path) for name, k in every.items()}
    cells = [CellOf(name, {"every": name}, 0, run) for name, run in runs.items()]
    drawn = []
    monkeypatch.setattr(figures, "lines", lambda *arguments: drawn.append(arguments) or drawing.lines(*arguments))
    bench_figures(BenchOf(tmp_path, make_spec(table, "every.toml"), {}, cells))
    names, curves, strip, _, label, when = drawn[0]
    assert (names, strip, label, when) == (["one", "two"], None, drawing.MICRO, "slot")
    assert [x.tolist() for x, _ in curves] == [[1, 2, 3, 4], [2, 4]]
    drawn.clear()
    bench_figures(BenchOf(tmp_path, make_spec(table, "every.toml"), {}, cells[:1]))
    assert drawn[0][2] is not None
    assert drawn[0][-1] == "round"


def test_what_was_seen_when_is_shown_where_all_runs_saw_the_same() -> None:
    one, same, other = (Strip(np.array([domain]), ["fog", "snow"], ["all"]) for domain in ([0, 1], [0, 1], [1, 0]))
    assert figures._common([one, same]) is one
    assert figures._common([one, other]) is None
    assert figures._common([one, None]) is None
    assert figures._common([]) is None
