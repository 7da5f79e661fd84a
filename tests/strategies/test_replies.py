"""Reading replies: what two nodes send becomes updates, counts and totals by client name."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.records import DESCRIPTOR, INFO, SCORES, STATE, error_reply, from_arrays, to_arrays
from fedtta_flwr.strategies.exchange import send_and_receive
from fedtta_flwr.strategies.replies import Limits, read_replies
from fedtta_flwr.strategies.rounds import Counts, Round
from fedtta_flwr.strategies.updates import Update

#: partition 0 is node 2, partition 1 is node 3
HOSTED = {2: ["a", "c"], 3: ["b"]}
Make = Callable[[Message], Message]


def reply_with(info: dict[str, Any], scores: dict[str, Any] | None = None, **states: dict[str, Any]) -> Make:
    def make(message: Message) -> Message:
        usual = {"failed": [], "failures": [], "peak-memory": 0, "peak-cuda": 0}
        usual |= dict.fromkeys(("steps", "undone"), [0] * len(info["clients"]))
        usual |= dict.fromkeys(("largest-share", "confidence"), [-1.0] * len(info["updated"]))
        content = RecordDict({INFO: ConfigRecord(usual | info)})
        if scores is not None:
            content[SCORES] = to_arrays({key: torch.tensor(t, dtype=torch.int32) for key, t in scores.items()})
        for name, tensors in states.items():
            content[name] = to_arrays({key: torch.tensor(t) for key, t in tensors.items()})
        return Message(content, reply_to=message)

    return make


NODE_2 = reply_with(
    {
        "clients": ["a", "c"],
        "updated": ["a", "c"],
        "samples": [4, 3],
        "domains": ["fog", "snow", "frost", ""],  # c had one slot only
        "late-domains": ["fog", ""],
        "late-rounds": [5, 0],  # a's reply to round 6 was lost, or it was not asked
        "round": 7,
        "steps": [2, 3],
        "undone": [2, 0],
        "largest-share": [0.96, -1.0],
        "confidence": [0.75, 0.5],
        "forgot": [],
        "started": 10.0,
        "ended": 13.0,
        "peak-memory": 300,
    },
    {
        # [client, slot, class]
        "seen": [[[2, 0], [1, 1]], [[0, 3], [0, 0]]],
        "tta": [[[1, 0], [1, 0]], [[0, 2], [0, 0]]],
        "post": [[[2, 0], [0, 0]], [[0, 0], [0, 0]]],
        "post-seen": [[[2, 0], [0, 0]], [[0, 0], [0, 0]]],
        "late": [[[0, 1]], [[0, 0]]],
        "late-seen": [[[1, 1]], [[0, 0]]],
    },
    **{STATE: {"w": [[1.0], [3.0]]}, DESCRIPTOR: {DESCRIPTOR: [[1.0, 1.5], [3.0, 3.5]]}},
)
NODE_3 = reply_with(
    {
        "clients": ["b"],
        "updated": ["b"],
        "samples": [5],
        "domains": ["contrast"],
        "late-domains": [""],
        "late-rounds": [0],
        "round": 7,
        "steps": [1],
        "undone": [1],
        "largest-share": [0.95],
        "forgot": ["b"],
        "started": 12.0,
        "ended": 16.0,
        "peak-memory": 200,
        "peak-cuda": 50,
    },
    {"seen": [[[3, 2]]], "tta": [[[0, 0]]]},
    **{STATE: {"w": [[2.0]]}, DESCRIPTOR: {DESCRIPTOR: [[2.0, 2.5]]}},
)


LIMITS = Limits(classes=2, slots=2, samples=5)


def read(
    *makes: Make | None, number: int = 7, backwards: bool = False, limits: Limits = LIMITS
) -> tuple[Round, dict[str, Update], list[Message]]:
    """Exchange a message with each node; a node without a maker stays silent."""
    app = ClientApp()

    @app.train("visit")
    def visit(message: Message, context: Context) -> Message:
        make = makes[int(context.node_config["partition-id"])]  # type: ignore[arg-type]
        assert make is not None
        return make(message)

    grid = LocalGrid(app, {}, len(makes))
    nodes = list(grid.get_node_ids())
    messages = [Message(RecordDict(), node, "train.visit") for node in nodes]
    answering = [m for m, make in zip(messages, makes, strict=True) if make is not None]
    replies = send_and_receive(grid, answering, 1.0)
    replies.sort(key=lambda reply: reply.metadata.src_node_id, reverse=backwards)
    sent = {m.metadata.message_id or f"silent-{m.metadata.dst_node_id}": m.metadata.dst_node_id for m in messages}
    asked_by = {message_id: HOSTED[node] for message_id, node in sent.items()}
    round_ = Round(number)
    return round_, read_replies(round_, replies, asked_by, limits), replies


@pytest.mark.parametrize("backwards", [False, True])
def test_updates_are_by_client_name(backwards: bool) -> None:
    round_, updates, _ = read(NODE_2, NODE_3, backwards=backwards)
    assert sorted(updates) == ["a", "b", "c"]
    for client, value, samples in (("a", 1.0, 4), ("b", 2.0, 5), ("c", 3.0, 3)):
        assert updates[client].state["w"].tolist() == [value]
        assert updates[client].descriptor is not None
        assert updates[client].descriptor.tolist() == [value, value + 0.5]  # type: ignore[union-attr]
        assert updates[client].examples == samples
    assert round_.missing == {}
    assert round_.samples == 12


def test_counts_are_by_client_slot_and_score() -> None:
    round_, _, _ = read(NODE_2, NODE_3)

    def form(c: Counts) -> tuple[Any, ...]:
        assert c.seen.dtype == c.correct.dtype == np.int64
        return c.round, c.client, c.domain, c.score, c.seen.tolist(), c.correct.tolist()

    assert sorted(map(form, round_.counts)) == sorted(
        [
            (7, "a", "fog", "tta", [2, 0], [1, 0]),
            (7, "a", "snow", "tta", [1, 1], [1, 0]),
            (7, "c", "frost", "tta", [0, 3], [0, 2]),
            (7, "b", "contrast", "tta", [3, 2], [0, 0]),
            (7, "a", "fog", "post", [2, 0], [2, 0]),  # the slot that no aggregation followed
            (5, "a", "fog", "post", [1, 1], [0, 1]),  # the late one belongs to the client's last round
        ]
    )


def test_what_each_client_saw() -> None:
    round_, _, _ = read(NODE_2, NODE_3)
    assert round_.domains == {"a": {"fog", "snow"}, "b": {"contrast"}, "c": {"frost"}}
    assert read(None, None)[0].domains == {}


def test_totals_of_a_round() -> None:
    round_, _, replies = read(NODE_2, NODE_3)
    assert (round_.largest_share, round_.collapsed) == ({"a": 0.96, "b": 0.95}, ("a",))
    assert round_.confidence == {"a": 0.75, "c": 0.5}
    assert (round_.steps, round_.undone) == ({"a": 2, "b": 1, "c": 3}, {"a": 2, "b": 1})
    assert round_.seconds["client"] == pytest.approx(3.0 + 4.0)
    assert round_.seconds["busy"] == pytest.approx(6.0)
    expected = sum(
        t.nbytes
        for reply in replies
        for record in reply.content.array_records.values()
        for t in from_arrays(record).values()
    )
    assert round_.bytes_up == expected > 0


def test_a_node_that_says_what_went_wrong_loses_its_clients_only() -> None:
    round_, updates, _ = read(lambda message: error_reply(message, "disk full"), NODE_3)
    assert round_.missing == {"a": "disk full", "c": "disk full"}
    assert list(updates) == ["b"]
    assert round_.samples == 5


def test_a_node_that_raises_loses_its_clients_only() -> None:
    def fail(message: Message) -> Message:
        raise ZeroDivisionError("boom")

    round_, updates, _ = read(fail, NODE_3)
    assert sorted(round_.missing) == ["a", "c"]
    assert "boom" in round_.missing["a"]
    assert "code" in round_.missing["a"]
    assert list(updates) == ["b"]


def test_a_loss_that_is_no_number_is_left_out() -> None:
    def trained(message: Message) -> Message:
        reply = NODE_2(message)
        reply.content.config_records[INFO]["losses"] = [0.25, nan]
        return reply

    assert read(trained, None)[0].losses == {"a": 0.25}


def test_a_silent_node_is_missing() -> None:
    round_, updates, _ = read(NODE_2, None)
    assert round_.missing == {"b": "no reply in time"}
    assert sorted(updates) == ["a", "c"]


def test_memory_is_that_of_the_largest_client() -> None:
    assert read(NODE_2, NODE_3)[0].memory == {"client": 300, "cuda": 50}
    assert read(NODE_2, None)[0].memory == {"client": 300}  # nothing ran on a GPU


def test_nobody_replies() -> None:
    round_, updates, _ = read(None, None)
    assert updates == {}
    assert round_.missing == dict.fromkeys("abc", "no reply in time")
    assert (round_.samples, round_.bytes_up, round_.seconds["client"]) == (0, 0, 0)


def test_a_closing_reply_has_no_update() -> None:
    info = {"clients": ["b"], "updated": [], "samples": [], "domains": [], "late-domains": ["fog"], "forgot": []}
    info |= {"late-rounds": [8], "round": 9}
    closing = reply_with(info | {"started": 1.0, "ended": 2.0}, {"late": [[[1, 1]]], "late-seen": [[[2, 3]]]})
    round_, updates, _ = read(None, closing, number=9)
    assert updates == {}
    late = [c for c in round_.counts if c.client == "b"]
    assert [(c.round, c.domain, c.score, c.correct.tolist()) for c in late] == [(8, "fog", "post", [1, 1])]
    assert sorted(round_.missing) == ["a", "c"]


def test_a_reply_without_scores_or_descriptor() -> None:
    info = {"clients": ["b"], "updated": ["b"], "samples": [5], "domains": ["fog"], "late-domains": [""]}
    info |= {"late-rounds": [0], "round": 7}
    bare = reply_with(info | {"forgot": [], "started": 1.0, "ended": 2.0}, **{STATE: {"w": [[2.0]]}})
    round_, updates, _ = read(NODE_2, bare)
    assert updates["b"].descriptor is None
    assert all(c.client != "b" for c in round_.counts)


@pytest.mark.parametrize(
    ("started", "ended", "seconds"),
    [(10.0, 12.5, 2.5), (10.0, 9.0, 0.0), (10.0, 1e300, 60.0), (-1.7e308, 1.7e308, 0.0), (1.7e308, -1.7e308, 0.0)],
)
def test_nobody_works_longer_than_a_round_lasts(started: float, ended: float, seconds: float) -> None:
    """Clocks are set, and devices may say what they like."""

    def app(message: Message) -> Message:
        reply = NODE_3(message)
        reply.content.config_records[INFO].update({"started": started, "ended": ended})
        return reply

    round_, updates, _ = read(None, app, limits=replace(LIMITS, seconds=60.0))
    assert list(updates) == ["b"]
    assert round_.seconds["client"] == round_.seconds["busy"] == seconds


def test_too_large_a_reply_is_not_decoded() -> None:
    def huge(message: Message) -> Message:
        reply = NODE_3(message)
        reply.content[STATE] = to_arrays({"w": torch.zeros(2**19)})
        return reply

    round_, updates, _ = read(NODE_2, huge, limits=replace(LIMITS, bytes=100.0))
    assert sorted(updates) == ["a", "c"]
    assert "2,09" in round_.missing["b"]
    assert "bytes of tensors, at most 100 a client are taken" in round_.missing["b"]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32, torch.int64])
def test_counts_are_of_one_kind(dtype: torch.dtype) -> None:
    def other(message: Message) -> Message:
        reply = NODE_3(message)
        counts = {name: t.to(dtype) for name, t in from_arrays(reply.content.array_records[SCORES]).items()}
        reply.content[SCORES] = to_arrays(counts)
        return reply

    round_, updates, _ = read(NODE_2, other)
    assert sorted(updates) == ["a", "c"]
    assert f"counts of {str(dtype).removeprefix('torch.')}, expected int32" in round_.missing["b"]


def test_what_has_expired_was_not_in_time() -> None:
    message = Message(RecordDict(), 3, "train.visit")
    message.metadata.__dict__["_message_id"] = "sent"
    late = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "not found in the database"), reply_to=message)
    round_ = Round(7)
    assert read_replies(round_, [late], {"sent": ["b"]}, LIMITS) == {}
    assert round_.missing == {"b": "no reply in time"}


@pytest.mark.parametrize(
    ("spoilt", "word"),
    [
        ({"samples": []}, "samples of 0 clients, 1 adapted"),
        ({"samples": [-5]}, "-5, expected a whole number from 0 to 10"),
        ({"samples": [11]}, "11, expected a whole number from 0 to 10"),
        ({"samples": [nan]}, "nan, expected"),
        ({"samples": 5}, "samples is int, expected a list"),
        ({"undone": ["x"]}, "'x', expected a whole number"),
        ({"undone": [inf]}, "inf, expected"),
        ({"undone": [4]}, "4, expected a whole number from 0 to 3"),
        ({"undone": []}, "undone of 0 clients"),
        ({"undone": 0}, "undone is int, expected a list"),
        ({"largest-share": [1.1]}, "1.1, expected a share from 0 to 1, or -1"),
        ({"largest-share": [float("nan")]}, "nan, expected a share"),
        ({"largest-share": [1]}, "1, expected a share"),
        ({"largest-share": []}, "argument"),
        ({"confidence": [-0.5]}, "-0.5, expected a share from 0 to 1, or -1"),
        ({"confidence": 0.5}, "confidence is float, expected a list"),
        ({"losses": []}, "argument"),
        ({"losses": [1]}, "1, expected a number"),
        ({"losses": 0.5}, "losses is float, expected a list"),
        ({"steps": [4]}, "4, expected a whole number from 0 to 3"),
        ({"steps": [2, 2], "undone": [0, 0]}, "steps of 2 clients, 1 were asked"),
        ({"peak-memory": inf}, "inf, expected"),
        ({"started": nan}, "nan, expected seconds"),
        ({"ended": inf}, "inf, expected seconds"),
        ({"round": 6}, "one to round 6"),
        ({"round": "x"}, "'x', expected"),
        ({"late-rounds": [7]}, "7, expected a whole number from 0 to 6"),
        ({"late-rounds": [-1]}, "-1, expected"),
        ({"forgot": [b"b"]}, "forgot holds something else than names"),
        ({"forgot": ["c"]}, "c, who was not asked"),
        ({"domains": [b"fog"]}, "domains holds something else"),
        ({"domains": ["\x1b[31mfog"]}, "domains holds something else"),
        ({"domains": ["f" * 201]}, "domains holds something else than names of up to 200 characters"),
        ({"domains": ["fog"] * 3}, "3, expected a whole number from 0 to 2"),
        ({"late-domains": [1]}, "late-domains holds something else"),
        ({"failed": ["b"], "failures": ["disk"]}, "b failed and adapted at once"),
        ({"clients": ["b", "b"]}, "nothing of one twice"),
        ({"clients": ["a"]}, "a, who was not asked"),
        ({"failed": ["c"], "failures": ["disk"]}, "c, who was not asked"),
        ({"clients": [], "updated": [], "samples": [], "domains": [], "late-domains": []}, "nothing of b"),
    ],
)
def test_a_malformed_reply_loses_its_clients_only(spoilt: dict[str, Any], word: str) -> None:
    info = {"clients": ["b"], "updated": ["b"], "samples": [5], "domains": ["fog"], "late-domains": [""]}
    info |= {"late-rounds": [0], "round": 7, "steps": [3], "forgot": [], "started": 1.0, "ended": 2.0}
    round_, updates, replies = read(NODE_2, reply_with(info | spoilt, **{STATE: {"w": [[2.0]]}}))
    assert sorted(updates) == ["a", "c"]
    assert list(round_.missing) == ["b"]
    assert word in round_.missing["b"]
    _, _, alone = read(NODE_2, None)
    assert len(replies) == len(alone) + 1
    assert round_.undone == {"a": 2}


@pytest.mark.parametrize(
    ("scores", "word"),
    [
        ({"seen": [[[3, 2, 0]]], "tta": [[[0, 0, 0]]]}, "shape"),
        ({"seen": [[[3, 2]]], "tta": [[[4, 0]]]}, "more than were seen"),
        ({"seen": [[[3, 2]]], "tta": [[[-1, 0]]]}, "negative"),
        ({"tta": [[[1, 0]]]}, "KeyError"),
        ({"seen": [[[3, 3]]], "tta": [[[0, 0]]]}, "of 6 samples; a slot has 5 at most"),
        ({"seen": [[[1, 1]] * 2], "tta": [[[0, 0]] * 2]}, "shape"),  # of two slots, where there was one
        ({"late": [[[0, 0]] * 2], "late-seen": [[[0, 0]] * 2]}, "shape"),
        ({"seen": [[[3, 2]]], "best": [[[0, 0]]]}, "unknown score 'best'"),
    ],
)
def test_counts_that_cannot_be_are_refused(scores: dict[str, Any], word: str) -> None:
    info = {"clients": ["b"], "updated": ["b"], "samples": [5], "domains": ["fog"], "late-domains": [""]}
    info |= {"late-rounds": [0], "round": 7, "forgot": [], "started": 1.0, "ended": 2.0}
    round_, updates, _ = read(NODE_2, reply_with(info, scores, **{STATE: {"w": [[2.0]]}}))
    assert sorted(updates) == ["a", "c"]
    assert word in round_.missing["b"]
    assert all(c.client != "b" for c in round_.counts)


def headed(head: bytes) -> Callable[[bytes], bytes]:
    """Put another head before the data of an array."""
    return lambda data: head + data[len(head) :]


def saying(**other: Any) -> Callable[[bytes], bytes]:
    """Let the data of an array say something else of each tensor."""

    def change(data: bytes) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.dumps({name: about | other for name, about in json.loads(data[8:end]).items()}).encode()
        return len(header).to_bytes(8, "little") + header + data[end:]

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        {"data": lambda data: b""},
        {"data": lambda data: data[:-1]},
        {"data": headed(b"PK\x03\x04")},
        {"data": headed(b"\xff" * 8)},
        {"data": lambda data: data + b"x"},
        {"data": saying(shape=[9**9])},
        {"data": saying(shape=[10**13], data_offsets=[0, 4 * 10**13])},
        {"data": saying(shape=[1, 0])},
        {"data": saying(dtype="BOGUS")},
        {"data": saying(dtype="C64")},
        {"dtype": lambda dtype: "bogus"},
        {"dtype": lambda dtype: "float64"},
        {"shape": lambda shape: [10**13]},
        {"stype": lambda stype: "pickle"},
        {"stype": lambda stype: "numpy.ndarray"},
    ],
)
@pytest.mark.parametrize("record", [STATE, DESCRIPTOR, SCORES])
def test_arrays_that_are_not_what_they_say_lose_their_clients_only(record: str, spoil: dict[str, Any]) -> None:
    def make(message: Message) -> Message:
        reply = NODE_3(message)
        arrays = reply.content.array_records[record]
        for name, array in list(arrays.items()):
            for field, change in spoil.items():
                setattr(array, field, change(getattr(array, field)))
            arrays[name] = array
        return reply

    round_, updates, _ = read(NODE_2, make)
    assert sorted(updates) == ["a", "c"]
    assert round_.missing["b"].startswith("malformed reply: ")
    assert "\n" not in round_.missing["b"]
    assert round_.bytes_up == read(NODE_2, None)[0].bytes_up


@pytest.mark.parametrize("content", [{}, {"error": ConfigRecord({"text": "x\n\x1b[31m" + "y" * 9999})}])
def test_a_reply_of_nothing_or_of_too_much(content: dict[str, Any]) -> None:
    round_, updates, _ = read(NODE_2, lambda message: Message(RecordDict(content), reply_to=message))
    assert sorted(updates) == ["a", "c"]
    assert round_.missing["b"].isprintable()
    assert len(round_.missing["b"]) < 600


def test_what_nobody_asked_for_is_refused_whole() -> None:
    def make(message: Message) -> Message:
        reply = NODE_3(message)
        reply.content["more"] = to_arrays({"w": torch.zeros(1000)})
        return reply

    round_, updates, _ = read(NODE_2, make)
    assert sorted(updates) == ["a", "c"]
    assert "unknown record 'more'" in round_.missing["b"]
    assert round_.bytes_up == read(NODE_2, None)[0].bytes_up
    assert all(c.client != "b" for c in round_.counts)


def test_a_client_that_failed_is_missing_the_others_of_its_node_are_not() -> None:
    info = {"clients": ["a", "c"], "updated": ["c"], "samples": [3], "domains": ["", ""], "late-domains": ["", ""]}
    info |= {"late-rounds": [0, 0], "round": 7, "forgot": [], "started": 1.0, "ended": 2.0}
    info |= {"failed": ["a"], "failures": ["5.png: damaged"]}
    round_, updates, _ = read(reply_with(info, {}, **{STATE: {"w": [[3.0]]}}), NODE_3)
    assert sorted(updates) == ["b", "c"]
    assert round_.missing == {"a": "5.png: damaged"}
