"""`LocalGrid`: Flower's Grid, with the ClientApp in this process. No Ray, no sockets, no polling."""

import traceback
from collections.abc import Iterable, Mapping
from logging import ERROR
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedtta_flwr.memory import ONE_PROCESS

SERVER_NODE_ID = 1


class LocalGrid(Grid):
    """Runs every message through the ClientApp as soon as it is pushed, in order.

    The apps see what they see in a simulation: messages, records, a context of its own for each node. It is also
    the best way to debug them.

    Parameters
    ----------
    client_app : ClientApp
        The app that every node runs.
    run_config : mapping
        The run config, flat.
    num_supernodes : int
        Number of nodes; node p gets ``partition-id = p``.
    """

    def __init__(
        self,
        client_app: ClientApp,
        run_config: Mapping[str, str | int | float | bool],
        num_supernodes: int = 1,
    ) -> None:
        self._app = client_app
        self._run_id = uuid4().int >> 65
        # A message may be made only by a Flower task; Flower offers no public way to be one outside its processes.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = (
            self._run_id,
            SERVER_NODE_ID,
            0,
        )
        self._contexts = {
            node_id: Context(
                run_id=self._run_id,
                node_id=node_id,
                node_config={"partition-id": part, "num-partitions": num_supernodes, ONE_PROCESS: True},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for part, node_id in enumerate(range(2, 2 + num_supernodes))
        }
        self._replies: dict[str, Message] = {}

    def run_server(self, server_app: ServerApp) -> None:
        """Run a ServerApp on this grid to its end."""
        context = Context(
            run_id=self._run_id,
            node_id=SERVER_NODE_ID,
            node_config={},
            state=RecordDict(),
            run_config=dict(next(iter(self._contexts.values())).run_config),
        )
        server_app(self, context)

    def set_run(self, run: Run) -> None:
        """Do nothing: the run is this process."""

    @property
    def run(self) -> Run:
        """Information on the run."""
        raise NotImplementedError("a LocalGrid has no record of its run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message; as good as calling ``Message`` itself."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes, in the order of their partitions."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have every message answered; return the ids by which the replies can be pulled."""
        ids = []
        for message in messages:
            message_id = uuid4().hex
            message.metadata.__dict__["_message_id"] = message_id
            self._replies[message_id] = self._answer(message)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each once."""
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages and pull their replies."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        context = self._contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except Exception as error:  # as Flower does: what a client raises becomes an error reply
            log(ERROR, traceback.format_exc())
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
