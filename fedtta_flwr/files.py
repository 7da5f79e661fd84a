"""Files that are there whole or not at all, and folders that one process at a time writes to."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from flwr.common.logger import log

from fedtta_flwr.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor


BESIDE = ".fedtta-tmp"
STALE = 600.0  # seconds: by then the writer of a temporary file has moved it, or is dead


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside its place, then move it there: a kill or a full disk leaves the old one whole.

    What a kill leaves beside it is removed by who writes to the folder some minutes later.
    """
    _sweep(path.parent, time.time() // STALE)
    beside = path.with_name(f".{path.name}.{os.getpid()}{BESIDE}")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@lru_cache(maxsize=64)
def _sweep(folder: Path, period: float) -> None:
    """Remove what killed writers have left in a folder, once in a period.

    Their age tells, not their PID: a folder may be shared with other hosts, and in containers PIDs come again.
    """
    for left in folder.glob(f".*{BESIDE}"):
        with suppress(OSError):  # another process may be faster
            if time.time() - left.stat().st_mtime > STALE:
                left.unlink()


def append(path: Path, content: bytes) -> None:
    """Append to a file, all or nothing: where a disk is full, half a line would spoil the next one."""
    with path.open("ab", buffering=0) as file:
        whole = file.tell()
        try:
            while content:  # what is cut short raises at the second attempt
                content = content[file.write(content) :]
        except OSError:
            file.truncate(whole)
            raise


class Outage:
    """Whether something can be written; says in one line each when that begins to fail and when it is over.

    Parameters
    ----------
    path : Path
        What is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lasts = False

    @contextmanager
    def endured(self) -> Iterator[None]:
        """Go on where what is done here cannot be written."""
        try:
            yield
        except OSError as error:
            if not self.lasts:
                why = error.strerror or error
                gone = isinstance(error, BrokenPipeError)  # of `fedtta run | head`
                what = "who read it has gone, results are kept" if gone else "make room"
                log(WARNING, "%s cannot be written (%s): the run goes on; %s", self.path, why, what)
            self.lasts = True
        else:
            if self.lasts:
                log(WARNING, "%s is written again", self.path)
            self.lasts = False


@contextmanager
def locked(folder: Path, option: str, who: str) -> Iterator[None]:
    """Keep others out of a folder, which is made; if it is still empty at the end, what was made is removed.

    Parameters
    ----------
    folder : Path
        The folder.
    option, who : str
        For the error message: what named the folder, and who writes there.

    Raises
    ------
    ConfigError
        If another process is in it, or it cannot be made.
    """
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{option}: cannot be made: {error.strerror}; name another folder") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{option}: another {who} writes there; wait for its end, or name another folder"
            ) from None
        except OSError:
            pass  # some network file systems know no locks of folders
        try:
            yield
        finally:
            with suppress(OSError):  # not empty
                for path in made:
                    path.rmdir()
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_tensors(path: Path, tensors: Mapping[str, "Tensor"], about: Mapping[str, Any]) -> None:
    """Write tensors and what JSON can say about them as one safetensors file, atomically; its folder is made."""
    from safetensors.torch import save

    content = save({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, {"about": json.dumps(about)})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(content))


def read_tensors(path: Path) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
    """Return what `write_tensors` wrote.

    Raises
    ------
    CheckpointError
        If there is no such file, or it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["about"])
        return load(content), about
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; nothing has been saved there") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path}: cannot be read as saved tensors ({text}); restore it from a copy") from None


def is_finished(folder: Path) -> bool:
    """Return whether a run directory holds a run that has ended well."""
    try:
        json.loads((folder / "config.json").read_text())["config"]
        return bool(json.loads((folder / "summary.json").read_text())["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
