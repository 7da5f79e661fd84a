"""Flower's SuperExec, which starts the apps: whose child it is ends with it.

Without it a SuperNode takes messages that nobody answers, and a SuperLink runs that nobody starts, and both look well.
Whoever started them starts them again.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

ENDING_SECONDS = 15.0  # in which a parent that is ending, and takes it along, has ended


def end_without(module: str) -> None:
    """Have a process end, gently, when the SuperExec has ended that this module of Flower's starts."""
    vars(import_module(module))["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": _Watched})


class _Watched(subprocess.Popen[bytes]):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self.wait()
        time.sleep(ENDING_SECONDS)
        print("flower-superexec has ended, without which no app starts: so does this", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
