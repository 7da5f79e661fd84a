"""Who is there: which node hosts which client, and how long the clients' streams are."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Annotated, Self

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import FederationError, few, first_fault
from fedtta_flwr.plugins import device_code
from fedtta_flwr.records import HELLO, code_fingerprint, error_of, printable
from fedtta_flwr.strategies.exchange import FIRST_WAIT, LONGEST_WAIT, SAID_AFTER, unguessable
from fedtta_flwr.strategies.mailbox import Mailbox, is_far
from fedtta_flwr.strategies.replies import GONE

RESTART = " (those that are online and silent: again)"
#: seconds after which a node that cannot serve the run is asked again: somebody may have mended it
ASK_AGAIN = 60.0
LARGEST_HELLO = 2.0**24  # bytes of what a node says of itself
NEVER_HERE = "it has not joined"


Name = Annotated[str, AfterValidator(printable)]
Names = Annotated[list[Name], Field(max_length=100_000)]


class Hello(BaseModel):
    """What a node says of itself."""

    model_config = ConfigDict(strict=True)

    clients: Names
    others: Names
    failed: Names
    failures: Names
    slots: Annotated[list[Annotated[int, Field(ge=0, le=10**9)]], Field(max_length=100_000)]
    classes: Annotated[int, Field(ge=0)]
    code: Name
    plugins: Names
    config: Name
    model: Name
    data: Name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not len(set(self.clients)) == len(self.clients) == len(self.slots):
            raise ValueError(f"{len(self.clients)} clients, some twice or with {len(self.slots)} streams")
        if not len(set(self.failed) - set(self.clients)) == len(self.failed) == len(self.failures):
            raise ValueError(f"{len(self.failed)} clients that cannot take part, for {len(self.failures)} reasons")
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
    data : str
        Fingerprint of the images from which all clients are dealt theirs; empty where each may have its own.
    others : set of str
        Clients that nodes host but that are not of this run.
    refused : dict of int to str
        Connected node -> why it cannot serve the run, or some of its clients.
    names : dict of int to str
        Node, once it was connected -> the name, or names separated by commas, that its key was registered under; empty
        where devices are not authenticated.
    """

    node_of: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    classes: int = 0
    model: str = ""
    data: str = ""
    present: set[int] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    _ask_at: dict[int, float] = field(default_factory=dict)
    _mail: Mailbox = field(default_factory=Mailbox)

    def nodes(self) -> dict[int, list[str]]:
        """Return the clients, sorted, of each connected node, in the order of their first client."""
        hosted: dict[int, list[str]] = {}
        for client in sorted(self.node_of):
            if self.node_of[client] in self.present:
                hosted.setdefault(self.node_of[client], []).append(client)
        return hosted

    def absent(self, clients: Iterable[str]) -> dict[str, str]:
        """Return why those of a run's clients that have no connected node take no part."""
        gone = {c: f"its node {n} is not connected" for c, n in self.node_of.items() if n not in self.present}
        refused = {name: why for node, why in self.refused.items() for name in self.names.get(node, "").split(",")}
        return {c: refused.get(c, NEVER_HERE) for c in set(clients) - self.node_of.keys()} | gone

    def called(self, node: int) -> str:
        """Return how a node is named in messages: by its number, and the name that it was registered under."""
        name = self.names.get(node, "")
        return f"node {node} ({printable(name)})" if name else f"node {node}"

    def look(self, grid: Grid) -> list[Message]:
        """See who is connected, ask those who have not been asked yet whom they host, and return the answers so far."""
        connected = {node.node_id: node.name for node in grid.get_nodes()}
        self.present = set(connected)
        self.names |= connected  # kept: who was asked may be gone when its answer is read
        # A device that leaves unneeded may come back as another one: mended, or with another client.
        kept = self.present | set(self.node_of.values())
        self._ask_at = {node: then for node, then in self._ask_at.items() if node in kept}
        self.refused = {node: why for node, why in self.refused.items() if node in self.present}
        # A node that never answers must not keep those from joining that come after it: ask and listen at once.
        now = time.monotonic()
        new = sorted(node for node in self.present if self._ask_at.get(node, now) <= now)
        self._ask_at.update(dict.fromkeys(new, math.inf))
        if new:
            nonce = {"nonce": ConfigRecord({"nonce": unguessable()})}
            messages = [Message(RecordDict(nonce), node_id, HELLO, group_id="0") for node_id in new]  # type: ignore[arg-type]
            self._mail.push(grid, messages, [LARGEST_HELLO] * len(messages))
        answers = []
        for reply in self._mail.pull(grid):
            node_id = reply.metadata.src_node_id
            if reply.has_error() and reply.error.code in GONE:
                log(WARNING, "%s did not answer (%s); it is asked again", self.called(node_id), error_of(reply))
                self._ask_at.pop(node_id, None)
            else:
                answers.append(reply)
        return sorted(answers, key=lambda reply: reply.metadata.src_node_id)

    def refresh(self, grid: Grid, config: RunConfig, returning: bool = True) -> bool:
        """Let clients join, leave, and return under another node id; a node that cannot serve the run stays outside.

        If `returning`, one may move to a node that is new though its own is still connected. Return whether anybody
        has answered.
        """
        answers = self.look(grid)
        plugins = device_code(config) if answers else []
        for reply in answers:
            node = reply.metadata.src_node_id
            try:
                why, fault = "some clients of a node take no part", _enter(self, reply, config, plugins, returning)
            except FederationError as error:
                why, fault = "a node takes no part", str(error)
            if not fault:
                self.refused.pop(node, None)
                continue
            if self.refused.get(node) != fault:
                log(WARNING, "%s: %s", why, fault)
            self.refused[node] = fault
            # A simulation could ask a node while it serves its other clients, and one of both would lose their states.
            if is_far(grid) or node not in self.node_of.values():
                self._ask_at[node] = time.monotonic() + ASK_AGAIN
        return bool(answers)

    def is_final(self, grid: Grid) -> bool:
        """Return whether all have answered and nobody else will come, as in a simulation, whose nodes are all there."""
        return not is_far(grid) and not self._mail.waiting and self.present <= self._ask_at.keys()


