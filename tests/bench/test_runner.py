"""Benchmarks with real runs: what is finished stays, what fails is reported, what is stopped goes on."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr.bench import runner
from fedtta_flwr.bench.runner import (
    FILE,
    Running,
    _goes_on,
    cell_folder,
    open_bench,
)
from fedtta_flwr.bench.spec import Cell, cells, make_spec, read_spec
from fedtta_flwr.config import differing_key
from fedtta_flwr.errors import ConfigError, StorageError
from fedtta_flwr.files import is_finished, locked, read_tensors
from fedtta_flwr.records import code_fingerprint
from fedtta_flwr.strategies.checkpoint import FILE as CHECKPOINT
from tests.conftest import ROOT, TINY

FEDTTA = [sys.executable, "-c", "from fedtta_flwr.cli import main; main()"]
SPEC = """
name = "two-and-a-broken-one"
title = "Two and a broken one"
rows = ["strategy"]
columns = []
seeds = [0]
[config]
{config}
[axes.strategy]
Local = {{ strategy = "local" }}
Broken = {{ strategy = "fedavg", checkpoint = "/no/such/file.safetensors" }}
FedAvg = {{ strategy = "fedavg" }}
[quick]
slots-per-corruption = 1
"""


def written_spec(folder: Path, **changes: Any) -> Path:
    path = folder / "spec.toml"
    config = "\n".join(f"{key} = {json.dumps(value)}" for key, value in (TINY | changes).items())
    path.write_text(SPEC.format(config=config))
    return path


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*FEDTTA, "bench", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("bench")
    spec = written_spec(folder)
    return spec, folder / "out", bench(spec, "--quick", "--output", folder / "out", "--workers", "2")


def test_one_fails_and_the_rest_goes_on(made: tuple[Path, Path, subprocess.CompletedProcess[str]]) -> None:
    _, folder, done = made
    assert done.returncode == 2
    assert [is_finished(cell_folder(folder, f"{name}.seed0")) for name in ("Local", "Broken", "FedAvg")] == [
        True,
        False,
        True,
    ]
    (line,) = [line for line in done.stdout.splitlines() if "Broken" in line]
    assert "FAILED" in line
    assert "/no/such/file.safetensors" in line
    assert done.stderr.strip().startswith("error: 1 runs failed, e.g. Broken.seed0")
    assert "2 of 3 runs finished" in done.stdout
    about = json.loads((folder / FILE).read_text())
    assert about["quick"] is True
    assert [cell["labels"] for cell in about["cells"]] == [{"strategy": n} for n in ("Local", "Broken", "FedAvg")]
    ran = json.loads((cell_folder(folder, "FedAvg.seed0") / "config.json").read_text())
    assert ran["config"]["slots-per-corruption"] == 1
    assert not {CHECKPOINT, "states"} & {path.name for path in cell_folder(folder, "FedAvg.seed0").iterdir()}


def test_nothing_starts_where_no_run_could_begin(tmp_path: Path) -> None:
    done = bench(written_spec(tmp_path, checkpoint="/nowhere.safetensors"), "--output", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no run can begin: /nowhere.safetensors: ")
    assert "FAILED" not in done.stdout
    assert not (tmp_path / "out" / "cells").exists()


def test_it_keeps_what_is_finished(made: tuple[Path, Path, subprocess.CompletedProcess[str]]) -> None:
    spec, folder, _ = made
    before = {p: p.stat().st_mtime_ns for p in cell_folder(folder, "FedAvg.seed0").iterdir()}
    done = bench(spec, "--quick", "--output", folder)
    assert "1 runs, " in done.stdout
    assert "2 finished before" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_another_config_does_not_mix_with_it(made: tuple[Path, Path, subprocess.CompletedProcess[str]]) -> None:
    spec, folder, _ = made
    done = bench(spec, "--output", folder)  # not --quick
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "slots-per-corruption = 1, now it is 2; name another folder" in line


def test_nor_does_another_config_throw_away_what_is_half_done(tmp_path: Path) -> None:
    spec, folder = written_spec(tmp_path), tmp_path / "out"
    only = ["--only", "strategy=FedAvg"]
    assert bench(spec, "--output", folder, *only).returncode == 0
    own = cell_folder(folder, "FedAvg.seed0")
    (own / "summary.json").unlink()  # as if it had been stopped
    (own / CHECKPOINT).write_bytes(b"of an hour")
    done = bench(spec, "--output", folder, "--run-config", "batch-size=3")
    assert done.returncode == 2
    assert "FedAvg.seed0 was begun with batch-size = 5, now it is 3; name another folder" in done.stderr
    assert (own / CHECKPOINT).read_bytes() == b"of an hour"
    (own / CHECKPOINT).unlink()  # nothing is lost now
    assert bench(spec, "--output", folder, "--run-config", "batch-size=3", *only).returncode == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"notes.txt": "mine"}, "holds files already"),
        ({FILE: json.dumps({"spec": {"name": "other"}})}, "holds the benchmark other, not one"),
    ],
)
def test_a_folder_with_something_else(tmp_path: Path, content: dict[str, str], words: str) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    table = {"name": "one", "title": "One", "rows": ["a"], "columns": [], "seeds": [0], "axes": {"a": {"b": {}}}}
    spec = make_spec(table, "one.toml")
    with pytest.raises(ConfigError, match=words):
        open_bench(tmp_path, spec, table, cells(spec, {}), {}, quick=False)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == content


def test_a_damaged_table_of_contents_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    table = {"name": "one", "title": "One", "rows": ["a"], "columns": [], "seeds": [0], "axes": {"a": {"b": {}}}}
    spec = make_spec(table, "one.toml")
    left, _ = open_bench(tmp_path, spec, table, cells(spec, {}), {}, quick=False)
    assert [cell.id for cell in left] == [one["id"] for one in json.loads((tmp_path / FILE).read_text())["cells"]]


def test_a_disk_that_is_full_at_the_beginning_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runner, "write_json", full)
    table = {"name": "one", "title": "One", "rows": ["a"], "columns": [], "seeds": [0], "axes": {"a": {"b": {}}}}
    spec = make_spec(table, "one.toml")
    with pytest.raises(StorageError, match=r"^--output .*: cannot be written \(No space left on device\); make room"):
        open_bench(tmp_path / "o", spec, table, cells(spec, {}), {}, quick=False)


def test_keys_that_come_and_go_make_no_difference() -> None:
    ran = {"seed": 3, "batch-size": 10, "output-dir": "/a"}
    assert differing_key(ran | {"output-dir": "/b"}, ran) is None
    assert differing_key(ran | {"task": "ftta", "gone-since": 32}, ran) is None  # newer than the run; older than this
    assert differing_key(ran | {"task": "tgfl"}, ran) == "task"
    assert differing_key(ran | {"batch-size": 11}, ran) == "batch-size"


def test_two_benchmarks_at_a_time_are_kept_apart(tmp_path: Path) -> None:
    spec = written_spec(tmp_path)
    with locked(tmp_path / "out", "--output out", "benchmark"):
        done = bench(spec, "--quick", "--output", tmp_path / "out")
        assert done.returncode == 2
        assert "another benchmark writes there" in done.stderr
        assert list((tmp_path / "out").iterdir()) == []
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    done = bench(spec, "--quick", "--output", tmp_path / "file")
    assert done.stderr.startswith(f"error: --output {tmp_path / 'file'}: cannot be made: ")


def test_a_cell_that_is_still_ending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a SIGKILL of the benchmark, whose cells end a little later: one may even have finished by then."""
    path, folder = written_spec(tmp_path), tmp_path / "out"
    parsed, table = read_spec(path)
    of, own, holds = cells(parsed, {}), cell_folder(folder, "Local.seed0"), threading.Event()

    def ending() -> None:
        with locked(own, "own", "run"):
            (own / "config.json").write_text(json.dumps({"config": of[0].config, "code": code_fingerprint()}))
            holds.set()
            time.sleep(1.5)
            (own / "summary.json").write_text(json.dumps({"finished": True}))

    folder.mkdir()
    (folder / FILE).write_text(json.dumps({"spec": {"name": parsed.name}}))
    with monkeypatch.context() as patch, locked(own, "own", "run"):
        patch.setattr(runner, "STOP_SECONDS", 0.0)
        with pytest.raises(ConfigError, match=r"Local.seed0: another run writes there; wait for its end"):
            open_bench(folder, parsed, table, of, {}, quick=False)
    thread = threading.Thread(target=ending)
    thread.start()
    assert holds.wait(60)
    left, _ = open_bench(folder, parsed, table, of, {}, quick=False)
    thread.join()
    assert [cell.id for cell in left] == ["Broken.seed0", "FedAvg.seed0"]


