"""Sending and collecting, over a grid that answers late or never."""

import time
from collections.abc import Iterable

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.strategies import exchange
from fedtta_flwr.strategies.exchange import send_and_receive

app = ClientApp()


@app.query("hello")
def answer(message: Message, context: Context) -> Message:
    return Message(RecordDict({"who": ConfigRecord({"part": context.node_config["partition-id"]})}), reply_to=message)


class SlowGrid(LocalGrid):
    """Hands a node's reply over only after so many polls; keeps what was polled for."""

    def __init__(self, polls: list[float]) -> None:
        super().__init__(app, {}, len(polls))
        self.left = dict(zip(self.get_node_ids(), polls, strict=True))
        self.node_of: dict[str, int] = {}
        self.asked: list[set[str]] = []
        self.lost: set[int] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        self.node_of = {i: m.metadata.dst_node_id for i, m in zip(ids, messages, strict=True)}
        return [None if self.node_of[i] in self.lost else i for i in ids]  # type: ignore[misc]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = list(message_ids)
        self.asked.append(set(asked))
        ready = [i for i in asked if self.left[self.node_of[i]] <= 0]
        for i in asked:
            self.left[self.node_of[i]] -= 1
        return super().pull_messages(ready)


class HttpGrid(SlowGrid):
    """The same, by the name of a SuperLink's."""


NEVER = float("inf")


def messages_to(grid: LocalGrid) -> list[Message]:
    return [Message(RecordDict(), node, "query.hello") for node in grid.get_node_ids()]


def parts(replies: list[Message]) -> list[object]:
    return [reply.content.config_records["who"]["part"] for reply in replies]


def test_replies_that_are_there_are_taken_at_once() -> None:
    grid = SlowGrid([0, 0, 0])
    assert sorted(parts(send_and_receive(grid, messages_to(grid), 10))) == [0, 1, 2]
    assert len(grid.asked) == 1


def test_replies_come_in_the_order_of_arrival_and_only_what_is_missing_is_asked_for() -> None:
    grid = SlowGrid([3, 0, 1])
    assert parts(send_and_receive(grid, messages_to(grid), 10)) == [1, 2, 0]
    assert [len(asked) for asked in grid.asked] == [3, 2, 1, 1]


def test_a_reply_that_never_comes_is_given_up_after_the_timeout() -> None:
    grid = SlowGrid([0, NEVER])
    began = time.monotonic()
    replies = send_and_receive(grid, messages_to(grid), 0.12)
    took = time.monotonic() - began
    assert parts(replies) == [0]
    assert 0.12 <= took < 1


def test_who_is_waited_for_is_said_after_a_while_and_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, said = SlowGrid([0, NEVER]), []
    monkeypatch.setattr(exchange, "SAID_AFTER", 0.05)
    messages = messages_to(grid)
    send_and_receive(grid, messages, 0.6, waiting=said.append)
    assert said == [[messages[1]]] * 4  # after 0.05, 0.1, 0.2 and 0.4 s


def test_no_timeout_left_still_takes_what_is_there() -> None:
    grid = SlowGrid([0, NEVER])
    assert parts(send_and_receive(grid, messages_to(grid), 0.0)) == [0]


def test_the_wait_doubles_up_to_its_bound_and_starts_anew_with_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SlowGrid([9, 12])
    waits: list[float] = []
    monkeypatch.setattr(exchange.time, "sleep", waits.append)
    assert parts(exchange.send_and_receive(grid, messages_to(grid), 10)) == [0, 1]
    milliseconds = [1, 2, 4, 8, 16, 32, 50, 50, 50, *(1, 2)]
    assert waits == pytest.approx([wait / 1000 for wait in milliseconds])


def test_a_superlink_is_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = HttpGrid([2, 5])
    waits: list[float] = []
    monkeypatch.setattr(exchange.time, "sleep", waits.append)
    assert parts(exchange.send_and_receive(grid, messages_to(grid), 10)) == [0, 1]
    assert waits == [1, 1, 1, 1]


def test_the_last_wait_ends_with_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SlowGrid([NEVER])
    waits: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(exchange.time, "sleep", lambda wait: (waits.append(wait), sleep(wait)))
    exchange.send_and_receive(grid, messages_to(grid), 0.02)
    assert sum(waits) <= 0.02


def test_a_message_that_could_not_be_pushed_is_not_waited_for() -> None:
    grid = SlowGrid([0, 0])
    grid.lost = {2}
    began = time.monotonic()
    assert parts(send_and_receive(grid, messages_to(grid), 10)) == [1]
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("timeout", [0.0, 10.0])
def test_nothing_to_send(timeout: float) -> None:
    grid = SlowGrid([0])
    assert send_and_receive(grid, [], timeout) == []
    assert grid.asked == []
