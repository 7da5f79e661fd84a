"""The visit: receive, predict, adapt, describe, reply, for each client that this node hosts.

Between visits a client's state lives in the node's `Memory`, so that any process can serve any client. A process keeps
only what belongs to no client: the networks, the data and the shared noise (`Workbench`).
"""

import math
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from logging import WARNING
from typing import TYPE_CHECKING

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.logger import log
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError, FedTTAError, few, in_words
from fedtta_flwr.ftta import visit_stream
from fedtta_flwr.memory import ONE_PROCESS, Memory, state_folder
from fedtta_flwr.plugins import ON_DEVICES, device_code, log_once, plugin_code
from fedtta_flwr.processes import given_up_after
from fedtta_flwr.records import (
    BINS,
    DESCRIPTOR,
    HEADS,
    INFO,
    SCORES,
    STATE,
    WEIGHTS,
    arrays_of,
    code_fingerprint,
    error_reply,
    sendable,
    to_arrays,
    to_stacked_arrays,
    unstack,
)
from fedtta_flwr.resolve import names_in
from fedtta_flwr.usage import peak_cuda, peak_memory
from fedtta_flwr.visited import Visited
from fedtta_flwr.workbench import Workbench, workbench

if TYPE_CHECKING:
    from fedtta_flwr.tgfl import HeadBench

GIVE_UP_AFTER = "give-up-after"  # in a node config: seconds
SHORTEST_PATIENCE = 600.0  # seconds, where the node config says nothing: the first answer may have data to prepare
#: keys of the run config that may name code of the user's own, which a device has to allow
IMPORTED = ("strategy", *ON_DEVICES)


def hello(message: Message, context: Context) -> Message:
    """Answer who is hosted here, how long their streams are, and which code answers."""
    try:
        with patience(context, "hello"):
            return Message(RecordDict({"hello": _hello(context)}), reply_to=message)
    except FedTTAError as error:
        return error_reply(message, str(error))
    except PermissionError as error:
        return error_reply(message, f"{in_words(error)}; give the node's user the right to enter and read it")


def _hello(context: Context) -> ConfigRecord:
    # A device that this run does not need may lack its data, its source model, or leave to import its methods.
    lenient = {key: value for key, value in context.run_config.items() if key not in IMPORTED}
    names = hosted_clients(RunConfig.from_flat(lenient), context)
    others = sorted(set(_own_names(context)) - set(names))
    bench = workbench(context) if names else None
    if bench and "clients" in context.node_config:  # its files may be others than the server's, which has looked
        bench.check()
    slots, faults = _lengths(bench, names) if bench else ({}, {})
    return ConfigRecord(
        {
            "clients": list(slots),
            "others": others,
            "failed": list(faults),
            "failures": list(map(sendable, faults.values())),
            "slots": list(slots.values()),
            "classes": bench.classes if bench else 0,
            "model": bench.fingerprint if bench else "",
            "data": bench.dealt if bench else "",
            "code": code_fingerprint(),
            "plugins": device_code(bench.config) if bench else [],
            "config": RunConfig.from_flat(context.run_config).fingerprint() if names else "",
        }
    )


def _lengths(bench: "Workbench | HeadBench", names: tuple[str, ...]) -> tuple[dict[str, int], dict[str, str]]:
    """Return how long the clients' streams are, and what is wrong with those that cannot be opened.

    A gateway whose one camera is away shall serve its others.

    Raises
    ------
    FedTTAError
        If not a single one can be opened.
    """
    slots, faults = dict[str, int](), dict[str, str]()
    for name in names:
        try:
            slots[name] = bench.slots(name)
        except FedTTAError as error:
            if name == names[-1] and not slots:
                raise
            faults[name] = str(error)
    return slots, faults


def visit(message: Message, context: Context) -> Message:
    """Serve one message: every client in it receives, predicts, adapts and describes."""
    try:
        with patience(context, "a visit"):
            return Message(_visit(message, context), reply_to=message)
    except FedTTAError as error:
        return error_reply(message, str(error))


def _visit(message: Message, context: Context) -> RecordDict:
    started = time.time()
    bench = workbench(context)
    request = message.content.config_records[INFO]
    folder = state_folder(bench.config, context, str(request["run"]))
    memory = Memory(context.state, folder, restarts=ONE_PROCESS not in context.node_config)
    reply = _visit_all(bench, request, arrays_of(message.content, STATE), memory)
    about = reply.config_records[INFO]
    about["peak-memory"], about["peak-cuda"] = peak_memory(), peak_cuda()
    about["started"], about["ended"] = started, time.time()
    return reply


