"""Rebuilding CIFAR-10-C or CIFAR-100-C from the clean test images, in the published layout.

The result is "the CIFAR-10-C recipe, regenerated", never CIFAR-10-C itself: the random streams of the published arrays
are unknown. `fedtta_flwr.data.reference` says how close it must come.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.data.corruptions import corrupt
from fedtta_flwr.data.npy import map_array, read_labels
from fedtta_flwr.data.parallel import worker_pool
from fedtta_flwr.data.zenodo import MANIFEST, SEVERITIES, read_manifest
from fedtta_flwr.errors import ConfigError, DataError
from fedtta_flwr.files import locked, write_atomically, write_json

CHUNK = 500  # images of one task: seconds of work at most, so that no worker waits long for the others at the end
RECIPE = "CIFAR-10-C recipe, regenerated"


class _Task(NamedTuple):
    clean: Path
    target: Path
    offset: int
    corruption: str
    severity: int
    start: int
    stop: int
    seed: int
    frost_dir: Path | None


def rebuild(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    output: Path,
    *,
    dataset: str,
    corruptions: Sequence[str],
    severities: Iterable[int] = range(1, SEVERITIES + 1),
    seed: int = 0,
    workers: int = 1,
    frost_dir: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write ``labels.npy`` and one array per corruption; go on where an earlier call stopped.

    An array appears under its name when it is complete; it counts as finished if the manifest lists it and its form
    is right. Rows of severities that nobody asked for are zero, take no room on most file systems, and are refused
    when a data set is opened.

    Parameters
    ----------
    images : ndarray of uint8
        [N, 32, 32, 3], the clean test part; N = 10,000 for a set that can be opened as ``cifar10-c``.
    labels : ndarray of int64
        [N].
    output : Path
        A new folder, or one that an earlier call with the same images, labels and seed wrote.
    dataset : str
        What `images` are, for the manifest.
    corruptions, severities : sequences
        What to make.
    seed : int
        Of the corruptions.
    workers : int
        Processes that share the work.
    frost_dir : Path, optional
        Folder of the frost photographs, see `corrupt`.
    progress : callable
        Receives (images made, images to make) after every few hundred.

    Returns
    -------
    list of str
        The corruptions that were written; the others were finished.

    Raises
    ------
    ConfigError
        The folder holds another build.
    DataError
        The folder cannot be written, holds files of other origin, or `corrupt` refuses.
    """
    wanted = sorted(set(severities))
    shape = (SEVERITIES * len(images), *images.shape[1:])
    for name in corruptions:  # a bad name or no frost: before any work
        corrupt(images[:1], name, wanted[0], seed=seed, frost_dir=frost_dir)
    with locked(output, f"--output {output}", "rebuild"):
        every = np.tile(labels.astype(np.uint8), SEVERITIES)
        manifest = _manifest(output, dataset, seed, hashlib.sha256(images.tobytes() + every.tobytes()).hexdigest())
        if "clean" not in manifest:  # begun by an earlier version of this package
            _check_same_labels(output / "labels.npy", every)
        made: dict[str, list[int]] = manifest["corruptions"]
        begun = set(manifest.get("begun", ()))  # by a call that did not end
        missing = {}
        for name in corruptions:
            there = made.get(name, []) if _usable(output / f"{name}.npy", shape, name in made or name in begun) else []
            if todo := [severity for severity in wanted if severity not in there]:
                missing[name] = (there, todo)
        total, done = sum(len(todo) for _, todo in missing.values()) * len(images), 0
        clean = output / ".clean.npy.part"
        try:
            _save(output / "labels.npy", every)
            if missing:
                _save(clean, images)
                # A file is there a moment before it is listed: after a kill in between this says whose it is.
                manifest["begun"] = sorted(begun | missing.keys() - made.keys())
                write_json(output / MANIFEST, manifest)
            with worker_pool(_fill, workers) as run:
                for name, (there, todo) in missing.items():
                    part = output / f".{name}.npy.part"
                    offset = _prepare(part, output / f"{name}.npy", shape, there)
                    tasks = [
                        _Task(
                            clean, part, offset, name, severity, start, min(start + CHUNK, len(images)), seed, frost_dir
                        )
                        for severity in todo
                        for start in range(0, len(images), CHUNK)
                    ]
                    for number in run(tasks):
                        done += number
                        progress(done, total)
                    with part.open("rb") as file:
                        os.fsync(file.fileno())
                    part.replace(output / f"{name}.npy")
                    made[name] = sorted({*there, *todo})
                    manifest["begun"] = [other for other in manifest["begun"] if other != name]
                    write_json(output / MANIFEST, manifest)
        except OSError as error:
            raise DataError(
                f"{output}: cannot be written ({error.strerror}); free some space (31 MB for each corruption and "
                f"severity) or name another folder; what is finished is kept"
            ) from error
        finally:
            clean.unlink(missing_ok=True)
    return list(missing)


