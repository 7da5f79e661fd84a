"""Flower's SuperNode as a module to run, which ends when it is no device any more.

An error of the server, or of its own, can end its heartbeats or its work while the process goes on: nobody would start
it again.
"""

import os
import signal
import sys
import threading

from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.supernode.cli.flower_supernode import flower_supernode

from fedtta_flwr.installed import forget_copies


def end(about: threading.ExceptHookArgs) -> None:
    """End the process, gently, when one of its threads has failed."""
    threading.__excepthook__(about)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the SuperNode; returns only by SystemExit."""
    forget_copies()
    threading.excepthook = end
    sys.argv[0] = "flower-supernode"
    flower_supernode()
    flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, "the SuperLink has answered with an error, or not at all")


if __name__ == "__main__":
    main()
