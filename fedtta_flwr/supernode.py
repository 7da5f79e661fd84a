"""Flower's SuperNode as a module to run, which ends when it is no device any more, and knows when it is cut off.

An error of the server, or of its own, can end its heartbeats or its work while the process goes on: nobody would start
it again. So can the end of what starts its apps (`superexec`), or of one in mid visit, whose answer it would wait for
for good. And a connection that a new address, or a router, has silently ended would be found out after 16 minutes.
"""

import os
import signal
import sys
import threading
from importlib import import_module
from typing import Any

import grpc
from flwr.common.constant import SubStatus
from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR, InMemoryNodeState

from fedtta_flwr.installed import forget_copies
from fedtta_flwr.superexec import end_without

#: a connection that carries no answer to a ping is opened anew
KEEPALIVE = [("grpc.keepalive_time_ms", 60_000), ("grpc.keepalive_timeout_ms", 20_000)]


def end(about: threading.ExceptHookArgs) -> None:
    """End the process, gently, when one of its threads has failed."""
    threading.__excepthook__(about)
    os.kill(os.getpid(), signal.SIGTERM)


class Answering(InMemoryNodeState):
    """Flower answers for an AgentApp that has failed, not for a ClientApp; the node waits until it is answered."""

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """Finish a task; one that has failed without a reply gets one that says so."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status == SubStatus.FAILED:
            runs = {task.run_id for task in self.get_tasks(task_ids=[task_id])}
            self._store_error_replies(runs, CLIENT_APP_CRASHED_ERROR)
        return finished


def main() -> None:
    """Run the SuperNode; returns only by SystemExit."""
    forget_copies()
    threading.excepthook = end
    end_without("flwr.supernode.start_client_internal")
    secure = grpc.secure_channel

    def alive(target: str, credentials: Any, options: Any = (), **more: Any) -> grpc.Channel:
        return secure(target, credentials, [*options, *KEEPALIVE], **more)

    grpc.secure_channel = alive
    vars(import_module("flwr.supernode.nodestate.nodestate_factory"))[InMemoryNodeState.__name__] = Answering
    sys.argv[0] = "flower-supernode"
    flower_supernode()
    flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, "the SuperLink has answered with an error, or not at all")


if __name__ == "__main__":
    main()
