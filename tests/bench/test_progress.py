"""What a benchmark prints while it runs."""

import subprocess
from pathlib import Path

import pytest

from fedtta_flwr.bench import progress
from fedtta_flwr.bench.progress import Lines, Live
from fedtta_flwr.bench.runner import Running
from fedtta_flwr.bench.spec import Cell

CELL = Cell("FedAvg.[b]NIID[/b].seed0", {}, 0, {})


def running(done: int, rounds: int) -> Running:
    return Running(CELL, subprocess.Popen(["true"]), Path(), done=done, rounds=rounds)


def test_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    lines = Lines(cells=4)
    lines.started(CELL)
    clock[0] += 30
    lines.advanced([running(5, 10)])
    assert capsys.readouterr().out == ""  # not a minute yet
    clock[0] += 60
    lines.advanced([running(5, 10), running(0, 0)])  # half a cell in 90 s; 3.5 are left
    assert capsys.readouterr().out == f"{CELL.id} 5/10, {CELL.id} 0/0; about 10 min left\n"
    lines.ended(CELL, "", 95.4)
    lines.ended(CELL, "no such file", 1.0)
    out = capsys.readouterr().out.splitlines()
    assert out == [f"[1/4] {CELL.id}: 95 s", f"[2/4] {CELL.id}: FAILED: no such file"]
    clock[0] += 1e5
    assert lines.left([]) == "about 55 h 36 min left"  # one in all that time; what has failed says nothing


def test_what_had_been_before_says_nothing_of_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    lines, one = Lines(cells=2), running(8, 10)
    one.before = 6
    clock[0] += 60
    assert lines.left([one]) == "about 6 min left"  # a fifth of a cell in a minute; 1.2 are left
    lines.ended(CELL, "", 120.0)
    clock[0] += 60
    assert lines.left([]) == "about 5 min left"  # 0.4 cells in two minutes


def test_at_the_beginning_the_time_is_not_known() -> None:
    assert Lines(4).left([running(0, 0)]) == "time left not known yet"


def test_the_live_table_prints_what_has_ended_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Live(1) as live:
        live.started(CELL)
        live.advanced([running(1, 2)])
        live.ended(CELL, "", 3.0)
        live.advanced([])
    out = capsys.readouterr().out
    assert f"[1/1] {CELL.id}: 3 s" in out
    assert "1/1" in out