def _manifest(output: Path, dataset: str, seed: int, clean: str) -> dict[str, Any]:
    new: dict[str, Any] = {"recipe": RECIPE, "dataset": dataset, "seed": seed, "clean": clean, "corruptions": {}}
    found = read_manifest(output) if output.is_dir() else None
    if found is None:
        foreign = next(iter(sorted(output.glob("*.npy"))), None) if output.is_dir() else None
        if foreign is not None and foreign.name != "labels.npy":
            raise DataError(f"{foreign}: not made by this command (no {MANIFEST} beside it); name another folder")
        return new | {"fedtta_flwr": version("fedtta-flwr")}
    for key in ("dataset", "seed"):
        if found.get(key) != new[key]:
            raise ConfigError(
                f"{output}: built with {key} = {found.get(key)}, asked for {new[key]}; name another folder"
            )
    if found.get("clean", clean) != clean:
        raise ConfigError(
            f"{output}: built from other images, or the same in another order; name another folder, or the data that "
            f"it was built from"
        )
    return found


def _check_same_labels(path: Path, every: NDArray[np.uint8]) -> None:
    if path.exists() and not np.array_equal(read_labels(path, count=len(every), classes=None, remedy=""), every):
        raise ConfigError(f"{path}: other labels than those of the images now; name another folder")


def _usable(path: Path, shape: Sequence[int], listed: bool) -> bool:
    """Whether a finished file is there; a wrong one is made anew."""
    if not path.exists():
        return False
    if not listed:
        raise DataError(f"{path}: not made by this command (the manifest does not list it); name another folder")
    try:
        map_array(path, dtype="uint8", shape=shape, remedy="")
    except DataError:
        return False
    return True


def _prepare(part: Path, old: Path, shape: Sequence[int], keep: Sequence[int]) -> int:
    """Make a file of full length, with the severities that an older one has; return where its elements begin.

    Elements are written, not mapped: on a full disk a write is an error, while a map would end the process.
    """
    per = int(np.prod(shape)) // SEVERITIES
    with part.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": tuple(shape)}
        np.lib.format.write_array_header_1_0(file, header)
        offset = file.tell()
        file.truncate(offset + SEVERITIES * per)
        if keep:
            source = map_array(old, dtype="uint8", shape=shape, remedy="").reshape(SEVERITIES, per)
            for severity in keep:
                file.seek(offset + (severity - 1) * per)
                file.write(source[severity - 1].tobytes())
    return offset


def _fill(task: _Task) -> int:
    """Corrupt some images and write them to their place; return how many."""
    clean = np.load(task.clean, mmap_mode="r", allow_pickle=False)
    rows = np.arange(task.start, task.stop)
    made = corrupt(
        np.array(clean[task.start : task.stop]),
        task.corruption,
        task.severity,
        seed=task.seed,
        indices=rows,
        frost_dir=task.frost_dir,
    )
    image = made[0].nbytes
    with task.target.open("r+b") as file:
        file.seek(task.offset + ((task.severity - 1) * len(clean) + task.start) * image)
        file.write(made.tobytes())
    return len(rows)


def _save(path: Path, array: NDArray[Any]) -> None:
    write_atomically(path, lambda file: np.save(file, array, allow_pickle=False))
