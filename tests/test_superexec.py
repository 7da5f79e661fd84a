"""A process whose SuperExec has ended does not go on without it."""

import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import sys, time
from fedtta_flwr import superexec
superexec.ENDING_SECONDS = 0.2
superexec.end_without("a_parent")
import a_parent
a_parent.main()
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("seconds", "status"), [("60", -15), ("0", 0)])
def test_it_ends_gently_unless_it_is_ending_itself(tmp_path: Path, seconds: str, status: int) -> None:
    (tmp_path / "a_parent.py").write_text("import subprocess\n\ndef main():\n    subprocess.Popen(['true'])\n")
    command = [sys.executable, "-c", PARENT, seconds]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=50)
    assert done.returncode == status
    assert (b"flower-superexec has ended" in done.stderr) == (status != 0)
