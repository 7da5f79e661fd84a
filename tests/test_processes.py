"""How processes end; what a run does when it is told to is in e2e/test_interrupt.py."""

import subprocess
import sys
import time

import pytest

from fedtta_flwr.processes import given_up_after

#: as Flower does: a signal is answered with a last word, by the main thread
WORK = """
import ctypes, signal, sys, time
from fedtta_flwr import processes

processes.GENTLY_SECONDS = 1.0
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("goodbye") or 7))
with processes.given_up_after(0.2, "the answer"):
    {hang}
"""


@pytest.mark.parametrize(
    ("hang", "words"),
    [
        ("time.sleep(100)", "goodbye\n"),
        ("ctypes.CDLL(None).sleep(100)", "goodbye\n"),  # which a signal cuts short
        ("ctypes.PyDLL(None).sleep(100)", ""),  # which holds the GIL: no thread of Python's runs
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)", ""),
    ],
)
@pytest.mark.parametrize("log", ["pipe", "full"])
def test_what_hangs_is_given_up_gently_if_that_can_be(hang: str, words: str, log: str) -> None:
    began = time.monotonic()
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", WORK.format(hang=hang)],
            stdout=subprocess.PIPE, stderr=full if log == "full" else subprocess.PIPE, timeout=60,
        )  # fmt: skip
    assert time.monotonic() - began < 50
    assert done.returncode == (7 if words else 1)
    assert done.stdout.decode() == words
    if log == "pipe":
        assert 'File "<string>", line 8 in <module>' in done.stderr.decode()
        threads = "PyDLL" not in hang
        assert (
            done.stderr.decode().startswith("the answer has taken 0.2 s and is given up; where it hangs:\n") == threads
        )


def test_what_is_done_in_time_is_not_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    """However long that is, and whether it ends well or not."""
    for seconds in (60.0, 1e300, float("inf")):
        with pytest.raises(ZeroDivisionError), given_up_after(seconds, "the answer"):
            raise ZeroDivisionError
        with given_up_after(seconds, "the answer"):
            pass
    assert capfd.readouterr().err == ""
