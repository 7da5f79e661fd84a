"""The visit: receive, predict, adapt, describe, reply, for each client that this node hosts.

Between visits a client's memory lives in Flower's ``context.state``, so that any process can serve any client. A
process keeps only what belongs to no client: the networks, the data and the shared noise (`Workbench`).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.contracts import ClientStream, TakesPredictions
from fedtta_flwr.errors import ConfigError, FedTTAError
from fedtta_flwr.records import (
    DESCRIPTOR,
    INFO,
    SCORES,
    STATE,
    arrays_of,
    code_fingerprint,
    error_reply,
    from_arrays,
    stack,
    to_arrays,
    unstack,
)
from fedtta_flwr.workbench import Workbench, workbench

NOTHING_LATE = -1
#: where a client stands: its next slot, the slot whose `post` score is still to come, and the round of that
CURSOR = ("next-slot", "late-slot", "round")


def hello(message: Message, context: Context) -> Message:
    """Answer who is hosted here, how long their streams are, and which code answers."""
    try:
        config = RunConfig.from_flat(context.run_config)
        names = hosted_clients(config, context)
        others = sorted(set(_own_names(context)) - set(names))
        # A device that this run does not need may lack its data or its source model.
        bench = workbench(context) if names else None
        record = ConfigRecord(
            {
                "clients": list(names),
                "others": others,
                "slots": [len(bench.stream(name)) for name in names] if bench else [],
                "classes": bench.test_set.classes if bench else 0,
                "model": bench.fingerprint if bench else "",
                "code": code_fingerprint(),
                "config": config.fingerprint(),
            }
        )
    except FedTTAError as error:
        return error_reply(message, str(error))
    return Message(RecordDict({"hello": record}), reply_to=message)


def visit(message: Message, context: Context) -> Message:
    """Serve one message: every client in it receives, predicts, adapts and describes."""
    started = time.time()
    try:
        bench = workbench(context)
        request = message.content.config_records[INFO]
        reply = _visit_all(bench, request, arrays_of(message.content, STATE), context.state)
    except FedTTAError as error:
        return error_reply(message, str(error))
    reply.config_records[INFO]["started"] = started
    reply.config_records[INFO]["ended"] = time.time()
    return Message(reply, reply_to=message)


def hosted_clients(config: RunConfig, context: Context) -> tuple[str, ...]:
    """Return the names of the clients that a node hosts.

    A deployed node names them itself (node-config ``clients = "client-03,client-07"``), and hosts those of them that
    are of this run; of the P nodes of a simulation, node p hosts every client k with k mod P = p.

    Raises
    ------
    ConfigError
        If the node config names nobody, or somebody twice.
    """
    names = config.client_names()
    if "clients" in context.node_config:
        own = _own_names(context)
        if not own or len(set(own)) < len(own):
            raise ConfigError(
                f"node-config clients = {context.node_config['clients']!r}: allowed: one or more names, each once"
            )
        return tuple(sorted(set(own) & set(names)))
    try:
        part, parts = (
            int(context.node_config["partition-id"]),
            int(context.node_config["num-partitions"]),
        )
    except KeyError as missing:
        raise ConfigError(
            f'node-config: {missing} is absent; give clients = "NAME,...", or partition-id and num-partitions'
        ) from None
    return names[part::parts]


def _own_names(context: Context) -> list[str]:
    return [part.strip() for part in str(context.node_config.get("clients", "")).split(",") if part.strip()]


@dataclass
class _Visited:
    """What one client contributes to the reply."""

    domains: list[str] = field(default_factory=list)
    counts: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    failure: str = ""
    late_domain: str = ""
    late_round: int = 0
    samples: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    descriptor: Tensor | None = None
    memory: dict[str, ArrayRecord | ConfigRecord] = field(default_factory=dict)
    predictions: list[tuple[int, Tensor]] = field(default_factory=list)

    def count(self, key: str, correct: Tensor) -> None:
        """Enter counts [K] for the latest slot, since those before it may have had no labels."""
        self.counts.setdefault(key, {})[0 if key.startswith("late") else len(self.domains) - 1] = correct


def _visit_all(bench: Workbench, request: ConfigRecord, state: dict[str, Tensor], memory: RecordDict) -> RecordDict:
    clients: list[str] = list(request["clients"])  # type: ignore[arg-type]
    personal: list[str] = list(request["personal"])  # type: ignore[arg-type]
    rolled_back = bench.adapter.rolled_back
    visited = []
    for client in clients:
        own = unstack(state, personal.index(client)) if client in personal else None
        try:
            visited.append(_visit_one(bench, client, request, own, memory))
        except FedTTAError as error:  # a damaged file, say: no reason for the node's other clients to stop
            visited.append(_Visited(failure=str(error)))
    for v in visited:  # only now: a visit that fails half-way must leave no client half-advanced
        memory.update(v.memory)
    for client, v in zip(clients, visited, strict=True):
        for slot, probabilities in v.predictions:
            stream = bench.stream(client)
            if isinstance(stream, TakesPredictions):
                stream.predicted(slot, probabilities, int(request["round"]))  # type: ignore[arg-type]
    updated = [i for i, v in enumerate(visited) if v.samples]
    classes = bench.test_set.classes
    slots = max((len(v.domains) for v in visited), default=0)
    reply = RecordDict(
        {
            INFO: ConfigRecord(
                {
                    "clients": clients,
                    "failed": [client for client, v in zip(clients, visited, strict=True) if v.failure],
                    "failures": [v.failure for v in visited if v.failure],
                    "updated": [clients[i] for i in updated],
                    "samples": [visited[i].samples for i in updated],
                    "domains": [d for v in visited for d in v.domains + [""] * (slots - len(v.domains))],
                    "late-domains": [v.late_domain for v in visited],
                    "late-rounds": [v.late_round for v in visited],
                    "round": request["round"],
                    "rolled-back": bench.adapter.rolled_back - rolled_back,
                }
            ),
            SCORES: to_arrays(_stack_counts(visited, slots, classes)),
        }
    )
    if updated:
        reply[STATE] = to_arrays(stack([visited[i].state for i in updated]))
        described = [visited[i].descriptor for i in updated]
        if all(d is not None for d in described):
            reply[DESCRIPTOR] = to_arrays({DESCRIPTOR: torch.stack(described)})  # type: ignore[arg-type]
    return reply


def _stack_counts(visited: list[_Visited], slots: int, classes: int) -> dict[str, Tensor]:
    """Stack the counts per class into int32 [C, T, K]; where a client has fewer slots, nothing was seen."""
    stacked = {}
    for key in sorted({key for v in visited for key in v.counts}):
        length = 1 if key.startswith("late") else slots
        table = torch.zeros((len(visited), length, classes), dtype=torch.int32)
        for i, v in enumerate(visited):
            for j, counts in v.counts.get(key, {}).items():
                table[i, j] = counts
        stacked[key] = table
    return stacked


def _visit_one(
    bench: Workbench,
    client: str,
    request: ConfigRecord,
    personal: dict[str, Tensor] | None,
    memory: RecordDict,
) -> _Visited:
    """One client's visit: score the mixture that came, then go through the next slots in order."""
    stream, adapter, result = bench.stream(client), bench.adapter, _Visited()
    classes = bench.test_set.classes
    slot, late_slot, result.late_round = _recall(bench, client, memory)
    adapter.load_adapted_state(bench.initial if personal is None else personal)
    if "post" in bench.scores and late_slot != NOTHING_LATE:
        x, y = _batch(bench, stream, late_slot)
        result.late_domain = stream.domains[late_slot]
        if y is not None:
            result.count("late-seen", torch.bincount(y, minlength=classes))
            result.count("late", hits(adapter.predict(x), y, classes))
    end = min(slot + int(request["slots"]), len(stream))  # type: ignore[arg-type]
    late = NOTHING_LATE
    for current, x, y, is_last in _batches(bench, stream, range(slot, end)):
        if bench.config.reset == "each-shift" and current and stream.domains[current] != stream.domains[current - 1]:
            adapter.reset(bench.initial)
            bench.lone.reset(bench.initial)
        result.domains.append(stream.domains[current])
        result.samples += len(x)
        if y is None:
            outputs = _outputs(bench, x, scored=(), is_last=is_last)
            if isinstance(stream, TakesPredictions):
                result.predictions.append((current, outputs["tta"].softmax(dim=1).cpu()))
        else:
            outputs = _outputs(bench, x, scored=bench.scores, is_last=is_last)
            seen = torch.bincount(y, minlength=classes)
            result.count("seen", seen)
            for score in outputs.keys() & set(bench.scores):
                result.count(score, hits(outputs[score], y, classes))
            if "post" in bench.scores:
                result.count("post-seen", seen * (not is_last))
        if is_last:
            result.descriptor = bench.describe(str(request["descriptor"]), _options(request), x)
            late = NOTHING_LATE if y is None else current
    if result.samples:
        result.state = {name: t.clone() for name, t in adapter.adapted_state().items()}
    result.memory = _memory(bench, client, max(slot, end), late, int(request["round"]))  # type: ignore[arg-type]
    return result


