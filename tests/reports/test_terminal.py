"""What a run prints."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr.config import RunConfig
from fedtta_flwr.reports import terminal
from fedtta_flwr.reports.run_directory import RunDirectory
from fedtta_flwr.reports.terminal import Terminal
from fedtta_flwr.strategies.rounds import Counts, Round

SECONDS = {"client": 7.0, "server": 1.0, "transport": 2.0, "total": 10.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `Terminal` sees."""
    now = [1000.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def counts(number: int, score: str, domain: str, correct: int, seen: int = 8) -> Counts:
    return Counts(number, "client-00", domain, score, np.array([seen, 0]), np.array([correct, 0]))


def observers(path: Path, rounds: int, scores: str = "post") -> Callable[[Round], None]:
    directory = RunDirectory(path)
    screen = Terminal(directory)
    for observer in (directory, screen):
        observer.on_start(RunConfig(scores=scores), ("client-00", "client-01"), rounds)

    def tell(round_: Round | None) -> None:
        for observer in (directory, screen):
            if round_ is None:
                observer.on_end()
            else:
                observer.on_round(round_)

    return tell  # type: ignore[return-value]


def made(number: int, counted: list[Counts], **known: Any) -> Round:
    return Round(number, counts=counted, bytes_up=4_000, bytes_down=2_000, seconds=dict(SECONDS), **known)


def test_progress_with_the_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    tell = observers(tmp_path / "run", 100)
    assert capsys.readouterr().out == f"2 clients, 100 rounds -> {tmp_path / 'run'}\n"
    clock[0] += 3
    tell(made(1, [counts(1, "pre", "fog", 4)]))
    assert capsys.readouterr().out == ""  # too early for another line
    clock[0] += 7
    tell(made(20, [counts(20, "pre", "fog", 2), counts(19, "post", "fog", 8)]))
    line = capsys.readouterr().out
    assert line.startswith("round 20/100")
    assert "pre 37.5%" in line
    assert "post 100.0%" in line
    assert "tta" not in line
    assert "10 s, 40 s left" in line  # 0.5 s a round, 80 to go
    assert line.count("\n") == 1
    assert "\r" not in line
    assert "\x1b" not in line


def test_without_labels_progress_is_who_took_part_and_what_they_predict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    tell = observers(tmp_path / "run", 2)
    sure, shares = {"client-00": 0.5, "client-01": 0.9}, {"a": 0.2, "b": 0.314}
    clock[0] += 10
    tell(made(1, [], clients=("client-01",), samples=4))
    tell(made(2, [], clients=("client-00", "client-01"), samples=1200, largest_share=shares, confidence=sure))
    tell(made(3, [], closing=True))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "round 1/2  1 of 2 clients, 4 samples  10 s, 10 s left",
        "round 2/2  2 of 2 clients, 1,200 samples, confidence 0.70, one class at most 31%  10 s, 0 s left",
    ]


def test_the_time_left_of_a_run_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    tell = observers(tmp_path / "run", 100)
    clock[0] += 10
    tell(made(51, [counts(51, "pre", "fog", 4)]))
    assert "10 s, 490 s left" in capsys.readouterr().out  # one round in 10 s, 49 to go
    clock[0] += 10
    tell(made(52, [counts(52, "pre", "fog", 4)]))
    assert "20 s, 480 s left" in capsys.readouterr().out


def test_a_log_on_a_full_disk_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        tell = observers(tmp_path / "run", 1)
        tell(made(1, [counts(1, "post", "fog", 4)]))
        tell(None)
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    assert (tmp_path / "run" / "summary.json").is_file()


