"""Processes that must not outlive the one that started them."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Have this process terminated when its parent ends, even if that is killed; a `preexec_fn`. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