def _batches(bench: Workbench, stream: ClientStream, slots: range) -> Iterator[tuple[int, Tensor, Tensor | None, bool]]:
    """Yield (slot, images, labels, is it the last?) of the slots that have samples; a live one may have none."""
    held: tuple[int, Tensor, Tensor | None] | None = None
    for slot in slots:
        x, y = _batch(bench, stream, slot)
        if len(x):
            if held is not None:
                yield *held, False
            held = slot, x, y
    if held is not None:
        yield *held, True


def _outputs(bench: Workbench, x: Tensor, *, scored: tuple[str, ...], is_last: bool) -> dict[str, Tensor]:
    """Adapt to one batch and return the logits [B, K] behind every score that can be had now, and "tta"."""
    outputs: dict[str, Tensor] = {}
    if "source" in scored:
        with torch.inference_mode():
            outputs["source"] = bench.source(x)
    if "local" in bench.scores:
        bench.lone.adapt(x)  # labels or not: it goes through the whole stream
    if "local" in scored:
        outputs["local"] = bench.lone.predict(x)
    if "pre" in scored:
        outputs["pre"] = bench.adapter.predict(x)
    outputs["tta"] = bench.adapter.adapt(x)
    if "post" in scored and not is_last:
        outputs["post"] = bench.adapter.predict(x)  # no aggregation follows: its own state is what it goes on with
    return outputs


