"""What all methods share: everything but how clients are weighted."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from uuid import uuid4

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedtta_flwr.config import SCORES, RunConfig, Scalar
from fedtta_flwr.errors import FederationError, few
from fedtta_flwr.records import INFO, STATE, VISIT, distinct, to_stacked_arrays, unstack
from fedtta_flwr.resolve import ships
from fedtta_flwr.seeding import seeded
from fedtta_flwr.strategies.checkpoint import Checkpoints
from fedtta_flwr.strategies.exchange import LONGEST_WAIT, send_and_receive, unguessable
from fedtta_flwr.strategies.mailbox import is_far
from fedtta_flwr.strategies.method import Method
from fedtta_flwr.strategies.replies import SLACK, Limits, read_replies
from fedtta_flwr.strategies.roster import NEVER_HERE, gather
from fedtta_flwr.strategies.rounds import Observer, Round
from fedtta_flwr.strategies.updates import State, Update, check_states, form, screen, stack_updates
from fedtta_flwr.usage import peak_memory

LONGEST_OUTAGE = 3600.0  # seconds for which a run waits for somebody to be connected
NAMES = 1000  # bytes of a name in a reply, in whatever alphabet, and what frames it
MOST_SILENT = 3  # rounds in a row in which nobody can be reached


class PersonalizedStrategy(Method, Strategy):
    """A federation in which every client receives its own mixture.

    A method overrides `collaboration_matrix` and, if it needs one, names the descriptor that clients send. A method
    that is not ``W @ theta`` overrides `personalize` instead. What a method remembers from round to round goes through
    `memory` and `load_memory` (all that can be overridden stands in `Method`). All else happens here, once: who is
    there, one message a node and round, screening, personal states by client name, and what observers are told.

    Parameters
    ----------
    config : RunConfig
        The run's config; a method reads its own table from it.

    Attributes
    ----------
    observers : list of Observer
        Told about start, rounds and end, in this order.
    checkpoints : Checkpoints or None
        Where the run is saved from time to time.
    run : str
        A name of the run, by which clients find their states again; that of the resumed one, if any.
    personal : dict of str to dict of Tensor
        Each client's latest state.
    """

    def __init__(self, config: RunConfig) -> None:
        before = set(vars(self))
        super().__init__(config)
        self.observers: list[Observer] = []
        self.checkpoints: Checkpoints | None = None
        self.run = uuid4().hex
        self.personal: dict[str, State] = {}
        self._asked_by: dict[str, list[str]] = {}
        self._pursued: dict[str, Scalar] | None = None  # the objectives, as of the first messages
        self._resume = 0
        self._resuming: set[str] = set()
        self._left_out: set[str] = set()  # named as such in the log, and not back yet
        self._far, self._silent = False, 0  # whether nodes come and go; rounds in a row in which nobody was reached
        self._begun = {name: value for name, value in vars(self).items() if name not in before}

    # ------------------------------------------------------------------------------------------- Flower's interface

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation to the end of the streams, or for ``num_rounds`` (or the config's ``rounds``).

        Unlike Flower's own loop it learns first who is there, waits briefly between polls, and ends with one closing
        exchange for the last `post` scores. `initial_arrays` is not used: clients hold the source model.

        Raises
        ------
        FederationError
            If clients do not join, or none of them replies in a round.
        """
        torch.set_num_threads(self.config.threads)
        self._far = is_far(grid)
        timeout = timeout or self.config.round_timeout
        train_config, evaluate_config = (
            train_config or ConfigRecord(),
            evaluate_config or ConfigRecord(),
        )
        self.roster = gather(grid, self.config, self.roster)
        if not any(self.roster.slots.values()):
            raise FederationError("the streams of all clients are empty: nothing to adapt to; name other data")
        rounds = math.ceil(max(self.roster.slots.values()) / self.config.aggregate_every)
        if (wanted := num_rounds or self.config.rounds) > rounds:
            log(logging.WARNING, "rounds = %d: the streams end after %d", wanted, rounds)
        rounds = min(rounds, wanted or rounds)
        self.summary()
        for observer in self.observers:
            observer.on_start(self.config, self.config.client_names(), rounds)
        if self.checkpoints is not None:
            self._resume = self.checkpoints.restore(self)
            self._resuming = set(self.config.client_names()) if self._resume else set()
        result, nothing = Result(), ArrayRecord()
        for number in range(self._resume + 1, rounds + 1):
            began = time.perf_counter()
            # Bound to no name: messages and replies are as large as all states, and mixing needs the room.
            _, metrics = self.aggregate_train(
                number, self._exchange(grid, self.configure_train(number, nothing, train_config, grid), timeout)
            )
            self._tell(began)
            if self.checkpoints is not None:
                self.checkpoints.save(self, number)
            if metrics is not None:
                result.train_metrics_clientapp[number] = metrics
        began = time.perf_counter()
        messages = self.configure_evaluate(rounds + 1, nothing, evaluate_config, grid)
        self.aggregate_evaluate(rounds + 1, self._exchange(grid, messages, timeout))
        self._tell(began)
        for observer in self.observers:
            observer.on_end()
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return one message a node: the personal states of its clients, and how far to go."""
        self._round = Round(server_round)
        return self._messages(grid, self.config.aggregate_every)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Screen and stack the replies, make the new personal states, and return the number of samples.

        Raises
        ------
        FederationError
            If not a single client replied, or what the method made is no state that they could work with.
        """
        read, rejected = self._read(replies)
        del replies  # what of them is needed has been read
        if len(read) > len(rejected):
            # Where the method is W @ theta and no more, nobody looks at the states again once they are mixed; but what
            # does not ship may have kept them.
            expendable = ships(self) and type(self).personalize is Method.personalize
            updates = stack_updates(server_round, read, rejected, self.personal, self.source, expendable=expendable)
            read.clear()  # they have been copied
            self._round.clients = updates.clients
            if len(updates) >= self.config.quorum:
                updates = self.bounded(updates)
                forms = {name: form(t) for name, t in updates.state.items()}
                with seeded(torch.device("cpu"), self.config.seed, "mixture", server_round):
                    mixed = self.personalize(updates)
                if (fault := check_states(mixed, forms)) is not None:
                    raise FederationError(f"round {server_round}: {type(self).__name__}.personalize: {fault}")
                if self.one_for_all:  # one copy, which is sent to a node, and saved, once
                    if not ships(self) and any(not torch.equal(t, t[:1].expand_as(t)) for t in mixed.values()):
                        raise FederationError(
                            f"round {server_round}: {type(self).__name__}.one_for_all is true, but personalize "
                            f"returned other states for some clients than for others; set it to False in the class"
                        )
                    mixed = {name: t[:1].clone().expand_as(t) for name, t in mixed.items()}
                elif not ships(self):  # what it goes on to change in place must not change what clients have
                    mixed = {name: _copied(t) for name, t in mixed.items()}
                self._keep(updates.clients, mixed)
                self._round.own = self.measured()
            else:
                unmixed, instead = self.unmixed(updates)
                log(
                    logging.WARNING,
                    "round %d mixes nothing: %d clients took part, quorum = %d; %s",
                    server_round,
                    len(updates),
                    self.config.quorum,
                    instead,
                )
                self._keep(updates.clients, unmixed)
        return None, MetricRecord({"samples": self._round.samples})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the closing messages: the last personal states, no further slot."""
        self._round = Round(server_round, closing=True)
        return self._messages(grid, 0) if "post" in self.config.score_names() else []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Take the last `post` scores from the closing replies."""
        self._read(replies)
        return None

    def summary(self) -> None:
        """Log what runs, in one line."""
        log(
            logging.INFO,
            "%s x %s on %s: clients %d, nodes %d, seed %d",
            *self.config.methods(),
            self.config.stream or self.config.dataset,
            len(self.roster.node_of),
            len(set(self.roster.node_of.values())),
            self.config.seed,
        )

    # ------------------------------------------------------------------------------------------------------- private

    def _meet(self, grid: Grid) -> None:
        """See who is connected; wait for somebody if nobody is.

        Raises
        ------
        FederationError
            If nobody comes within an hour, or the time of a round if that is more.
        """
        timeout = max(self.config.round_timeout, LONGEST_OUTAGE)
        deadline = time.monotonic() + timeout
        self.roster.refresh(grid, self.config)
        while not self.roster.nodes():
            if time.monotonic() > deadline:
                raise FederationError(
                    f"no node has been connected for {timeout:g} s: see what the nodes print, then resume from the "
                    f"last checkpoint"
                )
            time.sleep(LONGEST_WAIT)
            self.roster.refresh(grid, self.config)

    def _keep(self, clients: tuple[str, ...], states: State) -> None:
        """Make the stacked states the clients' personal ones, as views; one who was absent gets a copy of its own.

        A view holds the stacked tensors of a whole round in memory, which only those who leave together may share.
        """
        for client in self.personal.keys() - set(clients):
            self.personal[client] = {
                name: t if t.untyped_storage().nbytes() == t.nbytes else t.clone()
                for name, t in self.personal[client].items()
            }
        for i, client in enumerate(clients):
            self.personal[client] = unstack(states, i)

    def _messages(self, grid: Grid, slots: int) -> list[Message]:
        self._meet(grid)
        options = {f"descriptor.{key}": value for key, value in self.descriptor_options.items()}
        options |= {f"objective.{key}": value for key, value in self.objectives.items()}
        self._pursued = dict(self.objectives) if self._pursued is None else self._pursued
        if dict(self.objectives) != self._pursued:
            raise FederationError(
                f"{self.where()}{type(self).__name__}.objectives is {dict(self.objectives)}, was {self._pursued}; set "
                f"it before the run: clients keep the terms with which they began"
            )
        messages = []
        self._round.missing |= self.roster.absent(self.config.client_names())
        for node, clients in self.roster.nodes().items():
            known = [client for client in clients if client in self.personal]
            states, places = distinct([self.personal[client] for client in known])
            # As if each were a device of its own: what clients of a node share travels once.
            self._round.bytes_down += sum(t.nbytes for client in known for t in self.personal[client].values())
            info = {
                "run": self.run,
                "round": self._round.number,
                "slots": slots,
                "begin": (self._round.number - 1) * self.config.aggregate_every,
                "checkpoint": self._checkpoint(),
                "resume": self._resume,
                "resuming": sorted(self._resuming.intersection(clients)),
                "clients": clients,
                "personal": known,
                "places": places,
                "descriptor": self.descriptor,
                "finetune": self.finetune,
                "nonce": unguessable(),
                **options,
            }
            content = RecordDict({INFO: ConfigRecord(info)})  # type: ignore[arg-type]
            if known:
                content[STATE] = to_stacked_arrays(states)
            messages.append(
                Message(
                    content,
                    node,
                    VISIT,
                    group_id=str(self._round.number),
                    ttl=self.config.round_timeout,
                )
            )
        return messages

    def _checkpoint(self) -> int:
        """Return the last round, this one included, after which clients need their states again if we are resumed."""
        if self.checkpoints is None:
            return 0
        # The server writes none after the closing exchange: the clients' must not push out those that match its last.
        return max(self._resume, self.checkpoints.last_due(self._round.number - self._round.closing))

    def _exchange(self, grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message]:
        began = time.perf_counter()
        # Who comes back while others are waited for shall take part in the next round.
        limits = self._limits(self._expected_now())
        # Beside its tensors a client sends names: of itself, of a corruption a slot.
        largest = [len(_clients(m)) * (limits.bytes + (limits.slots + 9) * NAMES) + SLACK for m in messages]

        def waiting(unanswered: list[Message]) -> None:
            late = sorted(client for message in unanswered for client in _clients(message))
            log(logging.INFO, "round %d waits for %d of its clients: %s", self._round.number, len(late), few(late))

        meet = partial(self.roster.refresh, grid, self.config)
        replies = send_and_receive(grid, messages, timeout, meet, largest, waiting)
        self._round.seconds["exchange"] = time.perf_counter() - began
        self._asked_by = {m.metadata.message_id: _clients(m) for m in messages}
        return replies

    def _expected_now(self) -> Update:
        """Return the form of an update in this exchange; in the closing one nothing is adapted."""
        return Update({}, None, 0) if self._round.closing else self.expected()

    def _limits(self, expected: Update) -> Limits:
        """Return what a reply can say at most in this exchange, with updates of this form."""
        classes, slots = self.roster.classes, self.config.aggregate_every
        size = sum(t.nbytes for t in (*expected.state.values(), *expected.described().values()))
        counts = 4 * classes * (slots + 1) * (2 * len(SCORES) + 2)
        return Limits(classes, slots, self.largest_slot(), self.config.round_timeout, 2 * (size + counts))

    def _read(self, replies: Iterable[Message]) -> tuple[dict[str, Update], dict[str, str]]:
        """Read the replies into the round; return the updates, and the reasons for those that cannot take part."""
        round_, expected = self._round, self._expected_now()
        read = read_replies(round_, replies, self._asked_by, self._limits(expected))
        rejected = screen(read, expected) if read else {}
        round_.missing |= rejected
        exchange = "the closing exchange" if round_.closing else f"round {round_.number}"
        asked = {client for clients in self._asked_by.values() for client in clients}
        takes_part = asked - round_.missing.keys()
        self._resuming -= takes_part
        if asked and not takes_part:
            self._endure(exchange, asked)
        else:
            self._silent = 0
        again, self._left_out = self._left_out & takes_part, self._left_out - takes_part
        for reason, without in _by_reason(round_.missing).items():
            if reason != NEVER_HERE:  # who that is has been said at the beginning
                log(logging.WARNING, "%s goes on without %s: %s", exchange, few(without), reason)
                self._left_out.update(without)
        if round_.number > 1:
            forgot, new = ([c for c in round_.forgot if (c in self.personal) == known] for known in (True, False))
            if forgot:
                log(logging.WARNING, "%s: what they had kept at home is lost: %s", exchange, few(forgot))
            if new:
                log(logging.INFO, "%s: take part from now on: %s", exchange, few(new))
            if again := again.difference(new):
                log(logging.INFO, "%s: take part again: %s", exchange, few(sorted(again)))
        return read, rejected

    def _endure(self, exchange: str, asked: set[str]) -> None:
        """Go on for some rounds where all are out of reach at once: the server's own network, as a rule.

        Raises
        ------
        FederationError
            If it lasts, or they say themselves what is wrong.
        """
        self._silent += 1
        outage = self._far and self._round.number > 1 and asked <= self._round.unreached
        if not outage or self._silent == MOST_SILENT:
            reasons = _by_reason({client: self._round.missing[client] for client in asked})
            said = few([f"{few(clients)}: {reason}" for reason, clients in reasons.items()], "; ")
            raise FederationError(f"{exchange}: no client could take part; {said}")
        log(logging.WARNING, "%s: no client could be reached; nothing is mixed", exchange)

    def _tell(self, began: float) -> None:
        seconds = self._round.seconds
        seconds["total"] = time.perf_counter() - began
        exchange, busy = seconds.pop("exchange"), seconds.pop("busy", 0.0)
        seconds["server"] = seconds["total"] - exchange
        seconds["transport"] = max(0.0, exchange - busy)
        self._round.memory["server"] = peak_memory()
        for observer in self.observers:
            observer.on_round(self._round)


def _copied(t: Tensor) -> Tensor:
    """Return a copy of stacked states; of those that are the same one for all, one copy."""
    return t[:1].clone().expand_as(t) if len(t) and t.stride(0) == 0 else t.clone()


def _by_reason(missing: Mapping[str, str]) -> dict[str, list[str]]:
    """Return which clients took no part for each reason, both sorted."""
    found: dict[str, list[str]] = {}
    for client, reason in sorted(missing.items()):
        found.setdefault(reason, []).append(client)
    return dict(sorted(found.items()))


def _clients(message: Message) -> list[str]:
    return list(message.content.config_records[INFO]["clients"])  # type: ignore[arg-type]
