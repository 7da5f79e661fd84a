"""Visits: the same numbers however clients are hosted, and nothing travels that need not."""

import json
import math
import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedtta_flwr import client
from fedtta_flwr.adaptation.base import statistics
from fedtta_flwr.config import SCORES, RunConfig
from fedtta_flwr.data.datasets import open_test_set
from fedtta_flwr.data.streams import make_stream
from fedtta_flwr.errors import ConfigError, DataError, FedTTAError
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.records import DESCRIPTOR, INFO, STATE, arrays_of, error_of, from_arrays, payload_bytes, to_arrays
from fedtta_flwr.records import SCORES as COUNTS
from fedtta_flwr.registry import ADAPTERS
from fedtta_flwr.strategies.fedctta import FedCTTA
from fedtta_flwr.strategies.updates import Updates
from fedtta_flwr.visited import Visited

Run = Callable[..., Any]
CLIENTS = ["client-00", "client-01", "client-02", "client-03"]


class IdentityCTTA(FedCTTA):
    """FedCTTA with W forced to the identity."""

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        return torch.eye(len(super().collaboration_matrix(updates)))


class UniformCTTA(FedCTTA):
    """FedCTTA with W forced to 1/N."""

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        n = len(super().collaboration_matrix(updates))
        return torch.full((n, n), 1 / n, dtype=torch.float64)


