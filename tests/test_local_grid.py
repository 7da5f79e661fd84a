"""The grid in this process keeps Flower's promises."""

import time
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedtta_flwr.local_grid import LocalGrid

app = ClientApp()


@app.query("echo")
def echo(message: Message, context: Context) -> Message:
    """Tell what the node knows, and how often it was asked."""
    record = context.state.config_records.setdefault("times", ConfigRecord({"n": 0}))
    record["n"] = int(record["n"]) + 1  # type: ignore[arg-type]
    text = str(message.content.config_records["in"]["text"])
    known = {
        "text": text,
        "times": record["n"],
        "node": context.node_id,
        "part": context.node_config["partition-id"],
        "parts": context.node_config["num-partitions"],
        "seed": context.run_config["seed"],
    }
    return Message(RecordDict({"out": ConfigRecord(known)}), reply_to=message)  # type: ignore[arg-type]


@app.train("fail")
def fail(message: Message, context: Context) -> Message:
    raise RuntimeError("out of memory")


def ask(node: int, text: str = "x", kind: str = "query.echo") -> Message:
    return Message(RecordDict({"in": ConfigRecord({"text": text})}), node, kind)


def told(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records["out"])


@pytest.fixture
def grid() -> LocalGrid:
    return LocalGrid(app, {"seed": 7}, 3)


def test_nodes_have_ids_and_partitions_of_their_own(grid: LocalGrid) -> None:
    nodes = list(grid.get_node_ids())
    assert len(set(nodes)) == 3
    assert isinstance(grid, Grid)
    found = [told(reply) for reply in grid.send_and_receive([ask(node) for node in nodes])]
    assert [t["node"] for t in found] == nodes
    assert [t["part"] for t in found] == [0, 1, 2]
    assert {t["parts"] for t in found} == {3}
    assert {t["seed"] for t in found} == {7}


def test_a_reply_belongs_to_its_message(grid: LocalGrid) -> None:
    messages = [ask(node, text) for node, text in zip(grid.get_node_ids(), "abc", strict=True)]
    ids = list(grid.push_messages(messages))
    assert len(set(ids)) == 3
    assert [message.metadata.message_id for message in messages] == ids
    replies = list(grid.pull_messages(ids))
    assert [reply.metadata.reply_to_message_id for reply in replies] == ids
    assert [told(reply)["text"] for reply in replies] == ["a", "b", "c"]
    assert [reply.metadata.src_node_id for reply in replies] == list(grid.get_node_ids())


def test_a_reply_is_given_once_and_only_to_who_asks(grid: LocalGrid) -> None:
    nodes = list(grid.get_node_ids())
    first, second = grid.push_messages([ask(nodes[0], "a"), ask(nodes[1], "b")])
    assert list(grid.pull_messages([])) == []
    assert list(grid.pull_messages(["unknown"])) == []
    assert [told(reply)["text"] for reply in grid.pull_messages([second])] == ["b"]
    assert [told(reply)["text"] for reply in grid.pull_messages([first, second])] == ["a"]
    assert list(grid.pull_messages([first, second])) == []


def test_a_node_keeps_its_state_to_itself(grid: LocalGrid) -> None:
    first, second, _ = grid.get_node_ids()
    for _ in range(3):
        (reply,) = grid.send_and_receive([ask(first)])
    assert told(reply)["times"] == 3
    (reply,) = grid.send_and_receive([ask(second)])
    assert told(reply)["times"] == 1


def test_an_exception_becomes_an_error_reply_and_the_others_go_on(grid: LocalGrid) -> None:
    first, second, _ = grid.get_node_ids()
    replies = list(grid.send_and_receive([ask(first, kind="train.fail"), ask(second, "b")]))
    assert replies[0].has_error()
    assert replies[0].error.code == 2
    assert replies[0].error.reason == "RuntimeError: out of memory"
    assert replies[0].metadata.src_node_id == first
    assert told(replies[1])["text"] == "b"


def test_a_message_type_that_the_app_does_not_know_is_an_error_reply(grid: LocalGrid) -> None:
    (reply,) = grid.send_and_receive([ask(2, kind="train.unknown")])
    assert reply.has_error()


def test_messages_can_be_made_by_the_grid(grid: LocalGrid) -> None:
    message = grid.create_message(RecordDict({"in": ConfigRecord({"text": "made"})}), "query.echo", 3, "5", ttl=9.0)
    assert (message.metadata.dst_node_id, message.metadata.group_id, message.metadata.ttl) == (3, "5", 9.0)
    (reply,) = grid.send_and_receive([message])
    assert told(reply)["text"] == "made"


def test_a_server_app_sees_the_run_config_and_the_grid(grid: LocalGrid) -> None:
    seen: list[Any] = []
    server = ServerApp()

    @server.main()
    def main(given: Grid, context: Context) -> None:
        seen.extend([given, dict(context.run_config)])

    grid.run_server(server)
    assert seen == [grid, {"seed": 7}]


def test_what_a_server_app_raises_reaches_the_caller(grid: LocalGrid) -> None:
    server = ServerApp()

    @server.main()
    def main(given: Grid, context: Context) -> None:
        raise ZeroDivisionError("boom")

    with pytest.raises(ZeroDivisionError, match="boom"):
        grid.run_server(server)


def test_there_is_no_record_of_a_run(grid: LocalGrid) -> None:
    with pytest.raises(NotImplementedError):
        _ = grid.run
    grid.set_run(None)  # type: ignore[arg-type]


def test_no_reply_waits_for_another(grid: LocalGrid) -> None:
    began = time.perf_counter()
    for _ in range(50):
        list(grid.send_and_receive([ask(node) for node in grid.get_node_ids()]))
    assert (time.perf_counter() - began) / 50 < 0.05  # a round must not cost more than 50 ms