def test_the_last_round_is_always_told_and_with_its_post(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    tell = observers(tmp_path / "run", 2)
    capsys.readouterr()
    tell(made(1, [counts(1, "pre", "fog", 4)]))
    clock[0] += 100
    tell(made(2, [counts(2, "pre", "fog", 4), counts(1, "post", "fog", 8)]))
    assert capsys.readouterr().out == ""
    clock[0] += 1
    tell(made(3, [counts(2, "post", "fog", 2)], closing=True))
    line = capsys.readouterr().out
    assert line == "round 2/2  accuracy so far: pre 50.0%  post 62.5%  101 s, 0 s left\n"
    tell(None)  # type: ignore[arg-type]
    assert "average" in (table := capsys.readouterr().out)
    assert table.rstrip().endswith("62.50")  # what the line says


def test_the_table_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    tell = observers(tmp_path / "run", 1)
    tell(made(1, [counts(1, "source", "fog", 1), counts(1, "source", "snow", 2), counts(1, "pre", "fog", 5)]))
    tell(made(2, [counts(1, "post", "fog", 7)], closing=True, memory={"client": 3 << 20, "server": 2 << 20}))
    capsys.readouterr()
    tell(None)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 rounds in 20.0 s (clients' compute 14.0, server 2.0, transport 4.0)")
    assert lines[0].endswith("4,000 bytes up, 2,000 down; peak memory in MiB: client 3, server 2")
    assert lines[1] == f"results: {tmp_path / 'run'}"
    assert lines[2] == "accuracy in %, over all samples"
    cells = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    assert cells["corruption"] == ["source", "model", "federation:", "pre", "federation:", "post"]
    assert cells["fog"] == ["12.50", "62.50", "87.50"]
    assert cells["snow"] == ["25.00"]  # what was not scored is blank, not 0
    assert cells["average"] == ["18.75", "62.50", "87.50"]


def test_steps_that_came_to_nothing_are_told(tmp_path: Path, capsys, clock: list[float], warned: list[str]) -> None:
    tell = observers(tmp_path / "run", 3)
    steps = dict.fromkeys("abcde", 2)
    tell(made(1, [], steps=steps, undone={"a": 1, "b": 1}))
    assert warned == []
    tell(made(2, [], steps=steps, undone={"a": 1, "b": 2}))
    assert warned == [line for line in warned if line.startswith("round 2: b: all steps were undone, their result")]
    tell(made(3, [], steps=steps, undone={"b": 2}))  # once is enough
    assert len(warned) == 1
    tell(made(4, [], steps=steps, undone=steps))
    assert [line.partition(": all")[0] for line in warned] == ["round 2: b", "round 4: a, c, d and 1 more"]
    capsys.readouterr()
    tell(None)  # type: ignore[arg-type]
    told = "17 of 40 steps were undone, their result was not finite: b (7), a (4), c (2) and 2 more\n"
    assert told in capsys.readouterr().out


def test_a_corruption_is_called_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    """A device may call it anything: what rich would take for markup must neither vanish nor end the run."""
    names = ["[/b]", "[bold]fog[/bold]", ":smiley:"]
    tell = observers(tmp_path / "run", 1)
    tell(made(1, [counts(1, "pre", name, 4) for name in names]))
    tell(None)
    out = capsys.readouterr().out
    assert all(name in out for name in names)


@pytest.mark.parametrize(("scores", "why"), [("post", "nobody had labels"), ("", "`scores` is empty")])
def test_no_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float], scores: str, why: str
) -> None:
    tell = observers(tmp_path / "run", 1, scores)
    tell(made(1, []))
    tell(None)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert f"no scores: {why}\n" in out
    assert "average" not in out


def test_a_real_run_ends_with_its_table(run_local: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    run = run_local(rounds=2)
    cells = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.split()}
    expected = [f"{accuracy['micro']:.2f}" for accuracy in run.summary["accuracy"].values()]
    assert cells["average"] == expected
    assert len(expected) == 5


def test_where_two_heads_predict_columns_are_named_by_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path / "run")
    screen = Terminal(directory)
    large = Counts(1, "client-01", "A-original-internal", "tta", np.array([92, 0]), np.array([92, 0]))
    scored = [counts(1, score, "A-original-internal", 4) for score in ("source", "local", "tta")]
    for observer in (directory, screen):
        observer.on_start(RunConfig(task="tgfl", head="fedthe"), ("client-00", "client-01"), 1)
        observer.on_round(made(1, [*scored, large]))
        observer.on_round(made(2, [], closing=True))
    screen.on_end()
    out = capsys.readouterr().out
    assert "tta 75.0%" in out
    assert "accuracy in %, means over the clients\n" in out
    assert "75.00" in next(line for line in out.splitlines() if "average" in line)
    header = next(line for line in out.splitlines() if "test set" in line)
    assert header.split() == ["test", "set", "global", "head", "personal", "head", "fedthe"]