def gather(grid: Grid, config: RunConfig, known: Roster | None = None) -> Roster:
    """Ask every node whom it hosts, until all clients of the run are there.

    A device that cannot serve the run is named in the log: it may be mended, or not be needed at all.

    Parameters
    ----------
    grid, config
        Where the nodes are, and the run's config.
    known : Roster, optional
        Its classes, model and data are what all must have; without, those that the first node has.

    Raises
    ------
    FederationError
        Clients are missing after ``join-timeout`` seconds, or at once where nobody else will come: their nodes do not
        answer, cannot serve the run, run other code or another config than the server, have another source model or
        other data, or host a client that another node hosts too.
    """
    roster = Roster(classes=known.classes, model=known.model, data=known.data) if known else Roster()
    expected = config.client_names()
    began = time.monotonic()
    deadline, wait, said_after = began + config.join_timeout, FIRST_WAIT, SAID_AFTER
    while True:
        answered = roster.refresh(grid, config, returning=False)
        missing = [client for client in expected if client not in roster.node_of]
        if not missing:
            return roster
        hopeless = bool(roster.refused) and roster.is_final(grid)
        if hopeless or time.monotonic() > deadline:
            if 0 < config.quorum <= len(roster.node_of):
                log(WARNING, "the run begins without %d of %d clients: %s", len(missing), len(expected), few(missing))
                return roster
            reasons = list(roster.refused.values())
            if hopeless:
                raise FederationError(reasons[0])
            raise FederationError(
                f"{len(missing)} of {len(expected)} clients did not join within {config.join_timeout:g} s "
                f"({len(roster._ask_at)} nodes asked, {len(roster._mail.waiting)} of them silent): {few(missing)}; "
                f"start them{RESTART if roster._mail.waiting else ''}, or set num-clients, join-timeout or quorum"
                + (f"; present, but not of this run: {few(sorted(roster.others))}" if roster.others else "")
                + (f"; cannot serve the run: {few(reasons, '; ')}" if reasons else "")
            )
        if time.monotonic() - began > said_after:
            there = f"{len(roster._ask_at)} nodes asked, {len(roster._mail.waiting)} of them silent"
            log(INFO, "waiting for %d of %d clients (%s): %s", len(missing), len(expected), there, few(missing))
            said_after *= 2
        wait = FIRST_WAIT if answered else min(2 * wait, LONGEST_WAIT)
        time.sleep(wait)


