"""Reading a round's reply messages into plain tensors and counts."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from flwr.app import ConfigRecord, Message
from numpy.typing import NDArray
from torch import Tensor

from fedtta_flwr.records import (
    BINS,
    DESCRIPTOR,
    HEADS,
    INFO,
    SCORES,
    STATE,
    WEIGHTS,
    arrays_of,
    error_of,
    payload_bytes,
    unstack,
)
from fedtta_flwr.strategies.rounds import Counts, Round, busy_seconds
from fedtta_flwr.strategies.updates import Update

#: the `post` score of the previous visit's last slot, and the counts of samples that scores refer to
LATE = "late"
SEEN_FOR = {LATE: "late-seen", "post": "post-seen"}


def read_replies(
    round_: Round, replies: Iterable[Message], classes: int, asked_by: Mapping[str, Sequence[str]]
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
        if (error := error_of(reply)) is None:
            error = _enter(round_, reply, asked, classes, updates, intervals)
        if error is not None:
            round_.missing |= dict.fromkeys(asked, error)
    round_.samples = sum(update.examples for update in updates.values())
    all_asked = {client for clients in asked_by.values() for client in clients}
    round_.missing |= dict.fromkeys(all_asked - answered, "no reply in time")
    round_.seconds["client"] = sum(end - start for start, end in intervals)
    round_.seconds["busy"] = busy_seconds(intervals)
    return updates


def _enter(
    round_: Round,
    reply: Message,
    asked: Sequence[str],
    classes: int,
    updates: dict[str, Update],
    intervals: list[tuple[float, float]],
) -> str | None:
    """Enter one reply; return what is wrong with it, or None. Of a malformed one nothing is entered."""
    try:
        info = reply.content.config_records[INFO]
        clients = _names(info, "clients")
        failed = dict(zip(_names(info, "failed"), _names(info, "failures"), strict=True))
        if strangers := {*clients, *failed, *_names(info, "updated")} - set(asked):
            return f"malformed reply: it speaks for {min(strangers)}, who was not asked"
        if silent := set(asked) - set(clients):
            return f"malformed reply: it says nothing of {min(silent)}"
        found = _updates(reply, info)
        counts = _counts(clients, info, arrays_of(reply.content, SCORES), classes)
        domains = _domains(clients, info)
        histograms = _histograms(clients, info, arrays_of(reply.content, HEADS))
        interval = float(info["started"]), float(info["ended"])  # type: ignore[arg-type]
        rolled_back = int(info["rolled-back"])  # type: ignore[arg-type]
        forgot = _names(info, "forgot")
        memory = {"client": int(info["peak-memory"]), "cuda": int(info["peak-cuda"])}  # type: ignore[arg-type]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return f"malformed reply: {type(error).__name__}: {error}"
    updates.update(found)
    round_.missing |= failed
    intervals.append(interval)
    round_.counts += counts
    round_.domains |= domains
    round_.interpolation |= histograms
    round_.rolled_back += rolled_back
    round_.forgot = tuple(sorted({*round_.forgot, *forgot}))
    round_.bytes_up += payload_bytes(reply)
    for where, peak in memory.items():
        if peak > 0:
            round_.memory[where] = max(peak, round_.memory.get(where, 0))
    return None


def _updates(reply: Message, info: ConfigRecord) -> dict[str, Update]:
    state = arrays_of(reply.content, STATE)
    descriptor = arrays_of(reply.content, DESCRIPTOR).get(DESCRIPTOR)
    samples: Sequence[int] = info["samples"]  # type: ignore[assignment]
    if min(samples, default=0) < 0:
        raise ValueError(f"{min(samples)} samples")
    return {
        client: Update(
            state=unstack(state, i),
            descriptor=None if descriptor is None else descriptor[i],
            examples=samples[i],
        )
        for i, client in enumerate(_names(info, "updated"))
    }


def _counts(clients: Sequence[str], info: ConfigRecord, scores: dict[str, Tensor], classes: int) -> list[Counts]:
    """Turn the stacked counts [C, T, K] into one entry per client, slot and score."""
    now, late = _names(info, "domains"), _names(info, "late-domains")
    slots = len(now) // max(1, len(clients))
    number: int = info["round"]  # type: ignore[assignment]
    late_rounds: Sequence[int] = info["late-rounds"]  # type: ignore[assignment]
    entries = []
    for key, table in scores.items():
        if key.endswith("seen"):
            continue
        is_late = key == LATE
        correct = table.numpy().astype(np.int64)
        seen = scores[SEEN_FOR.get(key, "seen")].numpy().astype(np.int64)
        if correct.shape != seen.shape or correct.shape[::2] != (len(clients), classes):
            raise ValueError(f"counts of {key} have shape {correct.shape}")
        if (correct < 0).any() or (correct > seen).any():
            raise ValueError(f"counts of {key} are negative, or more than were seen")
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
    table, sets = heads[WEIGHTS].numpy().astype(np.int64), _names(info, "domains")
    if table.shape != (len(clients), BINS) or (table < 0).any() or len(sets) != len(clients):
        raise ValueError(f"weights of the heads have shape {table.shape}, or are negative")
    return {(client, name): row for client, name, row in zip(clients, sets, table, strict=True) if row.any()}


def _names(info: ConfigRecord, key: str) -> list[str]:
    return list(info[key])  # type: ignore[arg-type]
