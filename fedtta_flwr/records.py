"""Tensors <-> Flower records, and the names of everything that travels.

=============  =============  ==============================================================================
message type   record         content
=============  =============  ==============================================================================
query.hello    --             (nothing)
reply          ``hello``      client names, slots of each, classes; fingerprints of code, config and source model;
                              names hosted that are not of this run
train.visit    ``visit``      name of the run, round, slots to go through, and where those of a client without memory
                              begin; client names, and who of them has a personal state in this message; descriptor
                              wanted and its options, terms of the clients' loss, whether to finetune a mixture to the
                              last batch; under which rounds to keep states for, and to take them from, a checkpoint
               ``state``      personal states of these clients, [C, *shape]; absent before the first mixture
reply          ``visit``      client names, who adapted and to how many samples, who failed and why, domain of each
                              slot; domain and round of the ones scored late; start and end, steps rolled back, who
                              found no memory though the run had begun
               ``state``      adapted states, [C, *shape]
               ``descriptor`` one tensor, [C, *shape]
               ``scores``     counts per class, int32 [C, T, K]: seen, and correct for each score
               ``heads``      of predictions by two heads, how often the global one had which weight: ``weights``,
                              int32 [C, BINS], equal bins on [0, 1]
=============  =============  ==============================================================================

Nothing else travels: no weights that adaptation cannot change, no integer buffers, no samples, no predictions.
Where two heads are trained, ``state`` holds extractor and global head; ``descriptor`` what predictors measured, of
which ``state`` brings back the mean (`STATISTICS`) and of how many (`CLIENTS`).
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

HELLO = "query.hello"
VISIT = "train.visit"

STATE = "state"
DESCRIPTOR = "descriptor"
SCORES = "scores"
HEADS = "heads"
WEIGHTS, BINS = "weights", 50
STATISTICS, CLIENTS = "statistics", "clients"
INFO = "visit"
ERROR = "error"
LONGEST_LINE = 500
OTHERS = ("templates", "app")  # folders of the package: what no run uses, and what a wheel has and a checkout has not


def to_arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a record of CPU copies of the tensors."""
    return ArrayRecord({name: t.detach().cpu() for name, t in tensors.items()})


def from_arrays(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of a record.

    Raises
    ------
    ValueError
        If one is not what the record says.
    """
    tensors = {}
    for name, array in record.items():
        found = array.numpy()
        if found.shape != tuple(array.shape) or found.dtype != np.dtype(array.dtype):
            raise ValueError(f"{name} is {found.dtype} {found.shape}, said to be {array.dtype} {tuple(array.shape)}")
        tensors[name] = torch.from_numpy(found)
    return tensors


def stack(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack C equal states into one with a leading client axis."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def to_stacked_arrays(states: Sequence[Mapping[str, Tensor]]) -> ArrayRecord:
    """Return a record of C equal states with a leading client axis, made tensor by tensor to save memory."""
    return ArrayRecord({name: Array(torch.stack([state[name] for state in states])) for name in states[0]})


def unstack(state: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return one client's part (views) of a stacked state."""
    return {name: t[index] for name, t in state.items()}


def arrays_of(content: RecordDict, name: str) -> dict[str, Tensor]:
    """Return the tensors of an array record of a message; empty if it is absent."""
    record = content.array_records.get(name)
    return from_arrays(record) if record is not None else {}


def payload_bytes(message: Message) -> int:
    """Return the bytes of the tensors in a message (its wire form adds some hundred bytes a tensor and message)."""
    records = message.content.array_records.values() if message.has_content() else ()
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for record in records for a in record.values())


def error_reply(message: Message, text: str) -> Message:
    """Return a reply that carries one line on what went wrong at the client."""
    return Message(RecordDict({ERROR: ConfigRecord({"text": text})}), reply_to=message)


def error_of(message: Message) -> str | None:
    """Return what went wrong at the client in one line, or None if nothing did."""
    if message.has_error():
        return printable(f"{message.error.reason or 'no reason given'} (code {message.error.code})")
    record = message.content.config_records.get(ERROR)
    return printable(str(record.get("text", "no reason given"))) if record is not None else None


def printable(text: str) -> str:
    """Return what another machine has said as one line for a log: no control characters, and not for ever."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..."


@cache
def code_fingerprint(root: Path = Path(__file__).parent) -> str:
    """Return a short hash of the package's source files, without `OTHERS`.

    Server and clients compare theirs: a simulation can otherwise run another checkout's client code unnoticed, and a
    device an older version. (Of the templates, Flower's app bundle leaves the tests out.)
    """
    return source_hash(root, (path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in OTHERS))


def source_hash(root: Path, files: Iterable[Path]) -> str:
    """Return a short hash of some files of a folder: their names in it, and what they hold."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
