"""How processes end: as a command, with their parent, and when they are told to."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from fedtta_flwr.errors import FedTTAError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def as_command(work: Callable[[], object]) -> None:
    """Do the work of this process; what the user can put right ends in one line and status 2."""
    # As Ctrl-C does, a terminated run leaves a valid directory and no process behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        work()
    except FedTTAError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def end_with_parent() -> None:
    """Have this process terminated when its parent ends, even if that is killed; a `preexec_fn`. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def stop(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Have processes end, all at once and gently; who still runs after so many seconds is killed."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
