"""CIFAR-10-C and CIFAR-100-C in the layout in which they are published: one array per corruption.

``<corruption>.npy`` is uint8 [50000, 32, 32, 3]; severity s stands in rows (s - 1) * 10000 to s * 10000 - 1.
``labels.npy`` is [50000], the same 10,000 labels five times. A rebuilt set (`fedtta_flwr.data.rebuild`) also has a
manifest that says which severities are there.
"""

import json
import shlex
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.data.datasets import CLEAN
from fedtta_flwr.data.npy import map_array, read_labels
from fedtta_flwr.errors import DataError

PER_SEVERITY, SEVERITIES = 10_000, 5
SHAPE = (PER_SEVERITY * SEVERITIES, 32, 32, 3)
MANIFEST = "fedtta-rebuild.json"
#: data set -> (Zenodo record, its archive, the archive's MD5 as listed there, the folder in it)
RECORDS: dict[str, tuple[int, str, str, str]] = {
    "cifar10-c": (2535967, "CIFAR-10-C.tar", "56bf5dcef84df0e2308c6dcbcbbd8499", "CIFAR-10-C"),
    "cifar100-c": (3555552, "CIFAR-100-C.tar", "11f0ed0f1191edbf9fa23466ae6021d3", "CIFAR-100-C"),
}


class ZenodoSet:
    """A test set whose corrupted versions lie on disk; nothing but the rows that are asked for is read.

    Parameters
    ----------
    folder : Path
        With ``labels.npy`` and ``<corruption>.npy``, or with such a folder named as in the archive.
    name : {"cifar10-c", "cifar100-c"}
        Which set.

    Raises
    ------
    DataError
        The labels are absent or not as published.
    """

    def __init__(self, folder: Path, name: str) -> None:
        inner = folder / RECORDS[name][3]
        self.folder = inner if inner.is_dir() and not (folder / "labels.npy").exists() else folder
        self.classes = 10 if name == "cifar10-c" else 100
        self._clean = name.removesuffix("-c")
        self._remedy = f"`fedtta data get {name}` downloads the set, `fedtta data corrupt` rebuilds it offline"
        path = self.folder / "labels.npy"
        every = read_labels(path, count=SHAPE[0], classes=self.classes, remedy=self._remedy)
        self.labels: NDArray[np.int64] = every[:PER_SEVERITY]
        if not (every.reshape(SEVERITIES, PER_SEVERITY) == self.labels).all():
            raise DataError(f"{path}: the five severities have different labels, expected the same; {self._remedy}")
        if (found := len(np.unique(self.labels))) != self.classes:
            raise DataError(f"{path}: labels of {found} classes, {name} has {self.classes}; {self._remedy}")
        self._made = severities_made(self.folder)
        self._mapped: dict[str, NDArray[np.uint8]] = {}

    def images(self, corruption: str, severity: int) -> NDArray[np.uint8]:
        """Return a view [10000, 32, 32, 3] of one corruption's file at one severity."""
        if corruption == CLEAN:
            raise DataError(
                f"{self.folder}: holds no clean images; leave {CLEAN!r} out of corruptions, or use dataset = "
                f"'cifar10' or 'cifar100', which makes the corruptions itself"
            )
        if self._made is not None and severity not in self._made.get(corruption, ()):
            there = ", ".join(map(str, self._made.get(corruption, ()))) or "none"
            seed = (read_manifest(self.folder) or {}).get("seed", 0)
            raise DataError(
                f"{self.folder}: {corruption} was not rebuilt at severity {severity} (there: {there}); run `fedtta "
                f"data corrupt --data-dir CLEAN --dataset {self._clean} --output {shlex.quote(str(self.folder))} "
                f"--corruptions {corruption} --severities {severity} --seed {seed}`, where CLEAN is the folder of the "
                f"clean images"
            )
        if corruption not in self._mapped:
            path = self.folder / f"{corruption}.npy"
            self._mapped[corruption] = map_array(path, dtype="uint8", shape=SHAPE, remedy=self._remedy)
        return self._mapped[corruption][(severity - 1) * PER_SEVERITY : severity * PER_SEVERITY]


def read_manifest(folder: Path) -> dict[str, object] | None:
    """Return what a rebuilt folder says of itself, or None if it does not say it was rebuilt.

    Raises
    ------
    DataError
        The manifest is there but damaged.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); rebuild the set in a new folder") from None
    made = content.get("corruptions") if isinstance(content, dict) else None
    if not isinstance(made, dict) or not all(
        isinstance(levels, list) and set(map(type, levels)) <= {int} for levels in made.values()
    ):
        raise DataError(f"{path}: no manifest of a rebuilt set; rebuild the set in a new folder")
    return dict(content)


def severities_made(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return corruption -> severities that a rebuilt folder holds; None for a published set, which holds all."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    made = manifest["corruptions"]
    return {str(name): tuple(map(int, levels)) for name, levels in made.items()}  # type: ignore[attr-defined]
