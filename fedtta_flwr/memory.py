"""Where a client's state lives between visits: in Flower's ``context.state``, and in a folder if the node has one.

Flower keeps ``context.state`` in memory, one for each of its runs. What must survive the node, or a server that is
restarted and resumes under another Flower run, is also written to ``STATE-DIR/RUN/CLIENT.safetensors``: after every
visit, and once more, with the round in its name, when the server writes a checkpoint of its own; who was away then
does that when it returns. Where server and clients are one process, which only a checkpoint can survive, it is written
for those alone. From a folder of its own, which nobody else may ever look into, a node removes the runs of long ago.
"""

import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common.logger import log

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import CheckpointError, ConfigError, in_words
from fedtta_flwr.files import BESIDE, read_tensors, write_tensors
from fedtta_flwr.paths import expanded
from fedtta_flwr.records import from_arrays, to_arrays

ONE_PROCESS = "one-process"  # in a node config: the server is in the node's process
KEPT_CHECKPOINTS = 2  # the server may be killed between the clients' writing and its own
KEPT_DAYS = 30  # a run that nothing has touched for so long is not resumed
RUN = re.compile("[0-9a-f]{32}")  # how a server names a run, and so its folder


NO_SLOT = -1


class Cursor(NamedTuple):
    """Where a client stands in its stream.

    Attributes
    ----------
    slot : int
        Its next one.
    late : int
        The one whose `post` score is still to come, or `NO_SLOT`.
    round : int
        That of its last visit.
    seen : int
        The last one that had images, or `NO_SLOT`.
    """

    slot: int
    late: int
    round: int
    seen: int = NO_SLOT


@dataclass
class Remembered:
    """What a client finds again at its next visit.

    Attributes
    ----------
    cursor : Cursor
        Where it stands.
    parts : dict of str to ArrayRecord
        ``local``: the adapter's local state; ``lone`` and ``lone-local``: adapted and local state of the same adapter
        without federation, where it is scored; ``predicted``: what they predicted lately, to see a collapse;
        ``late``: a batch without labels that comes by only once; ``finetuned``: a state that the server has not seen.
    """

    cursor: Cursor
    parts: dict[str, ArrayRecord] = field(default_factory=dict)


class Memory:
    """The states of all clients of a node.

    Parameters
    ----------
    records : RecordDict
        Flower's ``context.state``.
    folder : Path or None
        Of this run; None: nothing is written.
    restarts : bool
        Whether the node may be restarted while the server goes on; if not, nothing is written between checkpoints.
    """

    def __init__(self, records: RecordDict, folder: Path | None, *, restarts: bool = True) -> None:
        self._records = records
        self._folder = folder
        self._restarts = restarts

    def recall(self, client: str, until: int | None = None) -> Remembered | None:
        """Return a client's latest state, if there is any.

        With `until`, the round after which the run was resumed, what is on disk counts up to that round. The rest is of
        an attempt that was given up, and is removed: a later one, resumed after a later round, would take it for its
        own. In ``context.state``, which begins with the Flower run, there is nothing but what was kept since then.

        A damaged file is reported and passed over: a client that forgets goes on, one that raises is out until somebody
        comes by.
        """
        # Not by `config_records` and `array_records`, which make new mappings of everybody's records at each call.
        about = self._records.get(client)
        if isinstance(about, ConfigRecord):
            parts: list[str] = list(about["parts"])  # type: ignore[arg-type]
            records: dict[str, ArrayRecord] = {part: self._records[f"{client}/{part}"] for part in parts}  # type: ignore[misc]
            return Remembered(Cursor(*about["cursor"]), records)  # type: ignore[misc]
        if self._folder is None:
            return None
        # A checkpoint is for a run that is resumed: while one goes on, it would bring batches back.
        checkpoints = _checkpoints(self._folder, client) if until is not None else ()
        for path in (_latest(self._folder, client), *checkpoints):
            try:
                found = _read(path) if path.is_file() else None
            except (CheckpointError, PermissionError) as error:
                log(logging.WARNING, "%s: without it the client goes on with an earlier state, or a new one", error)
                continue
            if found is None:
                continue
            if until is None or found.cursor.round <= until:
                return found
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return None

    def keep(self, states: Mapping[str, Remembered], checkpoint: int = 0) -> None:
        """Remember the clients' states; those that they had after round `checkpoint` also beyond later visits.

        `checkpoint` is the last round after which the server wrote one, this visit's or an earlier; 0: there was none.
        A full disk is reported and ends nothing: the visit is answered, and only a client that is restarted misses its
        state, or one that is resumed its last.
        """
        if self._folder is not None:
            self._write(self._folder, states, checkpoint)
        for client, state in states.items():
            self._records[client] = ConfigRecord({"cursor": list(state.cursor), "parts": list(state.parts)})
            for part, record in state.parts.items():
                self._records[f"{client}/{part}"] = record

    def _write(self, folder: Path, states: Mapping[str, Remembered], checkpoint: int) -> None:
        """Write what can be written of the clients' files, and report the rest in one line."""
        unwritten: dict[str, OSError] = {}
        for client, state in states.items():
            try:
                if checkpoint:
                    self._write_checkpoint(folder, client, state, checkpoint)
            except OSError as error:
                unwritten[client] = error
            try:
                if self._restarts:
                    _write_latest(folder, client, state)
            except OSError as error:
                unwritten[client] = error
        if unwritten:
            first, fault = next(iter(unwritten.items()))
            why = f"{len(unwritten)} of {len(states)} states cannot be written, the first that of {first}"
            advice = "make room there, or name another state-dir in the node config"
            log(logging.WARNING, "%s: %s (%s); %s", folder, why, fault.strerror, advice)

    def _write_checkpoint(self, folder: Path, client: str, state: Remembered, round_: int) -> None:
        """Write the state after a round: the present one, or, of a client that was away then, the one before it."""
        path = folder / f"{_stem(client)}@{round_}.safetensors"
        if state.cursor.round != round_:
            before = self.recall(client)
            if before is None or before.cursor.round > round_ or (before.cursor.round == round_ and path.exists()):
                return
            state = before
        _write(path, state)
        for old in _checkpoints(folder, client)[KEPT_CHECKPOINTS:]:
            old.unlink(missing_ok=True)


