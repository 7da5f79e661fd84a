"""Reading a round's reply messages into plain tensors and counts.

A reply is what a device sends: whatever is in it, it must not end the run of the others. So all of it is read, and
compared with what the server knows, before any of it is entered.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ConfigRecord, Message
from flwr.common.constant import ErrorCode
from numpy.typing import NDArray
from torch import Tensor

from fedtta_flwr.config import SCORES as NAMES
from fedtta_flwr.records import (
    BINS,
    DESCRIPTOR,
    HEADS,
    INFO,
    NOT_KNOWN,
    SCORES,
    STATE,
    WEIGHTS,
    arrays_of,
    error_of,
    payload_bytes,
    printable,
    unstack,
)
from fedtta_flwr.strategies.rounds import Counts, Round, busy_seconds
from fedtta_flwr.strategies.updates import Update

#: the `post` score of the previous visit's last slot, and the counts of samples that scores refer to
LATE = "late"
SEEN_FOR = {LATE: "late-seen", "post": "post-seen"}
KNOWN_COUNTS = {*NAMES, LATE, "seen", *SEEN_FOR.values()}
KNOWN_RECORDS = {INFO, STATE, DESCRIPTOR, SCORES, HEADS}
KNOWN_INFO = {
    *("clients", "failed", "failures", "updated", "samples", "domains", "late-domains", "late-rounds", "round"),
    *("steps", "undone", "largest-share", "confidence", "losses", "forgot"),
    *("peak-memory", "peak-cuda", "started", "ended"),
}
LONGEST_NAME = 200
#: bytes that a reply may have beside its clients' tensors
SLACK = 2**20
#: Flower's errors for a node that was lost on the way; while there is time it may come back
GONE = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)
#: Flower's error for what has expired before it was answered; it speaks of a database
EXPIRED = ErrorCode.MESSAGE_UNAVAILABLE
IN_TIME = "no reply in time"


@dataclass(frozen=True)
class Limits:
    """What a reply can say at most.

    Attributes
    ----------
    classes : int
        K.
    slots : int
        Of a client in a round.
    samples : int
        Of a slot.
    seconds : float
        Of its client's work.
    bytes : float
        Of a client's tensors.
    """

    classes: int
    slots: int
    samples: int
    seconds: float = math.inf
    bytes: float = math.inf


def read_replies(
    round_: Round, replies: Iterable[Message], asked_by: Mapping[str, Sequence[str]], limits: Limits
) -> dict[str, Update]:
    """Enter replies into `round_` (counts, bytes, seconds, who is missing) and return the updates by client.

    `asked_by` maps the id of each message sent to the clients that it asked: an error that the SuperLink reports on a
    node's behalf carries the SuperLink's own node id, and a client may have moved to another node meanwhile.
    """
    updates: dict[str, Update] = {}
    answered: set[str] = set()
    intervals: list[tuple[float, float]] = []
    for reply in replies:
        asked = asked_by[reply.metadata.reply_to_message_id]
        answered.update(asked)
        try:
            if reply.has_error() and reply.error.code in GONE:
                round_.unreached.update(asked)
            if reply.has_error() and reply.error.code == EXPIRED:
                error: str | None = IN_TIME
            elif (error := error_of(reply)) is None:
                error = _enter(round_, reply, asked, limits, updates, intervals)
        except Exception as malformed:  # of what another machine says nothing can be relied on
            error = f"malformed reply: {type(malformed).__name__}: {malformed}"
        if error is not None:
            round_.missing |= dict.fromkeys(asked, printable(error))
    round_.samples = sum(update.examples for update in updates.values())
    all_asked = {client for clients in asked_by.values() for client in clients}
    round_.missing |= dict.fromkeys(all_asked - answered, IN_TIME)
    round_.unreached |= all_asked - answered
    round_.seconds["client"] = sum(end - start for start, end in intervals)
    round_.seconds["busy"] = busy_seconds(intervals)
    return updates


def _enter(
    round_: Round,
    reply: Message,
    asked: Sequence[str],
    limits: Limits,
    updates: dict[str, Update],
    intervals: list[tuple[float, float]],
) -> str | None:
    """Enter one reply; return what is wrong with it, or None. Of a malformed one nothing is entered."""
    if (size := _size(reply)) > len(asked) * limits.bytes + SLACK:
        return f"malformed reply: {size:,} bytes of tensors, at most {limits.bytes:,.0f} a client are taken"
    info = reply.content.config_records[INFO]
    clients, updated, forgot = (_names(info, key) for key in ("clients", "updated", "forgot"))
    failed = dict(zip(_names(info, "failed"), (printable(str(why)) for why in _list(info, "failures")), strict=True))
    if strangers := {*clients, *failed, *updated, *forgot} - set(asked):
        return f"malformed reply: it speaks for {min(strangers)}, who was not asked"
    if sorted(clients) != sorted(asked):
        return f"malformed reply: it says nothing of {min(set(asked) - set(clients), default='one twice')}"
    if both := set(failed).intersection(updated):
        return f"malformed reply: {min(both)} failed and adapted at once"
    if more := set(info) - KNOWN_INFO:
        return f"malformed reply: {INFO} has {min(more)!r}; allowed: {', '.join(sorted(KNOWN_INFO))}"
    if unknown := set(reply.content) - KNOWN_RECORDS:
        return f"malformed reply: unknown record {min(unknown)!r}; allowed: {', '.join(sorted(KNOWN_RECORDS))}"
    if (number := _whole(info["round"], round_.number)) != round_.number:
        return f"malformed reply: it is one to round {number}"
    found = _updates(reply, info, limits)
    counts = _counts(clients, info, arrays_of(reply.content, SCORES), limits)
    domains = _domains(clients, info)
    histograms = _histograms(clients, info, arrays_of(reply.content, HEADS))
    started, ended = _seconds(info["started"]), _seconds(info["ended"])
    interval = started, min(max(started, ended), started + limits.seconds)  # clocks may be set meanwhile
    steps = _by_client(clients, info, "steps")
    undone = _by_client(clients, info, "undone")
    for client, number in steps.items():
        _whole(number, limits.slots + 1)  # one a slot, and one more to finetune
        _whole(undone[client], number)
    shares, confidence = (_shares(updated, info, key) for key in ("largest-share", "confidence"))
    losses = dict(zip(updated, map(_number, _list(info, "losses")), strict=True)) if "losses" in info else {}
    memory = {"client": _whole(info["peak-memory"]), "cuda": _whole(info["peak-cuda"])}
    received = payload_bytes(reply)
    updates.update(found)
    round_.missing |= failed
    intervals.append(interval)
    round_.counts += counts
    round_.domains |= domains
    round_.interpolation |= histograms
    round_.steps |= steps
    round_.undone |= {client: number for client, number in undone.items() if number}
    round_.largest_share |= shares
    round_.confidence |= confidence
    round_.losses |= {client: loss for client, loss in losses.items() if math.isfinite(loss)}
    round_.forgot = tuple(sorted({*round_.forgot, *forgot}))
    round_.bytes_up += received
    for where, peak in memory.items():
        if peak > 0:
            round_.memory[where] = max(peak, round_.memory.get(where, 0))
    return None


def _updates(reply: Message, info: ConfigRecord, limits: Limits) -> dict[str, Update]:
    updated = _names(info, "updated")
    state = arrays_of(reply.content, STATE)
    descriptor = arrays_of(reply.content, DESCRIPTOR).get(DESCRIPTOR)
    samples = [_whole(number, limits.slots * limits.samples) for number in _list(info, "samples")]
    stacked = [*state.items(), *([] if descriptor is None else [(DESCRIPTOR, descriptor)])]
    for name, length in (("samples", len(samples)), *((name, len(t)) for name, t in stacked)):
        if length != len(updated):
            raise ValueError(f"{name} of {length} clients, {len(updated)} adapted")
    return {
        client: Update(
            state=unstack(state, i),
            descriptor=None if descriptor is None else descriptor[i],
            examples=samples[i],
        )
        for i, client in enumerate(updated)
    }


def _counts(clients: Sequence[str], info: ConfigRecord, scores: dict[str, Tensor], limits: Limits) -> list[Counts]:
    """Turn the stacked counts [C, T, K] into one entry per client, slot and score."""
    now, late = _names(info, "domains"), _names(info, "late-domains")
    slots = _whole(len(now) // max(1, len(clients)), limits.slots)
    number: int = info["round"]  # type: ignore[assignment]
    late_rounds = [_whole(late_round, number - 1) for late_round in _list(info, "late-rounds")]
    if unknown := scores.keys() - KNOWN_COUNTS:
        raise ValueError(f"unknown score {min(unknown)!r}")
    entries = []
    for key, table in scores.items():
        if key.endswith("seen"):
            continue
        is_late = key == LATE
        correct, seen = (_integers(t) for t in (table, scores[SEEN_FOR.get(key, "seen")]))
        if not correct.shape == seen.shape == (len(clients), 1 if is_late else slots, limits.classes):
            raise ValueError(f"counts of {key} have shape {correct.shape}")
        if (correct < 0).any() or (correct > seen).any():
            raise ValueError(f"counts of {key} are negative, or more than were seen")
        if (most := seen.sum(axis=2).max(initial=0)) > limits.samples:
            raise ValueError(f"counts of {key} are of {most} samples; a slot has {limits.samples} at most")
        for i, client in enumerate(clients):
            for j in range(correct.shape[1]):
                if seen[i, j].any():
                    entries.append(
                        Counts(
                            round=late_rounds[i] if is_late else number,
                            client=client,
                            domain=late[i] if is_late else now[i * slots + j],
                            score="post" if is_late else key,
                            seen=seen[i, j],
                            correct=correct[i, j],
                        )
                    )
    return entries


def _domains(clients: Sequence[str], info: ConfigRecord) -> dict[str, frozenset[str]]:
    """Return what each client saw; shorter lists than the longest are filled up with empty names."""
    now = _names(info, "domains")
    slots = len(now) // max(1, len(clients))
    return {client: frozenset(now[i * slots : (i + 1) * slots]) - {""} for i, client in enumerate(clients)}


def _histograms(
    clients: Sequence[str], info: ConfigRecord, heads: dict[str, Tensor]
) -> dict[tuple[str, str], NDArray[np.int64]]:
    """Return the histograms [BINS] by client and test set, of which a visit predicts one."""
    if WEIGHTS not in heads:
        return {}
    table, sets = _integers(heads[WEIGHTS]), _names(info, "domains")
    if table.shape != (len(clients), BINS) or (table < 0).any() or len(sets) != len(clients):
        raise ValueError(f"weights of the heads have shape {table.shape}, or are negative")
    return {(client, name): row for client, name, row in zip(clients, sets, table, strict=True) if row.any()}


def _list(info: ConfigRecord, key: str) -> list[object]:
    if not isinstance(found := info[key], list):
        raise TypeError(f"{key} is {type(found).__name__}, expected a list")
    return list(found)


def _by_client(clients: Sequence[str], info: ConfigRecord, key: str) -> dict[str, int]:
    numbers = [_whole(number) for number in _list(info, key)]
    if len(numbers) != len(clients):
        raise ValueError(f"{key} of {len(numbers)} clients, {len(clients)} were asked")
    return dict(zip(clients, numbers, strict=True))


def _size(reply: Message) -> int:
    """Return the bytes of what a reply brings as tensors, whatever it says of them."""
    return sum(len(array.data) for record in reply.content.array_records.values() for array in record.values())


def _integers(t: Tensor) -> NDArray[np.int64]:
    if t.dtype != torch.int32:
        raise TypeError(f"counts of {str(t.dtype).removeprefix('torch.')}, expected int32")
    return t.numpy().astype(np.int64)


def _names(info: ConfigRecord, key: str) -> list[str]:
    names = [n for n in _list(info, key) if isinstance(n, str) and n.isprintable() and len(n) <= LONGEST_NAME]
    if len(names) < len(info[key]):  # type: ignore[arg-type]
        raise TypeError(f"{key} holds something else than names of up to {LONGEST_NAME} characters")
    return names


def _whole(number: object, most: int = 2**63 - 1) -> int:
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError(f"{number!r}, expected a whole number from 0 to {most}")
    return number


def _shares(clients: Sequence[str], info: ConfigRecord, key: str) -> dict[str, float]:
    """Return the shares of those whose share is known."""
    found = {}
    for client, share in zip(clients, _list(info, key), strict=True):
        if not isinstance(share, float) or not (0 <= share <= 1 or share == NOT_KNOWN):
            raise ValueError(f"{share!r}, expected a share from 0 to 1, or -1")
        if share != NOT_KNOWN:
            found[client] = share
    return found


def _number(number: object) -> float:
    if not isinstance(number, float):
        raise TypeError(f"{number!r}, expected a number")
    return number


def _seconds(number: object) -> float:
    if not math.isfinite(found := _number(number)):
        raise ValueError(f"{number!r}, expected seconds")
    return found
