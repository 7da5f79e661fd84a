"""The visit: receive, predict, adapt, describe, reply, for each client that this node hosts.

Between visits a client's memory lives in Flower's ``context.state``, so that any process can serve any client. A
process keeps only what belongs to no client: the networks, the data and the shared noise (`Workbench`).
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.streams import Stream
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


def hello(message: Message, context: Context) -> Message:
    """Answer who is hosted here, how long their streams are, and which code answers."""
    try:
        bench = workbench(context)
        names = hosted_clients(bench.config, context)
        record = ConfigRecord(
            {
                "clients": list(names),
                "slots": [len(bench.stream(name)) for name in names],
                "code": code_fingerprint(),
                "config": bench.config.fingerprint(),
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

    A deployed node names them itself (node-config ``clients = "client-03,client-07"``); of the P nodes of a
    simulation, node p hosts every client k with k mod P = p.

    Raises
    ------
    ConfigError
        If the node config names neither, or an unknown client.
    """
    names = config.client_names()
    own = context.node_config.get("clients")
    if own is not None:
        hosted = tuple(part.strip() for part in str(own).split(",") if part.strip())
        unknown = [name for name in hosted if name not in names]
        if unknown or not hosted:
            raise ConfigError(
                f"node-config clients = {own!r}: {unknown[0] if unknown else 'nobody'} is not of this run; "
                f"allowed: {names[0]} to {names[-1]}"
            )
        return tuple(sorted(hosted))
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


@dataclass
class _Visited:
    """What one client contributes to the reply."""

    domains: list[str] = field(default_factory=list)
    counts: dict[str, list[Tensor]] = field(default_factory=dict)
    late_domain: str = ""
    samples: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    descriptor: Tensor | None = None
    memory: dict[str, ArrayRecord | ConfigRecord] = field(default_factory=dict)

    def count(self, key: str, correct: Tensor) -> None:
        self.counts.setdefault(key, []).append(correct)


def _visit_all(bench: Workbench, request: ConfigRecord, state: dict[str, Tensor], memory: RecordDict) -> RecordDict:
    clients: list[str] = list(request["clients"])  # type: ignore[arg-type]
    personal: list[str] = list(request["personal"])  # type: ignore[arg-type]
    rolled_back = bench.adapter.rolled_back
    visited = []
    for client in clients:
        own = unstack(state, personal.index(client)) if client in personal else None
        visited.append(_visit_one(bench, client, request, own, memory))
    for v in visited:  # only now: a visit that fails half-way must leave no client half-advanced
        memory.update(v.memory)
    updated = [i for i, v in enumerate(visited) if v.samples]
    classes = bench.test_set.classes
    slots = max((len(v.domains) for v in visited), default=0)
    reply = RecordDict(
        {
            INFO: ConfigRecord(
                {
                    "clients": clients,
                    "updated": [clients[i] for i in updated],
                    "samples": [visited[i].samples for i in updated],
                    "domains": [d for v in visited for d in v.domains + [""] * (slots - len(v.domains))],
                    "late-domains": [v.late_domain for v in visited],
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
            for j, counts in enumerate(v.counts.get(key, [])):
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
    slot, late_slot = _recall(bench, client, memory)
    adapter.load_adapted_state(bench.initial if personal is None else personal)
    if "post" in bench.scores and late_slot != NOTHING_LATE:
        x, y = _batch(bench, stream, late_slot)
        result.late_domain = stream.domains[late_slot]
        if y is not None:
            result.count("late-seen", torch.bincount(y, minlength=classes))
            result.count("late", hits(adapter.predict(x), y, classes))
    last = min(slot + int(request["slots"]), len(stream)) - 1  # type: ignore[arg-type]
    for current in range(slot, last + 1):
        x, y = _batch(bench, stream, current)
        result.domains.append(stream.domains[current])
        result.samples += len(x)
        outputs = _outputs(bench, x, is_last=current == last)
        if y is not None:
            result.count("seen", torch.bincount(y, minlength=classes))
            for score, logits in outputs.items():
                result.count(score, hits(logits, y, classes))
            if "post" in bench.scores:
                seen = torch.bincount(y, minlength=classes)
                result.count("post-seen", seen * (current != last))
        if current == last:
            result.descriptor = bench.describe(str(request["descriptor"]), _options(request), x)
    if result.samples:
        result.state = {name: t.clone() for name, t in adapter.adapted_state().items()}
        result.memory = _memory(bench, client, next_slot=last + 1, late_slot=last)
    else:
        result.memory = _memory(bench, client, next_slot=slot, late_slot=NOTHING_LATE)
    return result


def _outputs(bench: Workbench, x: Tensor, is_last: bool) -> dict[str, Tensor]:
    """Adapt to one batch and return the logits [B, K] behind every score that can be had now."""
    outputs: dict[str, Tensor] = {}
    if "source" in bench.scores:
        with torch.inference_mode():
            outputs["source"] = bench.source(x)
    if "local" in bench.scores:
        bench.lone.adapt(x)
        outputs["local"] = bench.lone.predict(x)
    if "pre" in bench.scores:
        outputs["pre"] = bench.adapter.predict(x)
    tta = bench.adapter.adapt(x)
    if "tta" in bench.scores:
        outputs["tta"] = tta
    if "post" in bench.scores and not is_last:
        outputs["post"] = bench.adapter.predict(x)  # no aggregation follows: its own state is what it goes on with
    return outputs


def hits(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return how many samples of each class [K] the logits [B, K] get right."""
    return torch.bincount(labels[logits.argmax(dim=1) == labels], minlength=classes).cpu()


def _batch(bench: Workbench, stream: Stream, slot: int) -> tuple[Tensor, Tensor | None]:
    x, y = stream.batch(slot)
    return x.to(bench.device), None if y is None else torch.from_numpy(y).to(bench.device)


def _options(request: ConfigRecord) -> dict[str, Any]:
    prefix = "descriptor."
    return {key.removeprefix(prefix): value for key, value in request.items() if key.startswith(prefix)}


def _recall(bench: Workbench, client: str, memory: RecordDict) -> tuple[int, int]:
    """Put a client's own state into the adapters; return its next slot and the slot still to be scored."""
    bench.adapter.load_local_state(_kept(memory, f"{client}/local"))
    if "local" in bench.scores:
        bench.lone.load_adapted_state(_kept(memory, f"{client}/lone") or bench.initial)
        bench.lone.load_local_state(_kept(memory, f"{client}/lone-local"))
    cursor = memory.config_records.get(client)
    if cursor is None:
        return 0, NOTHING_LATE
    return int(cursor["next-slot"]), int(cursor["late-slot"])  # type: ignore[arg-type]


def _kept(memory: RecordDict, key: str) -> dict[str, Tensor]:
    record = memory.array_records.get(key)
    return {} if record is None else from_arrays(record)


def _memory(bench: Workbench, client: str, *, next_slot: int, late_slot: int) -> dict[str, ArrayRecord | ConfigRecord]:
    """Return what a client must find again at its next visit."""
    memory: dict[str, ArrayRecord | ConfigRecord] = {
        client: ConfigRecord({"next-slot": next_slot, "late-slot": late_slot}),
        f"{client}/local": to_arrays(bench.adapter.local_state()),
    }
    if "local" in bench.scores:
        memory[f"{client}/lone"] = to_arrays(bench.lone.adapted_state())
        memory[f"{client}/lone-local"] = to_arrays(bench.lone.local_state())
    return memory
