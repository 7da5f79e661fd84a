"""Ctrl-C, or a polite kill, in the middle of a run."""

import json
import signal
import subprocess
import time

import pytest


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_a_valid_directory_that_says_so(environment, tmp_path, number, status):
    output = tmp_path / "run"
    process = subprocess.Popen(
        ["fedtta", "run", "--output", str(output), "--run-config", "num-clients=4 spatial-heterogeneity=0.5"],
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
    summary = json.loads((output / "summary.json").read_text())
    rounds = [json.loads(line) for line in (output / "rounds.jsonl").open()]
    assert summary["finished"] is False
    assert 1 <= len(rounds) < 60
    assert summary["rounds"] == len(rounds)
    assert json.loads((output / "config.json").read_text())["config"]["num-clients"] == 4
