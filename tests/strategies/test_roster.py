"""Who is there: the real client app answers, hosted and configured in all the wrong ways."""

import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedtta_flwr import client
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import FederationError
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.strategies.roster import Roster, gather

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    return client.hello(message, context)


other_code = ClientApp()


@other_code.query("hello")
def other_hello(message: Message, context: Context) -> Message:
    reply = client.hello(message, context)
    if context.node_config["partition-id"] == 1:
        reply.content.config_records["hello"]["code"] = "0123456789abcdef"
    return reply


class HostingGrid(LocalGrid):
    """Nodes that name their own clients, and join one look at a time if asked to."""

    def __init__(self, config: RunConfig, hosting: list[str], one_by_one: bool = False) -> None:
        super().__init__(app, config.to_flat(), len(hosting))
        for context, names in zip(self._contexts.values(), hosting, strict=True):
            context.node_config = {"clients": names}
        self.looks = 0 if one_by_one else len(hosting)
        self.pushed: list[int] = []

    def get_node_ids(self) -> Iterable[int]:
        self.looks += 1
        return list(super().get_node_ids())[: self.looks - 1]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.pushed += [message.metadata.dst_node_id for message in messages]
        return super().push_messages(messages)


@pytest.fixture
def config(tiny_config: Callable[..., RunConfig]) -> RunConfig:
    return tiny_config(**{"join-timeout": 0.1})


def refused(grid: LocalGrid, config: RunConfig) -> str:
    with pytest.raises(FederationError) as caught:
        gather(grid, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6])
def test_every_client_is_found_once(config: RunConfig, nodes: int) -> None:
    grid = LocalGrid(app, config.to_flat(), nodes)
    roster = gather(grid, config)
    assert roster.node_of == {f"client-0{k}": list(grid.get_node_ids())[k % nodes] for k in range(4)}
    assert roster.slots == {f"client-0{k}": 4 for k in range(4)}


def test_nodes_may_name_their_clients(config: RunConfig) -> None:
    roster = gather(HostingGrid(config, ["client-03, client-00", "client-01,client-02"]), config)
    assert roster.nodes() == {2: ["client-00", "client-03"], 3: ["client-01", "client-02"]}


class SilentGrid(HostingGrid):
    """The first node is listed but never answers; the others are listed from the second look on."""

    def __init__(self, config: RunConfig, hosting: list[str]) -> None:
        super().__init__(config, hosting)
        self.looks = 1

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        silent = next(iter(self._contexts))
        return [r for r in super().pull_messages(message_ids) if r.metadata.src_node_id != silent]