def plugin(strategy: type[FedCTTA], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FEDTTA_PLUGINS", strategy.__module__.partition(".")[0])
    return f"{strategy.__module__}:{strategy.__name__}"


@pytest.fixture(scope="module")
def base(run_local: Run) -> Any:
    """FedCTTA with batch statistics on two nodes."""
    return run_local()


def personal_states(run: Any) -> dict[tuple[int, str], dict[str, bytes]]:
    """(round, client) -> what the server sent to it."""
    found = {}
    for message in run.sent:
        if message.metadata.message_type != "train.visit":
            continue
        info, state = message.content.config_records[INFO], arrays_of(message.content, STATE)
        for i, name in zip(info["places"], info["personal"], strict=True):
            found[info["round"], name] = {key: t[i].numpy().tobytes() for key, t in state.items()}
    return found


def metrics(run: Any) -> Any:
    """Everything in the results that is no time and no number of bytes (each node adds its own header)."""
    lines = [
        {key: line[key] for key in ("round", "clients", "samples", "accuracy", "collaboration")} for line in run.lines()
    ]
    with np.load(run.path / "collaboration.npz") as arrays:
        weights = arrays["weights"].tobytes()
    return run.summary["accuracy"], lines, weights, personal_states(run)


def visits(messages: list[Message]) -> list[Message]:
    return [m for m in messages if INFO in m.content.config_records]


# ---------------------------------------------------------------------------------------------------- who is where


@pytest.mark.parametrize(
    "hosting",
    [
        {"nodes": 1},
        {"nodes": 5},  # the last one hosts nobody
        {"nodes": 2, "backwards": True},
        {"nodes": 2, "hosting": ["client-02", "client-03,client-00, client-01"], "backwards": True},
    ],
    ids=["1", "5", "backwards", "unequal"],
)
def test_the_hosting_of_clients_changes_no_metric(base: Any, run_local: Run, hosting: dict[str, Any]) -> None:
    assert metrics(run_local(**hosting)) == metrics(base)


def test_names_of_ones_own_are_sorted_wherever_they_are_hosted(run_local: Run) -> None:
    names = {"clients": "gate,cam-9,cam-10,cam-1"}
    alone = run_local(nodes=1, **names)
    hosted = run_local(nodes=3, hosting=["gate,cam-1", "cam-10", "cam-9,another-runs"], backwards=True, **names)
    assert metrics(hosted) == metrics(alone)
    assert list(alone.summary["accuracy"]["post"]["per_client"]) == ["cam-1", "cam-10", "cam-9", "gate"]
    with np.load(alone.path / "collaboration.npz") as arrays:
        assert arrays["clients"].tolist() == ["cam-1", "cam-10", "cam-9", "gate"]


def test_one_message_a_node_and_round(base: Any) -> None:
    asked = [(m.content.config_records[INFO]["round"], m.metadata.dst_node_id) for m in visits(base.sent)]
    assert sorted(asked) == [(number, node) for number in range(1, 6) for node in (2, 3)]


def test_hosted_clients() -> None:
    config = RunConfig.from_flat({"num-clients": 5, "spatial-heterogeneity": 1.0})

    def hosted(**node_config: Any) -> tuple[str, ...]:
        return client.hosted_clients(config, Context(1, 2, node_config, RecordDict(), {}))

    assert hosted(**{"partition-id": 1, "num-partitions": 2}) == ("client-01", "client-03")
    assert hosted(**{"partition-id": 4, "num-partitions": 5}) == ("client-04",)
    assert hosted(**{"partition-id": 6, "num-partitions": 7}) == ()
    spread = [hosted(**{"partition-id": p, "num-partitions": 3}) for p in range(3)]
    assert sorted(name for part in spread for name in part) == list(config.client_names())
    assert hosted(clients=" client-03,client-00 ,") == ("client-00", "client-03")
    assert hosted(clients="client-02", **{"partition-id": 0, "num-partitions": 1}) == ("client-02",)
    assert hosted(clients="client-02,camera") == ("client-02",)  # another run's
    assert hosted(clients="camera") == ()


@pytest.mark.parametrize("key", ["strategy", "adapter"])
def test_a_device_that_the_run_does_not_need_need_not_allow_its_methods(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDTTA_PLUGINS", raising=False)
    LocalGrid(ClientApp(), {}, 1)  # a message may be made only where a grid is

    def answer(hosting: str) -> Message:
        context = Context(1, 2, {"clients": hosting}, RecordDict(), RunConfig().to_flat() | {key: "lab.mine:Mine"})
        return client.hello(Message(RecordDict(), 2, "query.hello"), context)

    assert answer("camera").content.config_records["hello"]["others"] == ["camera"]
    assert "FEDTTA_PLUGINS=lab" in str(error_of(answer("client-00")))


@pytest.mark.parametrize("node_config", [{}, {"partition-id": 0}, {"clients": ""}, {"clients": "client-0,client-0"}])
def test_a_node_config_that_names_nobody_known(node_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="node-config") as caught:
        client.hosted_clients(RunConfig(), Context(1, 2, node_config, RecordDict(), {}))
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("adapter", ["bn-stats", "entropy"])
def test_with_the_identity_fedctta_is_local_bit_for_bit(
    run_local: Run, monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    few = {"adapter": adapter, "rounds": 3, "entropy.learning-rate": 0.01}
    alone = run_local(strategy="local", **few)
    forced = run_local(strategy=plugin(IdentityCTTA, monkeypatch), **few)
    assert metrics(forced) == metrics(alone)
    assert len(personal_states(alone)) == 3 * 4
    # the column `local` of any run is the `post` of this one
    assert alone.summary["accuracy"]["local"] == alone.summary["accuracy"]["post"]
    assert forced.summary["accuracy"]["local"] == alone.summary["accuracy"]["post"]


def test_the_local_column_does_not_depend_on_the_strategy(base: Any, run_local: Run) -> None:
    alone = run_local(strategy="local", scores="post")
    assert base.summary["accuracy"]["local"] == alone.summary["accuracy"]["post"]
    assert personal_states(base) != personal_states(alone)  # though others did mix


def test_with_equal_weights_fedctta_is_fedavg(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    average = run_local(strategy="fedavg")
    assert metrics(run_local(strategy=plugin(UniformCTTA, monkeypatch))) == metrics(average)
    states = personal_states(average)
    assert all(states[2, name] == states[2, CLIENTS[0]] for name in CLIENTS)


def test_what_all_clients_of_a_node_share_is_sent_to_it_once(base: Any, run_local: Run) -> None:
    average = run_local(strategy="fedavg")
    for message in visits(average.sent):
        info, state = message.content.config_records[INFO], arrays_of(message.content, STATE)
        assert info["places"] == [0] * len(info["personal"])
        assert all(len(t) == 1 for t in state.values())
    # A client's bytes are those of its state, whoever else is there.
    assert average.summary["bytes"]["down"] == base.summary["bytes"]["down"]


def train_mode_moments(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits with batch statistics, and these statistics, from torch's own train mode with momentum 1."""
    model = deepcopy(model).train()
    counts = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            counts[name] = inputs[0].numel() // inputs[0].shape[1]

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
            module.register_forward_hook(remember(name))
    with torch.no_grad():
        logits = model(x)
    found = {key: t.double().clone() for key, t in statistics(model).items()}
    for key in found:
        if key.endswith("running_var"):  # torch keeps the unbiased one
            n = counts[key.removesuffix(".running_var")]
            found[key] *= (n - 1) / n
    return logits, found


def test_a_federation_by_hand(run_local: Run, resnet8: nn.Module, tiny_config: Callable[..., RunConfig]) -> None:
    """FedAvg x TTA-bn written out: what each client predicts before, while and after the mean of all statistics."""
    run = run_local(strategy="fedavg")
    config = tiny_config()
    test_set = open_test_set("digits", "", config.seed)
    streams = [make_stream(config, name, test_set) for name in CLIENTS]
    right = dict.fromkeys(("source", "pre", "tta", "post"), 0)
    current = deepcopy(resnet8)

    def hits(model: nn.Module, x: Tensor, y: Any) -> int:
        with torch.no_grad():
            return int((model.eval()(x).argmax(dim=1).numpy() == y).sum())

    for slot in range(4):
        moments = []
        for stream in streams:
            x, y = stream.batch(slot)
            right["source"] += hits(resnet8, x, y)
            right["pre"] += hits(current, x, y)
            logits, found = train_mode_moments(resnet8, x)
            right["tta"] += int((logits.argmax(dim=1).numpy() == y).sum())
            moments.append(found)
        mean = {key: torch.stack([m[key] for m in moments]).mean(dim=0).float() for key in moments[0]}
        current.load_state_dict(resnet8.state_dict() | mean)
        right["post"] += sum(hits(current, *stream.batch(slot)) for stream in streams)
    expected = {score: 100 * count / (4 * 4 * 5) for score, count in right.items()}
    assert {score: run.summary["accuracy"][score]["micro"] for score in right} == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------- what leaves a client


@pytest.mark.parametrize("adapter", ["bn-stats", "entropy", "source"])
def test_exactly_the_documented_things_leave_a_client(run_local: Run, resnet8: nn.Module, adapter: str) -> None:
    run = run_local(adapter=adapter, rounds=2)
    floats = {key for key, t in resnet8.state_dict().items() if t.is_floating_point() and "normalize" not in key}
    may_travel = {
        "bn-stats": {key for key in floats if "running" in key},
        "entropy": floats,
        "source": set(),
    }[adapter]
    replies = visits(run.replies)
    assert len(replies) == 2 * 3
    for reply in replies:
        content, info = reply.content, reply.content.config_records[INFO]
        count = len(info["clients"])
        closing = not info["updated"]
        assert set(content.keys()) == ({INFO, COUNTS} if closing else {INFO, COUNTS, STATE, DESCRIPTOR})
        assert not content.metric_records
        assert set(info.keys()) == {
            "clients", "failed", "failures", "updated", "samples", "domains", "late-domains", "late-rounds", "round",
            "steps", "undone", "largest-share", "confidence", "forgot", "started", "ended", "peak-memory", "peak-cuda",
        }  # fmt: skip
        assert len(json.dumps(dict(info))) < 640
        state = arrays_of(content, STATE)
        assert set(state) == (set() if closing else may_travel)
        for key, t in state.items():
            assert t.shape == (count, *resnet8.state_dict()[key].shape)
            assert t.dtype == torch.float32
        if not closing:
            assert {key: t.shape for key, t in arrays_of(content, DESCRIPTOR).items()} == {DESCRIPTOR: (count, 10)}
        counts = arrays_of(content, COUNTS)
        assert set(counts) <= {*SCORES, "seen", "post-seen", "late", "late-seen"}
        assert all(t.shape == (count, 1, 10) and t.dtype == torch.int32 for t in counts.values())


def test_exactly_the_documented_things_reach_a_client(base: Any) -> None:
    for message in visits(base.sent):
        info = message.content.config_records[INFO]
        assert set(message.content.keys()) == ({INFO} if info["round"] == 1 else {INFO, STATE})
        assert set(info.keys()) == {
            "run", "round", "slots", "begin", "clients", "personal", "finetune", "checkpoint", "resume", "resuming",
            "nonce", "places", "descriptor", "descriptor.samples", "descriptor.redraw", "descriptor.lagged",
        }  # fmt: skip
        assert info["slots"] == (0 if info["round"] == 5 else 1)
        assert info["personal"] == ([] if info["round"] == 1 else info["clients"])
        assert info["places"] == list(range(len(info["personal"])))


@pytest.mark.parametrize("strategy", ["local", "fedavg"])
def test_no_descriptor_leaves_where_none_is_asked_for(run_local: Run, strategy: str) -> None:
    run = run_local(strategy=strategy, rounds=1, scores="")
    assert all(DESCRIPTOR not in reply.content for reply in run.replies)


def test_bytes_are_those_of_the_messages(base: Any) -> None:
    for key, messages in (("up", base.replies), ("down", base.sent)):
        counted = sum(
            t.nbytes
            for message in messages
            for record in message.content.array_records.values()
            for t in from_arrays(record).values()
        )
        assert base.summary["bytes"][key] * 4 * 4 == pytest.approx(counted)
        assert counted == sum(payload_bytes(message) for message in messages) > 0


def test_no_sample_or_label_leaves_a_client(base: Any, tiny_config: Callable[..., RunConfig]) -> None:
    """The uploads of a round are far smaller than its images."""
    pixels = 4 * 5 * 3 * 32 * 32
    for number in range(1, 5):
        line = base.lines()[number - 1]
        assert line["bytes"]["up"] < pixels


# ------------------------------------------------------------------------------------------------ rounds and scores


@pytest.mark.parametrize("every", [2, 3, 100])
def test_several_slots_between_two_aggregations(base: Any, run_local: Run, every: int) -> None:
    run = run_local(**{"aggregate-every": every})
    assert run.summary["rounds"] == math.ceil(4 / every)
    assert sum(line["samples"] for line in run.lines()) == 4 * 4 * 5
    seen = dict.fromkeys(SCORES, 0)
    for reply in visits(run.replies):
        counts = arrays_of(reply.content, COUNTS)
        for score in counts:
            if score == "late":
                seen["post"] += int(counts["late-seen"].sum())
            elif score in SCORES:
                seen[score] += int(counts["post-seen" if score == "post" else "seen"].sum())
    assert seen == dict.fromkeys(SCORES, 80)  # every sample is scored once, whatever the rounds
    for score in ("source", "local", "tta"):  # these do not depend on aggregation, with statistics that have no memory
        assert run.summary["accuracy"][score] == base.summary["accuracy"][score]


def test_several_slots_alone_are_the_same_as_one_by_one(base: Any, run_local: Run) -> None:
    run = run_local(strategy="local", scores="local,pre,post", **{"aggregate-every": 3})
    assert run.summary["accuracy"]["post"] == run.summary["accuracy"]["local"]
    one_by_one = run_local(strategy="local", scores="pre")
    assert run.summary["accuracy"]["pre"] == one_by_one.summary["accuracy"]["pre"]


@pytest.mark.parametrize("scores", ["", "post", "source,tta", "local,pre"])
def test_scores_are_those_asked_for_and_do_not_depend_on_each_other(base: Any, run_local: Run, scores: str) -> None:
    run = run_local(scores=scores)
    names = [name for name in scores.split(",") if name]
    assert run.summary["accuracy"] == {name: base.summary["accuracy"][name] for name in names}
    if not names:  # no label leaves a client for nothing
        assert all(not arrays_of(reply.content, COUNTS) for reply in visits(run.replies))
    closing = "post" in names
    assert len(visits(run.sent)) == 2 * (4 + closing)  # no closing exchange for nothing
    assert personal_states(run).items() <= personal_states(base).items()


def test_a_batch_of_one(run_local: Run) -> None:
    run = run_local(**{"batch-size": 1})
    assert run.summary["finished"]
    assert [line["samples"] for line in run.lines()] == [4] * 4
    for accuracy in run.summary["accuracy"].values():
        assert accuracy["micro"] in [100 * k / 16 for k in range(17)]
    assert run.summary["rolled_back"] == 0


def test_fewer_rounds_are_the_beginning_of_more(base: Any, run_local: Run) -> None:
    run = run_local(rounds=2)
    assert run.summary["rounds"] == 2
    kept = ("round", "clients", "samples", "accuracy", "collaboration", "bytes", "screened")
    assert [{k: line[k] for k in kept} for line in run.lines()] == [
        {k: line[k] for k in kept} for line in base.lines()[:2]
    ]


def test_more_rounds_than_slots_end_with_the_streams(base: Any, run_local: Run) -> None:
    assert run_local(rounds=50, scores="post").summary["rounds"] == 4


def test_another_seed_is_another_run(base: Any, run_local: Run) -> None:
    assert metrics(run_local(seed=1, rounds=2))[3] != metrics(base)[3]


def test_hits_are_counted_by_class() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 3.0], [5.0, 0.0, 0.0]])
    visited = Visited(domains=["fog"])
    visited.score("pre", logits, torch.tensor([0, 1, 1, 2]))
    visited.score("post", logits[:0], torch.tensor([], dtype=torch.int64))
    assert {score: counts[0].tolist() for score, counts in visited.counts.items()} == {
        "pre": [1, 1, 0],
        "post": [0, 0, 0],
    }
    assert visited.unknown == 0


def test_what_is_not_finite_predicts_nothing() -> None:
    """The largest of NaN would be class 0."""
    visited = Visited(domains=["fog"])
    logits = torch.tensor([[torch.nan, torch.nan], [1.0, torch.nan], [torch.inf, 0.0], [2.0, 1.0], [-torch.inf, 1.0]])
    visited.score("tta", logits, torch.tensor([0, 1, 0, 0, 1]))
    assert visited.counts["tta"][0].tolist() == [1, 1]
    assert visited.unknown == 3


# ---------------------------------------------------------------------------------------------------- when it fails


class Node:
    """A node that hosts all clients, visited by hand."""

    def __init__(self, config: RunConfig) -> None:
        LocalGrid(ClientApp(), {}, 1)  # a message may be made only where a grid is
        run_id = uuid4().int >> 65  # not id(self): workbenches are kept by it, also when the node has gone
        self.context = Context(
            run_id, 2, {"partition-id": 0, "num-partitions": 1}, RecordDict(), dict(config.to_flat())
        )

    def visit(self, clients: list[str], state: dict[str, Tensor] | None = None, **changed: Any) -> Message:
        info: dict[str, Any] = {"run": "1", "round": 1, "slots": 1, "begin": 0, "checkpoint": 0, "resume": 0}
        known = clients if state else []
        info |= {"clients": clients, "resuming": [], "personal": known, "places": list(range(len(known)))}
        info |= {"descriptor": "", "finetune": False}
        content = RecordDict({INFO: ConfigRecord(info | changed)})
        if state:
            content[STATE] = to_arrays(state)
        message = Message(content, 2, "train.visit")
        return client.visit(message, self.context)

    def memory(self) -> dict[str, Any]:
        found: dict[str, Any] = {k: dict(r) for k, r in self.context.state.config_records.items()}
        for k, record in self.context.state.array_records.items():
            found[k] = {name: array.data for name, array in record.items()}
        return found


def uploaded(reply: Message) -> dict[str, bytes]:
    assert error_of(reply) is None
    return {key: t.numpy().tobytes() for key, t in arrays_of(reply.content, STATE).items()}


def state_for(reply: Message) -> dict[str, Tensor]:
    return arrays_of(reply.content, STATE)


def failures(reply: Message) -> dict[str, str]:
    info = reply.content.config_records[INFO]
    found = dict(zip(info["failed"], info["failures"], strict=True))
    assert found
    assert all("\n" not in text for text in found.values())
    return found


@pytest.mark.parametrize("adapter", ["bn-stats", "entropy"])
def test_a_visit_that_fails_leaves_every_memory_untouched(tiny_config: Callable[..., RunConfig], adapter: str) -> None:
    config = tiny_config(adapter=adapter)
    node, calm = Node(config), Node(config)
    first, expected_first = node.visit(CLIENTS[:2]), calm.visit(CLIENTS[:2])
    state = state_for(first)
    before = node.memory()
    assert {"client-00", "client-01"} <= set(before)

    key = next(iter(state))
    short = {k: t for k, t in state.items() if k != key}
    misshapen = state | {key: torch.zeros(2, 1, 1)}
    for bad in (short, misshapen):  # refused with one line each
        assert all(key in text for text in failures(node.visit(CLIENTS[:2], bad)).values())
        assert node.memory() == before
    found = failures(node.visit(CLIENTS[:2], descriptor="palm-lines"))
    assert list(found) == CLIENTS[:2]
    assert all("palm-lines" in text for text in found.values())
    assert node.memory() == before
    # What is no fault of the user's is, too, a client's and not the node's.
    found = failures(node.visit(CLIENTS[:2], descriptor="noise-logits", **{"descriptor.samples": "many"}))
    assert list(found) == CLIENTS[:2]
    assert all(text.startswith("ValueError: ") and "many" in text for text in found.values())
    assert node.memory() == before

    again, expected = node.visit(CLIENTS[:2], state), calm.visit(CLIENTS[:2], state_for(expected_first))
    assert uploaded(again) == uploaded(expected)
    assert node.memory() == calm.memory() != before
    assert node.context.state.config_records["client-00"]["cursor"][0] == 2


def test_a_client_that_fails_keeps_nobody_else_from_going_on(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config()
    node, calm = Node(config), Node(config)
    reply, expected = node.visit(["camera-7", *CLIENTS[:2]]), calm.visit(CLIENTS[:2])
    assert list(failures(reply)) == ["camera-7"]
    assert "camera-7" in failures(reply)["camera-7"]
    assert list(reply.content.config_records[INFO]["updated"]) == CLIENTS[:2]
    assert uploaded(reply) == uploaded(expected)
    assert node.memory() == calm.memory()


def test_a_fault_that_names_a_file_of_any_bytes_can_be_sent(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> None:
        raise DataError(f"{os.fsdecode(b'caf' + bytes([0xE9]))}.png: damaged")

    node = Node(tiny_config())
    with monkeypatch.context() as patch:
        patch.setattr("fedtta_flwr.client.visit_stream", damaged)
        reply = node.visit(CLIENTS[:1])
    assert failures(reply)[CLIENTS[0]] == r"caf\udce9.png: damaged"
    reply.content.config_records[INFO].deflate()
    monkeypatch.setattr("fedtta_flwr.client.workbench", damaged)
    assert error_of(node.visit(CLIENTS[:1])) == r"caf\udce9.png: damaged"


def test_visits_go_on_in_another_process_where_they_ended(tiny_config: Callable[..., RunConfig]) -> None:
    """Everything that a client must find again is in its context's state."""
    config = tiny_config(adapter="entropy")
    here, there = Node(config), Node(config)
    states = state_for(here.visit(CLIENTS[:1]))
    there.context.state = deepcopy(here.context.state)
    here.visit(CLIENTS[2:])  # somebody else uses the adapter in between
    one, other = here.visit(CLIENTS[:1], states), there.visit(CLIENTS[:1], states)
    assert uploaded(one) == uploaded(other)
    assert arrays_of(one.content, COUNTS).keys() == arrays_of(other.content, COUNTS).keys()
    for key, t in arrays_of(one.content, COUNTS).items():
        assert torch.equal(t, arrays_of(other.content, COUNTS)[key])


def test_a_stream_that_has_ended_uploads_nothing(tiny_config: Callable[..., RunConfig]) -> None:
    node = Node(tiny_config())
    node.visit(CLIENTS[:1], slots=100)
    reply = node.visit(CLIENTS[:1])
    assert set(reply.content.keys()) == {INFO, COUNTS}
    assert list(arrays_of(reply.content, COUNTS)) == ["late", "late-seen"]  # the last slot's `post`, once
    assert list(arrays_of(node.visit(CLIENTS[:1]).content, COUNTS)) == []


class FaultyGrid(LocalGrid):
    """Node 3 behaves badly in one round; it hosts one client."""

    def __init__(
        self,
        client_app: ClientApp,
        config: RunConfig,
        fault: Callable[[Message], Message],
        hosting: Sequence[str] = ("client-00,client-01,client-03", "client-02"),
    ) -> None:
        super().__init__(client_app, config.to_flat(), 2)
        for context, names in zip(self._contexts.values(), hosting, strict=True):
            context.node_config = {"clients": names}
        self.fault = fault
        self.received: dict[tuple[int, str], dict[str, bytes]] = {}

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        for message in visits(messages):
            info, state = message.content.config_records[INFO], arrays_of(message.content, STATE)
            for i, name in zip(info["places"], info["personal"], strict=True):
                self.received[info["round"], name] = {key: t[i].numpy().tobytes() for key, t in state.items()}
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        replies = list(super().pull_messages(message_ids))
        for i, reply in enumerate(replies):
            if reply.metadata.src_node_id == 3 and reply.metadata.group_id == "2":
                replies[i] = self.fault(reply)
        return replies


def poison(value: float) -> Callable[[Message], Message]:
    def fault(reply: Message) -> Message:
        state = arrays_of(reply.content, STATE)
        state["bn1.running_var"][0, 3] = value
        reply.content[STATE] = to_arrays(state)
        return reply

    return fault


def other_shape(reply: Message) -> Message:
    state = arrays_of(reply.content, STATE)
    reply.content[STATE] = to_arrays(state | {"secret": torch.zeros(1, 4)})
    return reply


def cast(dtype: torch.dtype) -> Callable[[Message], Message]:
    def fault(reply: Message) -> Message:
        state = arrays_of(reply.content, STATE)
        reply.content[STATE] = to_arrays({name: t.to(dtype) for name, t in state.items()})
        return reply

    return fault


def lacking(reply: Message) -> Message:
    state = arrays_of(reply.content, STATE)
    del state["bn1.running_var"]
    reply.content[STATE] = to_arrays(state)
    return reply


def widened(reply: Message) -> Message:
    state = arrays_of(reply.content, STATE)
    reply.content[STATE] = to_arrays(state | {"bn1.running_var": torch.ones(1, 99)})
    return reply


def empty(reply: Message) -> Message:
    reply.content[STATE] = to_arrays({})
    return reply


def enormous(reply: Message) -> Message:
    state = arrays_of(reply.content, STATE)
    reply.content[STATE] = to_arrays(state | {"bn1.running_mean": state["bn1.running_mean"].fill_(-3.4e38)})
    return reply


def undescribed(reply: Message) -> Message:
    del reply.content[DESCRIPTOR]
    return reply


def described_otherwise(reply: Message) -> Message:
    reply.content[DESCRIPTOR] = to_arrays({DESCRIPTOR: torch.zeros(1, 7)})
    return reply


def failed(reply: Message) -> Message:
    reply.content = RecordDict({"error": ConfigRecord({"text": "sensor unplugged"})})
    return reply


def test_a_bad_reply_is_left_out_as_if_that_client_had_not_been_there(
    apps: tuple[Any, Any], tiny_config: Callable[..., RunConfig], tmp_path: Any
) -> None:
    server_app, client_app = apps
    received, missing = {}, {}
    for name, fault in {
        "failed": failed,
        "nan": poison(float("nan")),
        "negative": poison(-1.0),
        "secret": other_shape,
    }.items():
        config = tiny_config(**{"output-dir": str(tmp_path / name), "rounds": 3})
        grid = FaultyGrid(client_app, config, fault)
        grid.run_server(server_app)
        received[name] = grid.received
        lines = [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        assert [line["clients"] for line in lines] == [4, 3, 4]
        missing[name] = lines[1]["screened"]
        assert list(missing[name]) == ["client-02"]
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["finished"] is True
        assert summary["screened"] == {"client-02": 1}
    assert missing["failed"]["client-02"] == "sensor unplugged"
    assert "bn1.running_var is not finite" in missing["nan"]["client-02"]
    assert "bn1.running_var is negative" in missing["negative"]["client-02"]
    assert "secret" in missing["secret"]["client-02"]
    for name in ("nan", "negative", "secret"):
        for at in [(number, other) for number in (2, 3) for other in CLIENTS]:
            assert received[name][at] == received["failed"][at]
    # it gets its last good personal state back
    assert received["nan"][3, "client-02"] == received["nan"][2, "client-02"]
    assert received["nan"][3, "client-00"] != received["nan"][2, "client-00"]


def test_a_round_without_anybody_ends_the_run(
    apps: tuple[Any, Any], tiny_config: Callable[..., RunConfig], tmp_path: Any
) -> None:
    server_app, client_app = apps
    config = tiny_config(**{"output-dir": str(tmp_path / "run")})

    class Silent(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            return [r if r.metadata.group_id in ("0", "1") else failed(r) for r in super().pull_messages(message_ids)]

    with pytest.raises(FedTTAError, match="take part; client-00, client-01, client-02 and 1 more: sensor unplugged"):
        Silent(client_app, config.to_flat(), 2).run_server(server_app)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["finished"], summary["rounds"]) == (False, 1)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_every_adapter_gives_the_same_numbers_however_clients_are_hosted(run_local: Run, adapter: str) -> None:
    """Its own state survives between visits, client by client, and so do its random draws."""
    few = {
        "adapter": adapter,
        "num-clients": 2,
        "corruptions": "contrast",
        "slots-per-corruption": 3,
        "rotta.update-every": 5,
        "note.update-every": 5,
        "memo.views": 4,
        "cotta.augmentations": 4,
    }
    one, two, other = run_local(nodes=1, **few), run_local(nodes=2, **few), run_local(nodes=1, **few, seed=1)
    assert one.summary["rounds"] == 3
    assert one.summary["accuracy"] == two.summary["accuracy"] != other.summary["accuracy"]
    assert personal_states(one) == personal_states(two)
    assert one.summary["rolled_back"] == 0


@pytest.mark.parametrize("adapter", ["entropy", "tent", "rotta"])
def test_reset_at_each_shift_makes_every_corruption_the_first_one(run_local: Run, adapter: str) -> None:
    """What a client meets before it leaves no trace; without the reset it does."""
    settings = {"adapter": adapter, "strategy": "local", "num-clients": 1, "spatial-heterogeneity": 1.0}
    settings |= {f"{adapter}.learning-rate": 0.05, "rotta.update-every": 5, "scores": "local,pre,tta,post"}

    def accuracies(corruptions: str, reset: str) -> dict[str, float]:
        found = run_local(**settings, corruptions=corruptions, reset=reset).summary["accuracy"]
        return {score: found[score]["per_corruption"]["contrast"] for score in found}

    alone = accuracies("contrast", "each-shift")
    assert accuracies("fog,contrast", "each-shift") == alone
    assert accuracies("fog,contrast", "never") != alone


def test_streams_without_a_single_slot_are_refused(
    run_local: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "no_slots.py").write_text(
        "class Nothing:\n"
        "    domains = ()\n"
        "    def __len__(self): return 0\n"
        "    def batch(self, slot): raise IndexError(slot)\n"
        "def stream(config, client): return Nothing()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", "no_slots")
    with pytest.raises(FedTTAError, match="streams of all clients are empty"):
        run_local(stream="no_slots:stream", classes=10, **{"output-dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


def test_a_stream_of_ones_own_may_have_larger_batches_if_the_server_knows_of_it(
    apps: tuple[Any, Any],
    run_local: Run,
    tiny_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "large_slots.py").write_text(
        "import numpy as np, torch\n"
        "class Large:\n"
        "    domains = ('a', 'b')\n"
        "    def __len__(self): return 2\n"
        "    def batch(self, slot): return torch.rand(7 + slot, 3, 32, 32), np.arange(7 + slot)\n"
        "def stream(config, client): return Large()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", "large_slots")
    few = {"num-clients": 2, "batch-size": 7, "adapter": "bn-stats", "strategy": "fedavg", "scores": "tta"}
    run = run_local(stream="large_slots:stream", classes=10, **few)
    assert sum(run.summary["accuracy"]["tta"]["per_class"]["seen"]) == 2 * (7 + 8)
    config = tiny_config(**few, classes=10, **{"output-dir": str(tmp_path / "run")})
    grid = LocalGrid(apps[1], config.to_flat(), 2)
    for context, name in zip(grid._contexts.values(), config.client_names(), strict=True):
        context.node_config = {"clients": name, "stream": "large_slots:stream"}
    with pytest.raises(FedTTAError, match=r"round 2: .* slot 1 has 8 samples, batch-size = 7: so many at most"):
        grid.run_server(apps[0])


@pytest.mark.parametrize("by_node", [False, True], ids=["of the run", "of a node"])
def test_images_of_a_stream_of_ones_own_that_are_not_in_0_to_1_are_warned_of_once_a_client(
    by_node: bool,
    apps: tuple[Any, Any],
    tiny_config: Callable[..., RunConfig],
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "odd_ranges.py").write_text(
        "import numpy as np, torch\n"
        "ENDS = {'client-00': (0, 1), 'client-01': (0, 255), 'client-02': (-2, 0.5), 'client-03': (0.5, 0.5)}\n"
        "class Ranged:\n"
        "    domains = ('a',) * 3\n"
        "    def __init__(self, client): self.ends = ENDS[client]\n"
        "    def __len__(self): return 3\n"
        "    def batch(self, slot):\n"
        "        x = torch.linspace(*self.ends, 5 * 3 * 32 * 32).view(5, 3, 32, 32)\n"
        "        return (x, np.arange(5)) if slot else (x[:0], np.arange(0))\n"  # nothing at first
        "def stream(config, client): return Ranged(client)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", "odd_ranges")
    stream = {"stream": "odd_ranges:stream"}
    overrides: dict[str, Any] = {"adapter": "bn-stats", "scores": "tta", "output-dir": str(tmp_path / "run")}
    config = tiny_config(**overrides, classes=10, **({} if by_node else stream))
    grid = LocalGrid(apps[1], config.to_flat(), 1)
    if by_node:
        (context,) = grid._contexts.values()
        context.node_config = {"clients": ",".join(config.client_names())} | stream
    grid.run_server(apps[0])
    found = sorted(line for line in warned if "images are" in line)
    allowed = "allowed: floating point in [0, 1], input normalisation is part of the model"
    assert found == [
        f"client-01: stream = 'odd_ranges:stream': images are float32 from 0 to 255; {allowed}",
        f"client-02: stream = 'odd_ranges:stream': images are float32 from -2 to 0.5; {allowed}",
    ]


def test_a_client_whose_images_are_no_numbers_is_named(
    run_local: Run, warned: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "no_numbers.py").write_text(
        "import numpy as np, torch\n"
        "class Failing:\n"
        "    domains = ('a',) * 3\n"
        "    def __init__(self, fails): self.fails = fails\n"
        "    def __len__(self): return 3\n"
        "    def batch(self, slot):\n"
        "        x = torch.rand(5, 3, 32, 32)\n"
        "        return x * (torch.nan if self.fails and slot else 1), np.arange(5)\n"
        "def stream(config, client): return Failing(client == 'client-02')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", "no_numbers")
    run = run_local(stream="no_numbers:stream", classes=10, adapter="tent", strategy="fedavg", nodes=1)
    assert run.summary["undone"] == {"client-02": run.summary["rolled_back"]} == {"client-02": 2}
    assert [line["undone"] for line in run.lines()] == [{}, {"client-02": 1}, {"client-02": 1}]
    (told,) = (line for line in warned if "undone" in line)
    assert told.startswith("round 2: client-02: all steps were undone")


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        (other_shape, "fedavgm"),
        (other_shape, "fedamp"),
        (lacking, "fedavg"),
        (widened, "fedavg"),
        (empty, "fedavg"),
        (cast(torch.float64), "fedavg"),
        (cast(torch.int32), "fedavg"),
        (cast(torch.complex64), "fedavg"),
        (enormous, "fedavg"),
        (undescribed, "fedctta"),
        (described_otherwise, "fedctta"),
        (described_otherwise, "fedtsa"),
    ],
)
def test_of_two_clients_the_bad_one_is_left_out_though_its_name_comes_first(
    fault: Callable[[Message], Message],
    strategy: str,
    apps: tuple[Any, Any],
    tiny_config: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    server_app, client_app = apps
    overrides = {"num-clients": 2, "strategy": strategy, "bn-pooling": "moments", "rounds": 3, "fedtsa.steps": 2}
    config = tiny_config(**overrides, **{"output-dir": str(tmp_path / "run"), "scores": "tta"})
    FaultyGrid(client_app, config, fault, ["client-01", "client-00"]).run_server(server_app)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["clients"] for line in lines] == [2, 1, 2]
    assert [list(line["screened"]) for line in lines] == [[], ["client-00"], []]
