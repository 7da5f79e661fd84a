"""Ctrl-C, or a polite kill, in the middle of a run."""

import json
import signal
import subprocess
import tempfile
import time

import pytest

from fedtta_flwr.processes import marked

CHECKPOINTS = "num-clients=4 spatial-heterogeneity=0.5 checkpoint-every=1"
LONG = "num-clients=2 spatial-heterogeneity=1 slots-per-corruption=700 batch-size=1 scores='post'"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_a_valid_directory_that_says_so(environment, tmp_path, number, status):
    output = tmp_path / "run"
    process = subprocess.Popen(
        ["fedtta", "run", "--output", str(output), "--run-config", CHECKPOINTS],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs in the background ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not (output / "rounds.jsonl").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == status
    assert "Traceback" not in errors
    assert errors.endswith("interrupted\n")
    assert f"to go on, `fedtta run --resume {output}`\n" in errors
    summary = json.loads((output / "summary.json").read_text())
    rounds = [json.loads(line) for line in (output / "rounds.jsonl").open()]
    assert summary["finished"] is False
    assert 1 <= len(rounds) < 60
    assert summary["rounds"] == len(rounds)
    assert json.loads((output / "config.json").read_text())["config"]["num-clients"] == 4


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_of_an_interrupted_simulation_nothing_goes_on(environment, tmp_path, number, status):
    """Not even of a killed one, whose SuperLink, SuperExec, simulation and Ray end one after the other."""
    output, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        ["fedtta", "run", "--engine", "flower", "--output", str(output), "--run-config", LONG],
        cwd=tmp_path,
        # Ray's own temporary folder holds sockets, whose paths must be short.
        env=environment | {"TMPDIR": str(temporary), "RAY_TMPDIR": tempfile.gettempdir()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if number == signal.SIGKILL else subprocess.PIPE,  # others have it, too
        text=True,
    )
    deadline = time.monotonic() + 180
    while not (output / "rounds.jsonl").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    (home,) = temporary.glob("fedtta-*")
    assert len(marked("FLWR_HOME", home)) > 4  # SuperLink, SuperExec, simulation, and those of Ray
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        deadline = time.monotonic() + 120  # Ray's agents may take a minute to see that theirs has gone
        while marked("FLWR_HOME", home) and time.monotonic() < deadline:
            time.sleep(0.1)

    assert process.returncode == status
    assert "Traceback" not in (errors or "")
    assert marked("FLWR_HOME", home) == []
    assert home.exists() == (number == signal.SIGKILL)
    assert json.loads((output / "summary.json").read_text())["finished"] is False
    assert [json.loads(line)["round"] for line in (output / "rounds.jsonl").open()][:2] == [1, 2]
    assert json.loads((output / "config.json").read_text())["config"]["num-clients"] == 2