def _enter(roster: Roster, reply: Message, config: RunConfig, plugins: list[str], returning: bool) -> str:
    """Let in who is hosted by a node that has answered; return why some of them cannot take part.

    Raises
    ------
    FederationError
        If the whole node cannot.
    """
    node, expected = reply.metadata.src_node_id, config.client_names()
    who = roster.called(node)
    if (error := error_of(reply)) is not None:
        raise FederationError(f"{who}: {error}")
    try:
        hello = Hello.model_validate(dict(reply.content.config_records["hello"]))
    except (KeyError, ValidationError) as error:
        fault = first_fault(error) if isinstance(error, ValidationError) else "no record 'hello'"
        raise FederationError(
            f"{who} answers what no client of ours does ({printable(fault)}): install the server's version there"
        ) from None
    name, named = roster.names.get(node, ""), {*hello.clients, *hello.failed, *hello.others}
    if name and (others := sorted(named - set(name.split(",")))):
        raise FederationError(
            f"node {node} says that it hosts {few(others)}, and is registered as {printable(name)}: a device hosts "
            f"the clients whose names it is registered under; revoke it, and register a new key (fedtta register "
            f"KEY.pub --name A,B)"
        )
    if not roster.others.issuperset(hello.others):
        log(WARNING, "%s hosts %s, not of this run", who, few(hello.others))
        roster.others.update(hello.others)
    if not hello.clients:
        return ""
    if hello.code != code_fingerprint():
        raise FederationError(
            f"{who} runs other code than the server (fedtta_flwr {hello.code}, expected "
            f"{code_fingerprint()}): install the same version there; in a simulation, stop the local SuperLink that "
            f"another checkout started (pkill -f 'flower-superlink.*local-superlink')"
        )
    if hello.plugins != plugins:
        raise FederationError(
            f"{who} has other code of your own than the server ({few(hello.plugins) or 'none'}, expected "
            f"{', '.join(plugins) or 'none'}): install the same version there, and restart it"
        )
    if hello.config != config.fingerprint():
        raise FederationError(
            f"{who} has another run config than the server ({hello.config}, expected {config.fingerprint()})"
        )
    if strangers := set(hello.clients) - set(expected):
        raise FederationError(f"{who} hosts {min(strangers)!r}, who is not of this run: name a client of it")
    model, classes, data = roster.model or hello.model, roster.classes or hello.classes, roster.data or hello.data
    if hello.model != model:
        raise FederationError(
            f"{who} has another source model ({hello.model}, expected {model}): give every node the server's checkpoint"
        )
    if hello.classes != classes:
        raise FederationError(
            f"{who} has data of {hello.classes} classes, expected {classes}: give every node the server's"
        )
    if hello.data != data:
        raise FederationError(
            f"{who} has other images than the server ({hello.data}, expected {data}), and would deal them out "
            f"otherwise: give every node the same data set"
        )
    still_there = {c: n for c in hello.clients if (n := roster.node_of.get(c, node)) != node and n in roster.present}
    for client, before in still_there.items():
        if not returning or node in roster.refused:
            raise FederationError(
                f"{client} is hosted by two nodes, {before} and {node}: give each its own client names"
            )
        # A device that restarts may come back before the old is gone.
        log(WARNING, "%s moves from node %d to node %d though the first is still connected", client, before, node)
    roster.model, roster.classes, roster.data = model, classes, data
    roster.node_of.update(dict.fromkeys(hello.clients, node))
    roster.slots.update(zip(hello.clients, hello.slots, strict=True))
    faults = zip(hello.failed, hello.failures, strict=True)
    return f"{who} cannot serve {few([f'{name}: {why}' for name, why in faults], '; ')}" if hello.failed else ""