def test_what_lies_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')")
    command = [Path(sys.executable).with_name("fedtta"), "bench", written_spec(tmp_path), "--quick"]
    done = subprocess.run(
        [*command, "--only", "strategy=Local", "--output", "out"], cwd=tmp_path, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_finished(cell_folder(tmp_path / "out", "Local.seed0"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_on_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    command = [*FEDTTA, "bench", written_spec(tmp_path), "--quick", "--only", "strategy=Local", "--output"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, tmp_path / "out"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert is_finished(cell_folder(tmp_path / "out", "Local.seed0"))
    assert "Traceback" not in done.stderr
    assert done.stderr.count("standard output cannot be written (No space left on device)") == 1


def test_finished_runs_of_other_code_are_named(made: tuple[Path, Path, subprocess.CompletedProcess[str]]) -> None:
    _, folder, _ = made
    about = json.loads((folder / FILE).read_text())
    spec = make_spec(about["spec"], "spec.toml")
    own = [Cell(c["id"], c["labels"], c["seed"], c["config"]) for c in about["cells"]]
    path = cell_folder(folder, "Local.seed0") / "config.json"
    ran = path.read_text()
    old = json.loads(ran) | {"code": "old"}
    del old["config"]["task"]  # a key that is newer than that code
    path.write_text(json.dumps(old))
    try:
        left, stale = open_bench(folder, spec, about["spec"], own, {}, quick=True)
    finally:
        path.write_text(ran)
    assert [cell.id for cell in left] == ["Broken.seed0"]
    assert stale == ["Local.seed0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_in_mid_run_nothing_goes_on_and_nothing_is_lost(tmp_path: Path, number: signal.Signals) -> None:
    spec = written_spec(tmp_path, **{"slots-per-corruption": 400, "num-clients": 8, "batch-size": 1})
    folder = tmp_path / "out"
    command = [*FEDTTA, "bench", str(spec), "--output", str(folder), "--only", "strategy=Local"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    )
    lines = cell_folder(folder, "Local.seed0") / "rounds.jsonl"
    deadline = time.monotonic() + 120
    while not lines.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert lines.exists(), process.communicate()
    process.send_signal(number)
    process.wait(timeout=60)
    while children_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not children_of(folder)
    assert json.loads((lines.parent / "summary.json").read_text())["finished"] is False


def test_a_killed_cell_goes_on_from_its_checkpoint_to_the_same_result(tmp_path: Path) -> None:
    changes = {"adapter": "tent", "slots-per-corruption": 20, "batch-size": 1, "checkpoint-every": 4, "scores": "post"}
    spec, folder = written_spec(tmp_path, **changes), tmp_path / "out"
    own = cell_folder(folder, "FedAvg.seed0")
    one = ["--only", "strategy=FedAvg", "--workers", "1", "--output"]
    process = subprocess.Popen([*FEDTTA, "bench", spec, *one, folder], cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (own / CHECKPOINT).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    (cell,) = children_of(folder)
    os.kill(cell, signal.SIGKILL)
    assert process.wait(timeout=60) == 2
    done = read_tensors(own / CHECKPOINT)[1]["round"]
    assert done % 4 == 0
    assert bench(spec, *one, folder).returncode == 0
    assert bench(spec, *one, tmp_path / "whole").returncode == 0
    whole = cell_folder(tmp_path / "whole", "FedAvg.seed0")
    for name, keys in (
        ("summary.json", ("accuracy", "rounds", "bytes", "finished")),
        ("config.json", ("code", "rounds")),
    ):
        found, expected = (json.loads((path / name).read_text()) for path in (own, whole))
        assert {key: found[key] for key in keys} == {key: expected[key] for key in keys}
    assert len(json.loads((own / "config.json").read_text())["resumed"]) == 1
    assert len((own / "rounds.jsonl").read_text().splitlines()) == expected["rounds"]
    assert sorted(path.name for path in own.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert {CHECKPOINT, "states"} & {path.name for path in own.iterdir()} == {CHECKPOINT}  # it was asked for


def test_a_checkpoint_of_other_code_or_config_is_not_used(tmp_path: Path) -> None:
    cell = Cell("one", {}, 0, {"seed": 0, "batch-size": 4})
    (tmp_path / CHECKPOINT).write_bytes(b"")
    assert not _goes_on(tmp_path, cell)
    for code, size, expected in ((code_fingerprint(), 4, True), ("other", 4, False), (code_fingerprint(), 5, False)):
        config = {"seed": 0, "batch-size": size, "checkpoint-every": 25, "state-dir": "/somewhere"}
        (tmp_path / "config.json").write_text(json.dumps({"code": code, "config": config}))
        assert _goes_on(tmp_path, cell) is expected
    (tmp_path / CHECKPOINT).unlink()
    assert not _goes_on(tmp_path, cell)


def test_rounds_are_counted_also_where_lines_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"rounds": 9}))
    lines = tmp_path / "rounds.jsonl"
    lines.write_text("{}\n" * 5 + "{")
    one = Running(Cell("one", {}, 0, {}), subprocess.Popen(["true"]), tmp_path)
    for text, expected in (("{}\n" * 5 + "{", 5), ("{}\n" * 3, 3), ("{}\n" * 7, 7)):
        lines.write_text(text)
        one.look()
        assert (one.done, one.rounds) == (expected, 9)


def children_of(folder: Path) -> list[int]:
    """Return the processes that run a cell of this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"fedtta_flwr.bench.runner" in words and os.fsencode(folder) in words:
            found.append(int(entry.name))
    return found


def test_quick_of_a_spec_that_says_nothing_of_it_is_not_the_whole_work(tmp_path: Path) -> None:
    spec = written_spec(tmp_path)
    spec.write_text(spec.read_text().partition("[quick]")[0])
    for words in ((), ("--dry-run",)):
        done = bench(spec, "--quick", "--output", tmp_path / "out", *words)
        assert done.returncode == 2
        assert done.stderr == (
            f"error: --quick: {spec} says nothing under [quick], so all would be run; add it, or leave --quick out\n"
        )
    assert not (tmp_path / "out").exists()
    assert bench(spec, "--dry-run").returncode == 0


def test_only_and_dry_run(tmp_path: Path) -> None:
    spec = written_spec(tmp_path)
    done = bench(spec, "--only", "strategy=FedAvg", "--only", "seed=0", "--dry-run")
    assert done.stdout.split() == ["FedAvg.seed0", "1", "runs"]
    both = bench(spec, "--only", "strategy=FedAvg", "--only", "strategy=Local", "--only", "seed=0", "--dry-run")
    assert both.stdout.split() == ["Local.seed0", "FedAvg.seed0", "2", "runs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.toml"]
    assert "allowed: strategy=Local, strategy=" in bench(spec, "--only", "strategy=Other").stderr
    assert "allowed: strategy=..., seed=..." in bench(spec, "--only", "adapter=tent").stderr
