"""Replies over a SuperLink: damaged ones, lying ones and ones that never come whole are those of their node alone."""

import json
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree

from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.records import error_of
from fedtta_flwr.strategies import mailbox
from fedtta_flwr.strategies.exchange import send_and_receive
from fedtta_flwr.strategies.mailbox import Mailbox

app = ClientApp()


@app.query("hello")
def answer(message: Message, context: Context) -> Message:
    record = ConfigRecord({"part": context.node_config["partition-id"]})
    array = ArrayRecord({"a": Array("uint8", (3,), "raw", b"abc")})
    return Message(RecordDict({"who": record, "array": array}), reply_to=message)


class SuperLink(LocalGrid):
    """A grid whose replies lie in a store, object by object, as those of a SuperLink do.

    `absent` objects have not arrived yet, `forgotten` ones never will; `lies` are what a node's reply says of itself,
    `as_root` the nodes that send no message.
    """

    node = Node(node_id=1)

    def __init__(self, nodes: int) -> None:
        super().__init__(app, {}, nodes)
        self.objects: dict[str, bytes] = {}
        self.absent: set[str] = set()
        self.forgotten: set[str] = set()
        self.confirmed: list[str] = []
        self.trees: dict[str, Any] = {}
        self.fetched: list[str] = []
        self.lies: dict[int, dict[str, object]] = {}
        self.as_root: dict[int, type] = {}

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=7)

    @property
    def _runtime_client(self) -> "SuperLink":
        return self

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for i, message in zip(ids, messages, strict=True):
            reply, node = self._replies.pop(i), message.metadata.dst_node_id
            proto = message_to_proto(reply)
            proto.metadata.reply_to_message_id = i
            reply.metadata.__dict__.update({f"_{key}": value for key, value in self.lies.get(node, {}).items()})
            root = reply.content if node in self.as_root else reply
            tree = get_object_tree(root)
            proto.metadata.message_id = tree.object_id
            self.objects |= {key: one.deflate() for key, one in get_all_nested_objects(root).items()}
            self.trees[i] = proto, tree
        return ids

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        found = [self.trees.pop(i) for i in request.message_ids if i in self.trees]  # each once, as Flower does
        return SimpleNamespace(messages_list=[m for m, _ in found], message_object_trees=[t for _, t in found])

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        self.fetched.append(request.object_id)
        return SimpleNamespace(
            object_found=request.object_id not in self.forgotten,
            object_available=request.object_id not in self.absent,
            object_content=self.objects[request.object_id],
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed.append(request.message_object_id)

    def parts_of(self, message_id: str) -> list[str]:
        return [one.object_id for one in iterate_object_tree(self.trees[message_id][1])]


def asked(grid: SuperLink, largest: float = math.inf) -> tuple[Mailbox, list[str]]:
    """Ask all nodes; return the mailbox and the messages' ids."""
    mail = Mailbox()
    messages = [Message(RecordDict(), node, "query.hello") for node in grid.get_node_ids()]
    mail.push(grid, messages, [largest] * len(messages))
    return mail, list(mail.waiting)


def said(replies: list[Message]) -> dict[int, object]:
    """What each node has said: its part, or what went wrong."""
    return {r.metadata.src_node_id: error_of(r) or r.content.config_records["who"]["part"] for r in replies}


def test_all_replies_come_once_and_whole() -> None:
    grid = SuperLink(3)
    mail, ids = asked(grid)
    replies = mail.pull(grid)
    assert said(replies) == {2: 0, 3: 1, 4: 2}
    assert {r.metadata.reply_to_message_id for r in replies} == set(ids)
    assert all(r.content.array_records["array"]["a"].data == b"abc" for r in replies)
    assert (len(grid.confirmed), mail.waiting, mail.pull(grid)) == (3, {}, [])


def test_one_that_is_still_being_sent_holds_up_no_other_and_nothing_is_fetched_twice() -> None:
    grid = SuperLink(2)
    mail, ids = asked(grid)
    late = grid.parts_of(ids[0])
    grid.absent = {late[-1]} - set(grid.parts_of(ids[1]))
    assert grid.absent
    assert said(mail.pull(grid)) == {3: 1}
    assert mail.pull(grid) == []
    grid.absent = set()
    assert said(mail.pull(grid)) == {2: 0}
    there = [part for part in late if part != late[-1]]
    assert all(grid.fetched.count(part) <= 2 for part in there)


def test_one_that_was_cut_off_is_its_nodes_alone() -> None:
    grid = SuperLink(2)
    mail, ids = asked(grid)
    grid.forgotten = {grid.parts_of(ids[0])[0]}
    assert said(mail.pull(grid)) == {2: "the device was cut off while it sent its reply (code 4)", 3: 1}
    assert not mail.waiting


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (b"", "malformed reply: "),
        (b"ConfigRecord  5\x00\xff\xff\xff\xff\xff", "malformed reply: "),
        (b"Message {} 3\x00abc", "malformed reply: "),
    ],
)
@pytest.mark.parametrize("part", [0, -1])
def test_one_that_is_no_message_is_its_nodes_alone(damaged: bytes, words: str, part: int) -> None:
    grid = SuperLink(2)
    mail, ids = asked(grid)
    own = [p for p in grid.parts_of(ids[0]) if p not in grid.parts_of(ids[1])]
    grid.objects[own[part]] = damaged
    found = said(mail.pull(grid))
    assert found.pop(3) == 1
    assert str(found[2]).startswith(words)
    assert "\n" not in str(found[2])


