"""What is drawn where."""

import statistics
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedtta_flwr.reports.drawing import SHARE, Strip, dots, drawn, lines


def test_dots_stand_at_the_means_with_the_spread_and_what_was_published() -> None:
    canvas: Any = Figure()
    dots(["one", "two"], [[60.0, 63.0], [50.0]], [(61.0, False), (51.5, True)], [0, 1])(canvas, False)
    (axes,) = canvas.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["one", "two"]
    first, second = axes.containers
    assert first[0].get_xydata().tolist() == [[61.5, 0]]
    ((left, right),) = first[2][0].get_segments()
    assert right[0] - left[0] == pytest.approx(2 * statistics.stdev([60, 63]))
    assert second[0].get_xydata().tolist() == [[50, 1]]
    assert second[2] == ()  # of one value there is no spread, which is not 0
    published = {found.get_label(): found.get_offsets().tolist() for found in axes.collections}
    assert published["published"] == [[51.5, 1]]
    assert published["published, doubtful or copied"] == [[61, 0]]
    assert {text.get_text() for text in axes.texts} == {"61.5", "50.0"}


def test_shifts_are_marked_and_named() -> None:
    strip = Strip(np.array([[0, 0, 1, 1], [1, 1, 1, 0]]), ["fog", "jpeg_compression"], ["a", "b and 1 more"])
    canvas: Any = Figure()
    curve = (np.arange(1, 5), np.linspace(0, 1, 4))
    lines(["x"], [curve], strip, [0], SHARE)(canvas, True)
    above, below = canvas.axes
    assert [line.get_xdata()[0] for line in above.lines[1:]] == [2.5, 3.5]  # between the rounds
    assert above.get_ylim() == (-0.02, 1.02)
    bars = [path.get_extents() for row in below.collections for path in row.get_paths()]
    assert [(bar.x0, bar.width) for bar in bars] == [(0.5, 2), (2.5, 2), (0.5, 3), (3.5, 1)]
    assert [text.get_text() for text in below.texts] == ["fog", "jpeg\ncompression", "jpeg\ncompression", "fog"]


@pytest.mark.parametrize("strip", [None, Strip(np.array([[0, 0, 1]]), ["fog", "snow"], ["all"])])
def test_no_tick_is_between_rounds(strip: Strip | None) -> None:
    canvas: Any = Figure()
    lines(["x"], [(np.arange(1, 4), np.linspace(0, 1, 3))], strip, [0], SHARE)(canvas, False)
    ticks, (left, right) = canvas.axes[-1].get_xticks(), canvas.axes[-1].get_xlim()
    assert [tick for tick in ticks if left <= tick <= right] == [1, 2, 3]


def test_a_vector_figure_has_truetype_fonts_and_no_date() -> None:
    draw = dots(["größer", "two"], [[60.0, 63.0], [50.0]], [None, None], [0, 1])
    png, pdf = drawn(draw, (5.2, 1.6), "png", "pdf", dark=False)
    assert png.startswith(b"\x89PNG")
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"Date" not in pdf
    assert drawn(draw, (5.2, 1.6), "pdf", dark=False) == [pdf]
