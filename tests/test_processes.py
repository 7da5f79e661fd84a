"""How processes end; what a run does when it is told to is in e2e/test_interrupt.py."""

import signal
import subprocess
import sys

import pytest

from fedtta_flwr.processes import given_up_after

#: as Flower does: a signal is answered with a last word, by the main thread
WORK = """
import signal, sys, time
from fedtta_flwr import processes

processes.GENTLY_SECONDS = 1.0
signal.signal(signal.SIGTERM, {handler})
with processes.given_up_after(0.2, "the answer"):
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        ("lambda *_: sys.exit(print('goodbye') or 7)", "goodbye\n"),
        ("signal.SIG_IGN", ""),  # or it hangs where no signal is heard
    ],
)
def test_what_hangs_is_given_up_gently_if_that_can_be(handler: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORK.format(handler=handler)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (7 if words else 128 + signal.SIGTERM)
    assert done.stdout == words
    assert done.stderr == "the answer has taken 0.2 s and is given up\n"


def test_what_is_done_in_time_is_not_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    """However long that is, and whether it ends well or not."""
    for seconds in (60.0, 1e300, float("inf")):
        with pytest.raises(ZeroDivisionError), given_up_after(seconds, "the answer"):
            raise ZeroDivisionError
        with given_up_after(seconds, "the answer"):
            pass
    assert capfd.readouterr().err == ""