def patience(context: Context, what: str) -> AbstractContextManager[None]:
    """Return what ends this process if a device's answer takes longer than anybody waits for it.

    A camera, or a folder of another machine's, may hang, and then so would the device for good: the next message, which
    has a process of its own, waits for this one. In a simulation a process serves many clients, and is the run's.
    """
    if "clients" not in context.node_config or ONE_PROCESS in context.node_config:
        return nullcontext()
    named = context.node_config.get(GIVE_UP_AFTER, 0)
    try:
        seconds = float(named)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ConfigError(f"node-config {GIVE_UP_AFTER} = {named!r}: allowed: seconds, or 0 to leave it to the run")
    waited = float(context.run_config.get("round-timeout", RunConfig().round_timeout))
    return given_up_after(seconds or max(SHORTEST_PATIENCE, waited), what)


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
    return names_in(str(context.node_config.get("clients", "")))


def _visit_all(
    bench: "Workbench | HeadBench", request: ConfigRecord, state: dict[str, Tensor], memory: Memory
) -> RecordDict:
    clients: list[str] = list(request["clients"])  # type: ignore[arg-type]
    personal: list[str] = list(request["personal"])  # type: ignore[arg-type]
    places: list[int] = list(request["places"])  # type: ignore[arg-type]
    place = dict(zip(personal, places, strict=True))
    taken: list[int] = []
    undone: list[int] = []
    visited: list[Visited] = []
    for client in clients:
        steps, rolled_back = bench.steps, bench.rolled_back
        own = unstack(state, place[client]) if client in place else None
        try:
            if isinstance(bench, Workbench):
                with plugin_code(bench.config.model), plugin_code(bench.config.adapter):
                    visited.append(visit_stream(bench, client, request, own, memory))
            else:
                from fedtta_flwr.tgfl import visit_heads  # Flower starts a process for every message: not for nothing

                with plugin_code(bench.config.model), plugin_code(bench.config.head):
                    visited.append(visit_heads(bench, client, request, own, memory))
        except FedTTAError as error:  # a damaged file, say: no reason for the node's other clients to stop
            visited.append(Visited(failure=str(error)))
        except Exception as error:
            log_once(traceback.format_exc())
            visited.append(Visited(failure=in_words(error)))
        taken.append(bench.steps - steps)
        undone.append(bench.rolled_back - rolled_back)
    if unknown := [f"{client} ({v.unknown})" for client, v in zip(clients, visited, strict=True) if v.unknown]:
        log(WARNING, "predictions that are not finite count as wrong ones: %s; look at what makes them", few(unknown))
    # Only now: a visit that fails half-way must leave no client half-advanced.
    new = {client: v.memory for client, v in zip(clients, visited, strict=True) if v.memory is not None}
    memory.keep(new, int(request["checkpoint"]))  # type: ignore[arg-type]
    updated = [i for i, v in enumerate(visited) if v.samples]
    classes = bench.classes
    slots = max((len(v.domains) for v in visited), default=0)
    reply = RecordDict(
        {
            INFO: ConfigRecord(
                {
                    "clients": clients,
                    "failed": [client for client, v in zip(clients, visited, strict=True) if v.failure],
                    "failures": [sendable(v.failure) for v in visited if v.failure],
                    "updated": [clients[i] for i in updated],
                    "samples": [visited[i].samples for i in updated],
                    "domains": [d for v in visited for d in v.domains + [""] * (slots - len(v.domains))],
                    "late-domains": [v.late_domain for v in visited],
                    "late-rounds": [v.late_round for v in visited],
                    "round": request["round"],
                    "steps": taken,
                    "undone": undone,
                    "largest-share": [visited[i].largest_share for i in updated],
                    "confidence": [visited[i].confidence for i in updated],
                    "forgot": [client for client, v in zip(clients, visited, strict=True) if v.forgot],
                }
            ),
            SCORES: to_arrays(_stack_counts(visited, slots, classes)),
        }
    )
    losses = [visited[i].loss for i in updated]
    if losses and all(loss is not None for loss in losses):
        reply.config_records[INFO]["losses"] = losses  # type: ignore[assignment]
    if any(v.histogram is not None for v in visited):
        nothing = torch.zeros(BINS, dtype=torch.int32)
        histograms = [nothing if v.histogram is None else v.histogram for v in visited]
        reply[HEADS] = to_arrays({WEIGHTS: torch.stack(histograms)})
    if updated:
        reply[STATE] = to_stacked_arrays([visited[i].state for i in updated])
        described = [visited[i].descriptor for i in updated]
        if all(d is not None for d in described):
            reply[DESCRIPTOR] = to_arrays({DESCRIPTOR: torch.stack(described)})  # type: ignore[arg-type]
    return reply


def _stack_counts(visited: list[Visited], slots: int, classes: int) -> dict[str, Tensor]:
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