def state_folder(config: RunConfig, context: Context, run: str) -> Path | None:
    """Return the folder for the states of a node's clients in a run: the node config's, or else the run config's.

    At a run's first visit, past runs are removed from the node config's; the run config's is its user's to tidy.

    Raises
    ------
    ConfigError
        If it is relative, or the run has no usable name.
    """
    own = str(context.node_config.get("state-dir") or "")
    named = own or config.state_dir
    if not named:
        return None
    folder = expanded("state-dir", named)
    if not folder.is_absolute():
        raise ConfigError(f"state-dir = {named!r}: relative; allowed: an absolute path or one that begins with ~")
    if not run.isalnum():  # it comes from the server and becomes a part of a path
        raise ConfigError(f"run = {run!r}: no name of a run; allowed: letters and digits")
    with suppress(PermissionError):  # what is lost by it the first visit says
        if own and not (folder / run).exists():
            _forget_past_runs(folder)
    return folder / run


def _forget_past_runs(folder: Path) -> None:
    """Remove the folders of runs that nothing has touched for `KEPT_DAYS`, and nothing else; no link is followed.

    The clock can be trusted: a server listens to no device whose clock is off by more than minutes.
    """
    for run in folder.glob("*"):
        if not RUN.fullmatch(run.name) or run.is_symlink():
            continue
        with suppress(OSError):  # another process may be faster
            files = list(run.iterdir())
            touched = max(path.lstat().st_mtime for path in (run, *files))
            if time.time() - touched > KEPT_DAYS * 24 * 3600 and all(map(_is_ours, files)):
                for path in files:
                    path.unlink(missing_ok=True)
                run.rmdir()
                log(logging.INFO, "%s: removed, since nothing has touched it for %d days", run, KEPT_DAYS)


def _is_ours(path: Path) -> bool:
    return path.name.endswith((".safetensors", BESIDE)) and path.is_file() and not path.is_symlink()


def _read(path: Path) -> Remembered:
    tensors, about = read_tensors(path)
    try:
        grouped: dict[str, dict[str, object]] = {part: {} for part in about["parts"]}
        for key, t in tensors.items():
            part, _, name = key.partition("/")
            grouped[part][name] = t
        return Remembered(Cursor(*about["cursor"]), {part: to_arrays(state) for part, state in grouped.items()})  # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: holds no state of a client ({in_words(error)})") from None


def _write_latest(folder: Path, client: str, state: Remembered) -> None:
    try:
        _write(_latest(folder, client), state)
    except OSError:
        _latest(folder, client).unlink(missing_ok=True)  # with an older state, batches would come by again
        raise


def _latest(folder: Path, client: str) -> Path:
    return folder / f"{_stem(client)}.safetensors"


def _checkpoints(folder: Path, client: str) -> list[Path]:
    """Return a client's files of checkpoints, the latest first."""
    rounds = {path: path.stem.rpartition("@")[2] for path in folder.glob(f"{_stem(client)}@*.safetensors")}
    ours = [path for path, number in rounds.items() if number.isdecimal()]  # and not somebody's copy of one
    return sorted(ours, key=lambda path: -int(rounds[path]))


def _write(path: Path, state: Remembered) -> None:
    tensors = {f"{part}/{key}": t for part, record in state.parts.items() for key, t in from_arrays(record).items()}
    write_tensors(path, tensors, {"cursor": state.cursor, "parts": list(state.parts)})


def _stem(client: str) -> str:
    return quote(client, safe="")
