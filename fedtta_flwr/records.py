"""Tensors <-> Flower records, and the names of everything that travels.

=============  =============  ==============================================================================
message type   record         content
=============  =============  ==============================================================================
query.hello    --             (nothing)
reply          ``hello``      client names, slots of each, classes; fingerprints of code, config, source model and
                              methods of one's own; names hosted that are not of this run, and of it but without a
                              stream that could be opened, and why
train.visit    ``visit``      name of the run, round, slots to go through, and where those of a client without memory
                              begin; client names, and who of them has which personal state in this message; descriptor
                              wanted and its options, terms of the clients' loss, whether to finetune a mixture to the
                              last batch; the rounds of the last checkpoint, for which to keep states, and of the one to
                              take them from
               ``state``      personal states of these clients, [S, *shape], one that several have once (``visit`` says
                              whose is where); absent before the first mixture
reply          ``visit``      client names, who adapted and to how many samples, who failed and why, domain of each
                              slot; domain and round of the ones scored late; start and end, peak memory; steps taken
                              and undone, the largest share of one class in the predictions and their mean
                              probability (-1: not known); who found no memory though the run had begun; where two
                              heads are trained, the mean losses
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
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedtta_flwr.errors import ConfigError

HELLO = "query.hello"
VISIT = "train.visit"

STATE = "state"
DESCRIPTOR = "descriptor"
SCORES = "scores"
HEADS = "heads"
WEIGHTS, BINS = "weights", 50
NOT_KNOWN = -1.0  # in place of a share
STATISTICS, CLIENTS = "statistics", "clients"
INFO = "visit"
ERROR = "error"
#: the one array of an array record: its name, how it is written, what it counts
PACKED, SAFETENSORS, BYTES = "tensors", "safetensors", "uint8"
TYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
LONGEST_HEADER = 2**20  # bytes, for thousands of names and shapes; a tensor without values would be nothing but these
LONGEST_LINE = 500
NOT_CONNECTED = "its node is not connected (gone, or revoked: `fedtta nodes` shows it)"
OTHERS = ("templates", "app")  # folders of the package: what no run uses, and what a wheel has and a checkout has not


def to_arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a record of copies of the tensors: one array, a file of safetensors, or none if there is no tensor.

    Flower sends every array by itself, two at a time: with an array a tensor, where all parameters of a ResNet-8
    travel, a round of deployed devices takes nearly three times as long (benchmarks/deployment.py).

    Raises
    ------
    ConfigError
        If a tensor is of a dtype that is not in `TYPES`.
    """
    return _packed({name: [t] for name, t in tensors.items()}, ())


def from_arrays(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of a record, in the order in which they were written.

    Raises
    ------
    ValueError
        If it is not one of `to_arrays`, or not what it says.
    """
    if not record:
        return {}
    array = record.get(PACKED)
    if array is None or len(record) > 1 or array.stype != SAFETENSORS:
        raise ValueError(f"arrays {', '.join(record)[:80]!r}: expected one, {PACKED!r}, of {SAFETENSORS}")
    length = int.from_bytes(array.data[:8], "little")
    if length > LONGEST_HEADER:
        raise ValueError(f"names and shapes of tensors of {length:,} bytes, at most {LONGEST_HEADER:,} are taken")
    try:
        tensors = load(array.data)
    except (SafetensorError, KeyError) as error:  # damaged; a type that torch does not have
        raise ValueError(f"damaged {SAFETENSORS}: {error}") from None
    size = sum(t.nbytes for t in tensors.values())
    if (array.dtype, tuple(array.shape)) != (BYTES, (size,)):
        raise ValueError(f"{size} bytes of tensors, said to be {array.dtype} {tuple(array.shape)}")
    header = json.loads(array.data[8 : 8 + length])
    return {name: tensors[name] for name in header if name in tensors}


def to_stacked_arrays(states: Sequence[Mapping[str, Tensor]]) -> ArrayRecord:
    """Return a record of C equal states with a leading client axis; nothing is stacked in memory beside it."""
    return _packed({name: [state[name] for state in states] for name in states[0]}, (len(states),))


def distinct(states: Sequence[Mapping[str, Tensor]]) -> tuple[list[Mapping[str, Tensor]], list[int]]:
    """Return the states without those that are in the same memory as another, and at which place each is there."""
    memory = [tuple(t.data_ptr() for t in state.values()) for state in states]
    apart = dict(zip(memory, states, strict=True))
    place = {where: i for i, where in enumerate(apart)}
    return list(apart.values()), [place[where] for where in memory]


def unstack(state: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return one client's part (views) of a stacked state."""
    return {name: t[index] for name, t in state.items()}


def arrays_of(content: RecordDict, name: str) -> dict[str, Tensor]:
    """Return the tensors of an array record of a message; empty if it is absent."""
    record = content.array_records.get(name)
    return from_arrays(record) if record is not None else {}


def payload_bytes(message: Message) -> int:
    """Return the bytes of the tensors in a message (their names and shapes add some 80 bytes a tensor)."""
    records = message.content.array_records.values() if message.has_content() else ()
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for record in records for a in record.values())


def error_reply(message: Message, text: str) -> Message:
    """Return a reply that carries one line on what went wrong at the client."""
    return Message(RecordDict({ERROR: ConfigRecord({"text": sendable(text)})}), reply_to=message)


def sendable(text: str) -> str:
    """Return a text that UTF-8 can hold: a file may be called by any bytes."""
    return text.encode(errors="backslashreplace").decode()


def error_of(message: Message) -> str | None:
    """Return what went wrong at the client in one line, or None if nothing did."""
    if message.has_error():
        if message.error.code == ErrorCode.NODE_UNAVAILABLE:  # Flower speaks of heartbeats and their interval
            return NOT_CONNECTED
        return printable(f"{message.error.reason or 'no reason given'} (code {message.error.code})")
    record = message.content.config_records.get(ERROR)
    return printable(str(record.get("text", "no reason given"))) if record is not None else None


def printable(text: str) -> str:
    """Return what another machine has said as one line for a log: no control characters, and not for ever."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST_LINE]).split())
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..."


def _packed(tensors: Mapping[str, Sequence[Tensor]], leading: tuple[int, ...]) -> ArrayRecord:
    """Write tensors as safetensors: under each name equal ones, one after the other, with leading axes for these."""
    if not tensors:
        return ArrayRecord()
    header, size = {}, 0
    for name, equal in tensors.items():
        dtype, begin, size = equal[0].dtype, size, size + sum(t.nbytes for t in equal)
        if dtype not in TYPES:
            raise ConfigError(f"{name}: tensors of {dtype} cannot travel; allowed: {', '.join(map(str, TYPES))}")
        header[name] = {"dtype": TYPES[dtype], "shape": [*leading, *equal[0].shape], "data_offsets": [begin, size]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = BytesIO()
    file.write(len(text).to_bytes(8, "little") + text)
    for equal in tensors.values():
        for t in equal:
            file.write(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return ArrayRecord({PACKED: Array(BYTES, (size,), SAFETENSORS, file.getvalue())})


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
    for path in sorted(path for path in files if path.is_file()):  # an editor's lock is a link to nothing
        digest.update(
            path.relative_to(root).as_posix().encode(errors="surrogateescape") + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()[:16]
