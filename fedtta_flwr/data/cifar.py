"""The clean images of CIFAR-10, CIFAR-100 and CIFAR-10.1 from files that others have put there."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.data.npy import check_labels, map_array, read_labels
from fedtta_flwr.errors import DataError

#: images [N, 32, 32, 3], labels [N], number of classes
TestPart = tuple[NDArray[np.uint8], NDArray[np.int64], int]
ARCHIVE = "cifar100_test.npz"
COUNT = 10_000


@cache
def read_torchvision(classes: int, folder: Path, train: bool = False) -> TestPart:
    """Read the official test or training part through torchvision, which checks their MD5 before it unpickles them.

    Raises
    ------
    DataError
        A file is absent, or not the official one.
    """
    from torchvision.datasets import CIFAR10, CIFAR100

    kind: Any = CIFAR10 if classes == 10 else CIFAR100
    try:
        data = kind(str(folder), train=train, download=False)
    except RuntimeError as error:  # it does not say which file
        raise DataError(_fault(kind, folder, f"CIFAR-{classes}") or f"{folder}: {error}") from None
    return data.data, np.asarray(data.targets, dtype=np.int64), classes


def _fault(kind: Any, folder: Path, name: str) -> str | None:
    """Return what is wrong with the first of a data set's files that is absent or not the official one."""
    from torchvision.datasets.utils import check_integrity

    for file, md5 in [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]:
        path = folder / kind.base_folder / file
        if not check_integrity(str(path), md5):
            state = "not the official file" if path.is_file() else "no such file"
            return f"{path}: {state}, expected MD5 {md5}; unpack the official {name} python version into {folder}"
    return None


def read_cifar100(folder: Path) -> TestPart:
    """Read torchvision's layout, or ``cifar100_test.npz`` with arrays ``images`` and ``labels``.

    Raises
    ------
    DataError
        Neither is there, or what is there is damaged.
    """
    path = folder / ARCHIVE
    return _read_archive(path) if path.exists() else read_torchvision(100, folder)


def read_cifar10_1(folder: Path) -> TestPart:
    """Read CIFAR-10.1 v6 as published, 2,000 images in two .npy files.

    Raises
    ------
    DataError
        A file is absent or not as published.
    """
    remedy = "fetch both from github.com/modestyachts/CIFAR-10.1/tree/master/datasets"
    images = map_array(folder / "cifar10.1_v6_data.npy", dtype="uint8", shape=(2000, 32, 32, 3), remedy=remedy)
    labels = read_labels(folder / "cifar10.1_v6_labels.npy", count=2000, classes=10, remedy=remedy)
    return images, labels, 10


@cache
def _read_archive(path: Path) -> TestPart:
    remedy = "write it anew"
    expected = f"expected arrays images, uint8 ({COUNT}, 32, 32, 3), and labels ({COUNT})"
    try:
        with np.load(path, allow_pickle=False) as archive:
            images, labels = archive["images"], archive["labels"]
    except Exception as error:  # a damaged archive raises whatever its bytes happen to mean
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise DataError(f"{path}: no readable archive ({reason}), {expected}; {remedy}") from None
    shapes = images.dtype == np.uint8 and images.shape == (COUNT, 32, 32, 3) and labels.shape == (COUNT,)
    if not shapes or labels.dtype.kind not in "iu":
        found = f"images {images.dtype} {images.shape}, labels {labels.dtype} {labels.shape}"
        raise DataError(f"{path}: {found}, {expected}; {remedy}")
    labels = labels.astype(np.int64)
    check_labels(path, labels, 100, remedy)
    return images, labels, 100


READERS: dict[str, Callable[[Path], TestPart]] = {
    "cifar10": partial(read_torchvision, 10),
    "cifar100": read_cifar100,
    "cifar10.1": read_cifar10_1,
}
