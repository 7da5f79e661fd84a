"""How processes end: as a command, with their parent, and when they are told to."""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from fedtta_flwr.errors import FedTTAError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
GENTLY_SECONDS = 15.0  # for a process that gives itself up, to say so to others
NEVER = 1e9  # seconds: more than waits can take


def is_of_a_signal(error: BaseException) -> bool:
    """Return whether a process ends because it was told to (`as_command`), whoever's code it was in."""
    return isinstance(error, SystemExit) and error.code in {128 + number for number in signal.valid_signals()}


def as_command(work: Callable[[], object]) -> None:
    """Do the work of this process; what the user can put right ends in one line and status 2."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by who called (`>&-`): no file shall come to stand in its place
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a table's lines are in few encodings: no reason for a run to fail
    # As Ctrl-C does, a terminated run leaves a valid directory and no process behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        work()
    except FedTTAError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except PermissionError as error:
        if error.filename is None:
            raise
        print(
            f"error: {error.filename}: this user may not read it, or enter its folder; see to its rights",
            file=sys.stderr,
        )
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as end:
        code = 130 if isinstance(end, KeyboardInterrupt) else end.code  # typer has made one of the other
        if code in (130, 128 + signal.SIGTERM):
            print("interrupted", file=sys.stderr)
        sys.exit(code)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have this process get a signal when its parent ends, even if that is killed; a `preexec_fn`. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def given_up_after(seconds: float, what: str) -> Iterator[None]:
    """End this process, gently if that can be, where what is done meanwhile takes longer; say where it hangs.

    That may be no Python (a driver, a mount), so that no exception would reach it, nor, holding the GIL, any thread.
    """
    done, limit = threading.Event(), min(seconds, NEVER)

    def watch() -> None:
        if done.wait(limit):
            return
        with suppress(OSError):  # a full disk; and print would wait for a main thread that hangs while it prints
            os.write(2, f"{what} has taken {seconds:g} s and is given up; where it hangs:\n".encode())
        faulthandler.dump_traceback(2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    faulthandler.dump_traceback_later(limit + GENTLY_SECONDS, exit=True, file=2)
    try:
        yield
    finally:
        done.set()
        faulthandler.cancel_dump_traceback_later()


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


def marked(variable: str, value: object) -> list[int]:
    """Return the processes that were started, at whatever remove, with this in their environment. Linux only."""
    mark, found = os.fsencode(f"{variable}={value}"), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def await_end(variable: str, value: object, seconds: float) -> None:
    """Wait until no process has this in its environment; who still runs after so many seconds is killed."""
    deadline = time.monotonic() + seconds
    while (left := marked(variable, value)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
