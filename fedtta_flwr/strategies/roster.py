"""Who is there: which node hosts which client, and how long the clients' streams are."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import WARNING

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import FederationError
from fedtta_flwr.records import HELLO, code_fingerprint, error_of
from fedtta_flwr.strategies.exchange import FIRST_WAIT, LONGEST_WAIT

#: Flower's errors for a node that was lost on the way; while there is time it may come back
GONE = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)


@dataclass
class Roster:
    """The clients of a run by name; a node id is only today's address.

    Attributes
    ----------
    node_of : dict of str to int
        Client name -> the node that hosts it.
    slots : dict of str to int
        Client name -> length of its stream.
    classes : int
        Number of classes K.
    model : str
        Fingerprint of the source model.
    others : set of str
        Clients that nodes host but that are not of this run.
    """

    node_of: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    classes: int = 0
    model: str = ""
    others: set[str] = field(default_factory=set)

    def nodes(self) -> dict[int, list[str]]:
        """Return the clients, sorted, of each node, in the order of their first client."""
        hosted: dict[int, list[str]] = {}
        for client in sorted(self.node_of):
            hosted.setdefault(self.node_of[client], []).append(client)
        return hosted


def gather(grid: Grid, config: RunConfig) -> Roster:
    """Ask every node whom it hosts, until all clients of the run are there.

    Raises
    ------
    FederationError
        A node cannot serve the run, runs other code or another config than the server, hosts a client that another
        node hosts too, or clients are still missing after ``join-timeout`` seconds.
    """
    roster, asked, waiting = Roster(), set[int](), dict[str, int]()
    expected = config.client_names()
    deadline, wait = time.monotonic() + config.join_timeout, FIRST_WAIT
    while True:
        # A node that never answers must not keep those from joining that come after it: ask and listen at once.
        new = sorted(set(grid.get_node_ids()) - asked)
        asked.update(new)
        if new:
            messages = [Message(RecordDict(), node_id, HELLO, group_id="0") for node_id in new]
            sent = zip(grid.push_messages(messages), new, strict=True)
            waiting.update({message_id: node_id for message_id, node_id in sent if message_id})
        replies = list(grid.pull_messages(sorted(waiting))) if waiting else []
        for reply in replies:
            node_id = waiting.pop(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.error.code in GONE:
                log(WARNING, "node %d did not answer (%s); it is asked again", node_id, error_of(reply))
                asked.discard(node_id)
            else:
                _enter(roster, reply, config)
        missing = [client for client in expected if client not in roster.node_of]
        if not missing:
            return roster
        if time.monotonic() > deadline:
            raise FederationError(
                f"{len(missing)} of {len(expected)} clients did not join within {config.join_timeout:g} s "
                f"({len(asked)} nodes asked, {len(waiting)} of them silent): {_few(missing)}; start them, or set "
                f"num-clients or join-timeout"
                + (f"; present, but not of this run: {_few(sorted(roster.others))}" if roster.others else "")
            )
        wait = FIRST_WAIT if replies else min(2 * wait, LONGEST_WAIT)
        time.sleep(wait)


def _enter(roster: Roster, reply: Message, config: RunConfig) -> None:
    if (error := error_of(reply)) is not None:
        raise FederationError(error)
    hello = reply.content.config_records["hello"]
    node = reply.metadata.src_node_id
    clients: Sequence[str] = hello["clients"]  # type: ignore[assignment]
    others: Sequence[str] = hello["others"]  # type: ignore[assignment]
    if others:
        log(WARNING, "node %d hosts %s, not of this run", node, _few(others))
        roster.others.update(others)
    if not clients:
        return
    if hello["code"] != code_fingerprint():
        raise FederationError(
            f"node {node} runs other code than the server (fedtta_flwr {hello['code']!s}, expected "
            f"{code_fingerprint()}): install the same version there; in a simulation, stop the local SuperLink that "
            f"another checkout started (pkill -f flower-superlink)"
        )
    if hello["config"] != config.fingerprint():
        raise FederationError(
            f"node {node} has another run config than the server ({hello['config']!s}, expected {config.fingerprint()})"
        )
    roster.classes = roster.classes or int(hello["classes"])  # type: ignore[arg-type]
    roster.model = roster.model or str(hello["model"])
    if hello["model"] != roster.model:
        raise FederationError(
            f"node {node} has another source model than the others ({hello['model']!s}, expected {roster.model}): "
            f"give every node the same checkpoint"
        )
    slots: Sequence[int] = hello["slots"]  # type: ignore[assignment]
    for client, length in zip(clients, slots, strict=True):
        if client in roster.node_of:
            raise FederationError(
                f"{client} is hosted by two nodes, {roster.node_of[client]} and {node}: give each its own client names"
            )
        roster.node_of[client] = node
        roster.slots[client] = length


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