def test_a_root_of_another_kind() -> None:
    grid = SuperLink(2)
    grid.as_root = {2: RecordDict}
    mail, _ = asked(grid)
    assert said(mail.pull(grid)) == {2: "malformed reply: TypeError: RecordDict, expected a message (code 0)", 3: 1}


def test_who_sent_it_and_what_it_answers_is_not_for_the_reply_to_say() -> None:
    grid = SuperLink(2)
    grid.lies = {2: {"src_node_id": 3, "reply_to_message_id": "f" * 32}}
    messages = [Message(RecordDict(), node, "query.hello") for node in grid.get_node_ids()]
    replies = send_and_receive(grid, messages, 10.0)
    assert said(replies) == {2: 0, 3: 1}
    answers = {r.metadata.src_node_id: r.metadata.reply_to_message_id for r in replies}
    assert answers == {m.metadata.dst_node_id: m.metadata.message_id for m in messages}


def test_one_that_is_too_large_is_not_fetched_to_its_end() -> None:
    grid = SuperLink(2)
    mail, ids = asked(grid, largest=10_000)
    ours = grid.parts_of(ids[0])
    for part in ours[:-1]:  # children come first
        if part not in grid.parts_of(ids[1]):
            grid.objects[part] = b"x" * 20_000
    found = said(mail.pull(grid))
    assert found == {2: "malformed reply: larger than 10,000 bytes (code 0)", 3: 1}
    assert not mail.waiting
    assert not mail._largest


def test_one_whose_array_is_made_of_one_chunk_many_times_is_not_put_together() -> None:
    grid = SuperLink(1)
    mail, ids = asked(grid, largest=20_000)
    (array,) = [part for part in grid.parts_of(ids[0]) if grid.objects[part].startswith(b"Array ")]
    head, _, body = grid.objects[array].partition(b"\0")
    lie = json.dumps(json.loads(body) | {"arraychunk_ids": [0] * 2000}).encode()
    kind, chunks, _ = head.split(b" ")
    grid.objects[array] = b" ".join([kind, chunks, b"%d" % len(lie)]) + b"\0" + lie
    assert sum(map(len, grid.objects.values())) < 20_000
    (answer,) = said(mail.pull(grid)).values()
    assert str(answer).startswith("malformed reply: ValueError: arrays of ")
    assert str(answer).endswith(" bytes, at most 20,000 are taken (code 0)")


def test_one_of_too_many_parts_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MOST_PARTS", 2)
    grid = SuperLink(1)
    mail, ids = asked(grid)
    parts = grid.parts_of(ids[0])
    assert said(mail.pull(grid)) == {
        2: f"malformed reply: ValueError: {len(parts)} parts, at most 2 are taken (code 0)"
    }
    assert len(grid.fetched) == 2


def test_a_tree_of_its_own_making() -> None:
    """A reply may name parts that are none of a message's."""
    grid = SuperLink(1)
    mail, ids = asked(grid)
    proto, tree = grid.trees[ids[0]]
    grid.trees[ids[0]] = proto, ObjectTree(object_id=tree.object_id)
    assert str(said(mail.pull(grid))[2]).startswith("malformed reply: KeyError")