def test_a_silent_node_keeps_nobody_from_joining(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(**{"join-timeout": 5.0})
    grid = SilentGrid(config, ["client-00", "client-00,client-01", "client-02,client-03"])
    began = time.monotonic()
    roster = gather(grid, config)
    assert roster.nodes() == {3: ["client-00", "client-01"], 4: ["client-02", "client-03"]}
    assert time.monotonic() - began < 2


def test_nodes_may_come_one_by_one_and_are_asked_once(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(**{"join-timeout": 10.0})
    grid = HostingGrid(config, [f"client-0{k}" for k in range(4)], one_by_one=True)
    assert sorted(gather(grid, config).node_of) == list(config.client_names())
    assert grid.pushed == [2, 3, 4, 5]


def test_missing_clients_are_named_after_the_join_timeout(config: RunConfig) -> None:
    text = refused(HostingGrid(config, ["client-00", "client-02"]), config)
    assert "2 of 4 clients did not join within 0.1 s" in text
    assert "client-01, client-03" in text
    assert "join-timeout" in text


def test_only_some_of_many_missing_clients_are_named(tiny_config: Callable[..., RunConfig]) -> None:
    many = tiny_config(**{"num-clients": 12, "join-timeout": 0.1})
    text = refused(HostingGrid(many, ["client-00"]), many)
    assert "client-01, client-02, client-03 and 8 more" in text
    assert "client-04" not in text


def test_no_node_at_all(config: RunConfig) -> None:
    assert "4 of 4 clients" in refused(HostingGrid(config, []), config)


def test_a_client_on_two_nodes_is_refused(config: RunConfig) -> None:
    text = refused(HostingGrid(config, ["client-00,client-01", "client-01,client-02,client-03"]), config)
    assert "client-01" in text
    assert "2" in text
    assert "3" in text


def test_clients_of_no_run_are_named_when_others_are_missing(config: RunConfig) -> None:
    text = refused(HostingGrid(config, ["client-00,camera-7", "client-01,client-02"]), config)
    assert "1 of 4 clients" in text
    assert "client-03" in text
    assert "not of this run: camera-7" in text


def test_nodes_that_the_run_does_not_need_are_passed_over(config: RunConfig) -> None:
    """Neither their data nor their model is looked at: they may have none."""
    hosting = ["client-00,client-01", "camera-7", "client-02,client-03,camera-8"]
    roster = gather(HostingGrid(config, hosting), config)
    assert roster.nodes() == {2: ["client-00", "client-01"], 4: ["client-02", "client-03"]}
    assert roster.others == {"camera-7", "camera-8"}


def test_other_code_is_refused(config: RunConfig) -> None:
    text = refused(LocalGrid(other_code, config.to_flat(), 2), config)
    assert "node 3" in text
    assert "0123456789abcdef" in text


@pytest.mark.parametrize(
    "override", [{"seed": 1}, {"batch-size": 6}, {"fedctta.temperature": 2.0}, {"strategy": "local"}]
)
def test_another_config_is_refused(
    config: RunConfig, tiny_config: Callable[..., RunConfig], override: dict[str, Any]
) -> None:
    theirs = tiny_config(**{"join-timeout": 0.1} | override)
    text = refused(LocalGrid(app, theirs.to_flat(), 1), config)
    assert theirs.fingerprint() in text
    assert config.fingerprint() in text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"clients": 3}, "clients: "),
        ({"clients": None}, "clients: "),
        ({"slots": None}, "slots: "),
        ({"slots": []}, "2 clients, some twice or with 0 streams"),
        ({"slots": ["a", "b"]}, "slots.0: "),
        ({"slots": [-1, 2]}, "slots.0: "),
        ({"others": [b"x"]}, "others.0: "),
        ({"classes": 1000}, "has data of 1000 classes, the others 10"),
        ({"clients": ["client-01", "nobody"]}, "hosts 'nobody', who is not of this run"),
        ({}, "no record 'hello'"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_node_that_answers_nonsense_stays_outside(
    config: RunConfig, change: dict[str, Any], word: str, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nonsense = ClientApp()

    @nonsense.query("hello")
    def answer(message: Message, context: Context) -> Message:
        reply = client.hello(message, context)
        if context.node_config["partition-id"] == 1:
            record = reply.content.config_records["hello"]
            for key, value in change.items():
                record.pop(key)
                if value is not None:
                    record[key] = value
            if not change:
                del reply.content["hello"]
        return reply

    grid = LocalGrid(nonsense, config.to_flat(), 2)
    if not late:
        assert word in refused(grid, config)
        return
    roster = Roster(node_of={"client-01": 2, "client-00": 2}, present={2}, classes=10)
    roster._asked.add(2)
    with caplog.at_level("WARNING", "flwr"):
        roster.refresh(grid, config)
    assert word in caplog.text
    assert set(roster.node_of.values()) == {2}


def test_a_client_that_moves_from_a_node_that_is_still_there_is_named(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    grid = HostingGrid(config, ["client-00,client-01,client-02,client-03", "client-01"])
    grid.looks = 1  # only the first is there
    roster = gather(grid, config)
    with caplog.at_level("WARNING", "flwr"):
        roster.refresh(grid, config)
    assert "client-01 moves from node 2 to node 3 though the first is still connected" in caplog.text
    assert roster.node_of == {"client-00": 2, "client-01": 3, "client-02": 2, "client-03": 2}


def test_another_output_directory_is_no_other_config(config: RunConfig, tiny_config: Callable[..., RunConfig]) -> None:
    theirs = tiny_config(**{"join-timeout": 0.1, "output-dir": "/elsewhere"})
    assert len(gather(LocalGrid(app, theirs.to_flat(), 1), config).node_of) == 4


def test_what_a_node_cannot_serve_is_its_own_line(config: RunConfig) -> None:
    flat = config.to_flat() | {"data-dir": "/no/such/folder"}
    assert "data-dir" in refused(LocalGrid(app, flat, 1), config)


def test_what_a_node_raises_ends_the_run(config: RunConfig) -> None:
    broken = ClientApp()

    @broken.query("hello")
    def fail(message: Message, context: Context) -> Message:
        raise ZeroDivisionError("boom")

    assert "boom" in refused(LocalGrid(broken, config.to_flat(), 1), config)


def test_a_node_that_was_lost_on_the_way_is_asked_again(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(**{"join-timeout": 60.0})

    class Unsteady(LocalGrid):
        lost: ClassVar[list[int]] = [5, 8, 3]

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for reply in super().pull_messages(message_ids):
                if reply.metadata.src_node_id == 3 and self.lost:
                    # As Flower makes them: from the SuperLink, whose id is 1.
                    reply = Message(Error(code=self.lost.pop(), reason="gone"), reply_to=reply)
                    reply.metadata.__dict__["_reply_to_message_id"] = self.asked
                    reply.metadata.__dict__["_src_node_id"] = 1
                yield reply

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            ids = list(super().push_messages(messages))
            for message, message_id in zip(messages, ids, strict=True):
                if message.metadata.dst_node_id == 3:
                    self.asked = message_id
            return ids

    grid = Unsteady(app, config.to_flat(), 2)
    roster = gather(grid, config)
    assert not grid.lost
    assert sorted(roster.node_of) == list(config.client_names())
    assert set(roster.node_of.values()) == {2, 3}


def test_nodes_are_in_the_order_of_their_first_client() -> None:
    roster = Roster({"d": 1, "a": 9, "c": 1, "b": 4, "e": 9}, present={1, 4, 9})
    assert list(roster.nodes().items()) == [(9, ["a", "e"]), (4, ["b"]), (1, ["c", "d"])]