def hits(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return how many samples of each class [K] the logits [B, K] get right."""
    return torch.bincount(labels[logits.argmax(dim=1) == labels], minlength=classes).cpu()


def _batch(bench: Workbench, stream: ClientStream, slot: int) -> tuple[Tensor, Tensor | None]:
    x, y = stream.batch(slot)
    return x.to(bench.device), None if y is None else torch.from_numpy(y).to(bench.device)


def _options(request: ConfigRecord) -> dict[str, Any]:
    prefix = "descriptor."
    return {key.removeprefix(prefix): value for key, value in request.items() if key.startswith(prefix)}


def _recall(bench: Workbench, client: str, memory: RecordDict) -> tuple[int, int, int]:
    """Put a client's own state into the adapters; return its next slot, the one still to be scored and its round."""
    bench.adapter.identity = bench.lone.identity = (bench.config.seed, client)
    bench.adapter.load_local_state(_kept(memory, f"{client}/local"))  # empty: a client that was never here
    if "local" in bench.scores:
        bench.lone.load_adapted_state(_kept(memory, f"{client}/lone") or bench.initial)
        bench.lone.load_local_state(_kept(memory, f"{client}/lone-local"))
    cursor = memory.config_records.get(client)
    if cursor is None:
        return 0, NOTHING_LATE, 0
    return tuple(int(cursor[key]) for key in CURSOR)  # type: ignore[arg-type, return-value]


def _kept(memory: RecordDict, key: str) -> dict[str, Tensor]:
    record = memory.array_records.get(key)
    return {} if record is None else from_arrays(record)


def _memory(bench: Workbench, client: str, *cursor: int) -> dict[str, ArrayRecord | ConfigRecord]:
    """Return what a client must find again at its next visit."""
    memory: dict[str, ArrayRecord | ConfigRecord] = {
        client: ConfigRecord(dict(zip(CURSOR, cursor, strict=True))),
        f"{client}/local": to_arrays(bench.adapter.local_state()),
    }
    if "local" in bench.scores:
        memory[f"{client}/lone"] = to_arrays(bench.lone.adapted_state())
        memory[f"{client}/lone-local"] = to_arrays(bench.lone.local_state())
    return memory
