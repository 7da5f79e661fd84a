"""Processes that share work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedtta_flwr.data.parallel import worker_pool
from fedtta_flwr.errors import DataError
from fedtta_flwr.processes import marked

MARK = "FEDTTA_TEST_PARALLEL"
SCRIPT = """
import time
from fedtta_flwr.data.parallel import worker_pool

if __name__ == "__main__":
    with worker_pool(time.sleep, 2) as run:
        for _ in run([0, 0, 600, 600]):
            print("one is done", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a process that its parent was killed")
def test_the_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SCRIPT)
    env = os.environ | {MARK: str(tmp_path)}
    process = subprocess.Popen([sys.executable, tmp_path / "work.py"], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == b"one is done\n"
        assert len(marked(MARK, tmp_path)) >= 3
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while marked(MARK, tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(MARK, tmp_path) == []


def end_all(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_one_line() -> None:
    with pytest.raises(DataError, match="was killed, probably for want of memory"), worker_pool(end_all, 2) as run:
        list(run([1, 2]))
