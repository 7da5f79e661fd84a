"""Who is there: which node hosts which client, and how long the clients' streams are."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Annotated, Self

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import FederationError, first_fault
from fedtta_flwr.records import HELLO, code_fingerprint, error_of, printable
from fedtta_flwr.strategies.exchange import FIRST_WAIT, LONGEST_WAIT

#: Flower's errors for a node that was lost on the way; while there is time it may come back
GONE = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)


Name = Annotated[str, AfterValidator(printable)]


class Hello(BaseModel):
    """What a node says of itself."""

    model_config = ConfigDict(strict=True)

    clients: list[Name]
    others: list[Name]
    slots: list[Annotated[int, Field(ge=0)]]
    classes: Annotated[int, Field(ge=0)]
    code: str
    config: str
    model: str

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not len(set(self.clients)) == len(self.clients) == len(self.slots):
            raise ValueError(f"{len(self.clients)} clients, some twice or with {len(self.slots)} streams")
        return self


@dataclass
class Roster:
    """The clients of a run by name; a node id is only today's address.

    Attributes
    ----------
    node_of : dict of str to int
        Client name -> the node that hosts it, or did when it was last seen.
    present : set of int
        The nodes that are connected now.
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
    present: set[int] = field(default_factory=set)
    _asked: set[int] = field(default_factory=set)
    _waiting: dict[str, int] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)

    def nodes(self) -> dict[int, list[str]]:
        """Return the clients, sorted, of each connected node, in the order of their first client."""
        hosted: dict[int, list[str]] = {}
        for client in sorted(self.node_of):
            if self.node_of[client] in self.present:
                hosted.setdefault(self.node_of[client], []).append(client)
        return hosted

    def absent(self) -> dict[str, str]:
        """Return why the clients of nodes that are not connected take no part."""
        return {c: f"its node {n} is not connected" for c, n in self.node_of.items() if n not in self.present}

    def look(self, grid: Grid) -> list[Message]:
        """See who is connected, ask those who have not been asked yet whom they host, and return the answers so far."""
        self.present = set(grid.get_node_ids())
        # A node that never answers must not keep those from joining that come after it: ask and listen at once.
        new = sorted(self.present - self._asked)
        self._asked.update(new)
        if new:
            messages = [Message(RecordDict(), node_id, HELLO, group_id="0") for node_id in new]
            sent = zip(grid.push_messages(messages), new, strict=True)
            self._waiting.update({message_id: node_id for message_id, node_id in sent if message_id})
        answers = []
        for reply in list(grid.pull_messages(sorted(self._waiting))) if self._waiting else []:
            node_id = self._waiting.pop(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.error.code in GONE:
                log(WARNING, "node %d did not answer (%s); it is asked again", node_id, error_of(reply))
                self._asked.discard(node_id)
            else:
                answers.append(reply)
        return sorted(answers, key=lambda reply: reply.metadata.src_node_id)

    def refresh(self, grid: Grid, config: RunConfig) -> None:
        """Let clients join, leave, and return under another node id; a node that cannot serve the run stays outside."""
        for reply in self.look(grid):
            try:
                _enter(self, reply, config, returning=True)
            except FederationError as error:
                log(WARNING, "a node that came later takes no part: %s", error)


def gather(grid: Grid, config: RunConfig) -> Roster:
    """Ask every node whom it hosts, until all clients of the run are there.

    Raises
    ------
    FederationError
        A node cannot serve the run, runs other code or another config than the server, hosts a client that another
        node hosts too, or clients are still missing after ``join-timeout`` seconds.
    """
    roster = Roster()
    expected = config.client_names()
    deadline, wait = time.monotonic() + config.join_timeout, FIRST_WAIT
    while True:
        replies = roster.look(grid)
        for reply in replies:
            _enter(roster, reply, config)
        missing = [client for client in expected if client not in roster.node_of]
        if not missing:
            return roster
        if time.monotonic() > deadline:
            if 0 < config.quorum <= len(roster.node_of):
                log(WARNING, "the run begins without %d of %d clients: %s", len(missing), len(expected), _few(missing))
                return roster
            raise FederationError(
                f"{len(missing)} of {len(expected)} clients did not join within {config.join_timeout:g} s "
                f"({len(roster._asked)} nodes asked, {len(roster._waiting)} of them silent): {_few(missing)}; start "
                f"them, or set num-clients, join-timeout or quorum"
                + (f"; present, but not of this run: {_few(sorted(roster.others))}" if roster.others else "")
            )
        wait = FIRST_WAIT if replies else min(2 * wait, LONGEST_WAIT)
        time.sleep(wait)


def _enter(roster: Roster, reply: Message, config: RunConfig, returning: bool = False) -> None:
    if (error := error_of(reply)) is not None:
        raise FederationError(error)
    node, expected = reply.metadata.src_node_id, config.client_names()
    try:
        hello = Hello.model_validate(dict(reply.content.config_records["hello"]))
    except (KeyError, ValidationError) as error:
        fault = first_fault(error) if isinstance(error, ValidationError) else "no record 'hello'"
        raise FederationError(
            f"node {node} answers what no client of ours does ({printable(fault)}): install the server's version there"
        ) from None
    if hello.others:
        log(WARNING, "node %d hosts %s, not of this run", node, _few(hello.others))
        roster.others.update(hello.others)
    if not hello.clients:
        return
    if hello.code != code_fingerprint():
        raise FederationError(
            f"node {node} runs other code than the server (fedtta_flwr {hello.code}, expected "
            f"{code_fingerprint()}): install the same version there; in a simulation, stop the local SuperLink that "
            f"another checkout started (pkill -f flower-superlink)"
        )
    if hello.config != config.fingerprint():
        raise FederationError(
            f"node {node} has another run config than the server ({hello.config}, expected {config.fingerprint()})"
        )
    if strangers := set(hello.clients) - set(expected):
        raise FederationError(f"node {node} hosts {min(strangers)!r}, who is not of this run: name a client of it")
    roster.classes, roster.model = roster.classes or hello.classes, roster.model or hello.model
    if hello.model != roster.model:
        raise FederationError(
            f"node {node} has another source model than the others ({hello.model}, expected {roster.model}): "
            f"give every node the same checkpoint"
        )
    if hello.classes != roster.classes:
        raise FederationError(
            f"node {node} has data of {hello.classes} classes, the others {roster.classes}: give every node the same"
        )
    for client, length in zip(hello.clients, hello.slots, strict=True):
        before = roster.node_of.get(client, node)
        if client in roster.node_of and not returning:
            raise FederationError(
                f"{client} is hosted by two nodes, {before} and {node}: give each its own client names"
            )
        if before != node and before in roster.present:  # a device that restarts may come back before the old is gone
            log(WARNING, "%s moves from node %d to node %d though the first is still connected", client, before, node)
        roster.node_of[client] = node
        roster.slots[client] = length


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
