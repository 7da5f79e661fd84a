"""Files that cannot be written for a while."""

import errno
import os
from pathlib import Path

import pytest

from fedtta_flwr.files import Outage


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "(No space left on device): the run goes on; make room"),
        (errno.EPIPE, "(Broken pipe): the run goes on; who read it has gone, results are kept"),
    ],
)
def test_an_outage_says_once_why_it_is(number: int, told: str, warned: list[str]) -> None:
    outage = Outage(Path("standard output"))
    for _ in range(2):
        with outage.endured():
            raise OSError(number, os.strerror(number))
    assert warned == [f"standard output cannot be written {told}"]
