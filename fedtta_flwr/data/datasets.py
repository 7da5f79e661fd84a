"""Test sets that streams are cut from, and the data sets' names."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.data.contracts import Images, TestSet
from fedtta_flwr.data.corruptions import MIN_SIDE, corrupt
from fedtta_flwr.data.folders import ImageTree
from fedtta_flwr.data.recent import Recent
from fedtta_flwr.errors import ConfigError, DataError
from fedtta_flwr.paths import expanded

#: name -> one line of explanation
DATASETS: dict[str, str] = {
    "digits": "scikit-learn's 1,797 handwritten digits, upscaled to 32x32x3; embedded, no download",
    "cifar10-c": "the published arrays, <corruption>.npy and labels.npy (`fedtta data get cifar10-c`)",
    "cifar100-c": "the same for CIFAR-100 (`fedtta data get cifar100-c`)",
    "cifar10": "torchvision's cifar-10-batches-py; its test part is corrupted as it is used",
    "cifar100": "torchvision's cifar-100-python, or cifar100_test.npz; corrupted as it is used",
    "cifar10.1": "cifar10.1_v6_data.npy and cifar10.1_v6_labels.npy; corrupted as it is used",
    "folder": "a folder of images for each class; resized to image-size, corrupted as it is used",
    "arrays": "images.npy (uint8 [N, S, S, 3], S >= 32) and labels.npy; corrupted as it is used",
    "live": "unlabelled images that arrive in a folder while the run goes on",
}
CLEAN = "none"
MANY_CLASSES = 1000  # labels below are believed, however few images there are
#: those without clean images
NO_CLEAN = ("cifar10-c", "cifar100-c", "live")
#: those in which image-size counts, and those that can have more classes than the labels show
RESIZED, OPEN_ENDED = ("folder", "live"), ("arrays", "live")


class Corruptible:
    """A test set whose corrupted images are made when they are asked for; the latest 512 MiB are kept.

    Parameters
    ----------
    clean : Images
        uint8 [N, H, W, 3], in memory or on disk.
    labels : ndarray of int64
        [N].
    classes : int
        Number of classes.
    seed : int
        Of the corruptions.
    unfit : str
        Why these images cannot be corrupted, in one line; empty if they can.
    class_names : sequence of str
        Where they are known.
    """

    def __init__(
        self,
        clean: Images,
        labels: NDArray[np.int64],
        classes: int,
        seed: int,
        *,
        unfit: str = "",
        class_names: Sequence[str] = (),
    ) -> None:
        self.labels = labels
        self.class_names = class_names
        self.classes = classes
        self._seed = seed
        self._clean = clean
        self._unfit = unfit
        self._made: Recent[Version] = Recent()

    def check(self) -> None:
        """Look at the header of every image that is a file of its own; a run would come to a wrong one late.

        Raises
        ------
        DataError
            One is no image, or cannot be read.
        """
        if isinstance(self._clean, ImageTree):
            self._clean.check()

    def images(self, corruption: str, severity: int) -> Images:
        """Return all images [N, H, W, 3] under one corruption (`none` for the clean ones).

        Raises
        ------
        DataError
            If they cannot be corrupted.
        """
        if corruption == CLEAN:
            return self._clean
        if self._unfit:
            raise DataError(self._unfit)
        return Corrupted(self._clean, corruption, severity, self._seed, self._made)


#: corruption, severity and position of an image
Version = tuple[str, int, int]


class Corrupted:
    """One corrupted version of some images; an image is made when it is read, unless it is kept.

    A sample's corruption depends on its position alone, so it is the same whenever and in whatever order it is made.
    """

    def __init__(self, clean: Images, corruption: str, severity: int, seed: int, made: Recent[Version]) -> None:
        self._clean, self._corruption, self._severity, self._seed, self._made = clean, corruption, severity, seed, made

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._clean)

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """Return the images [B, H, W, 3] at these positions."""
        rows = np.arange(len(self))[rows]
        if not len(rows):
            return self._clean[rows]
        return self._made.take([(self._corruption, self._severity, row) for row in rows.tolist()], self._make)

    def _make(self, versions: list[Version]) -> NDArray[np.uint8]:
        rows = np.array([row for _, _, row in versions])
        return corrupt(self._clean[rows], self._corruption, self._severity, seed=self._seed, indices=rows)


def check_files(data: TestSet | None) -> None:
    """Do what `Corruptible.check` does, where a set is one; all others are mapped arrays, or nothing."""
    if isinstance(data, Corruptible):
        data.check()


def open_test_set(name: str, data_dir: str, seed: int, *, image_size: int = 32, classes: int = 0) -> TestSet:
    """Open a data set's test part by name.

    Parameters
    ----------
    name : str
        One of `DATASETS`, except "live", which is no set but a stream.
    data_dir : str
        Its folder; must be empty for an embedded set, and exist for all others.
    seed : int
        Of corruptions that are made here.
    image_size : int
        Pixels a side of the images of a "folder".
    classes : int
        Number of classes; 0 = as many as the set has. Only "arrays" may have more than its labels show.

    Raises
    ------
    ConfigError
        If the name is unknown, or an option does not apply to this set.
    DataError
        If its folder or a file in it is not as expected.
    """
    if name not in _OPEN:
        raise ConfigError(f"dataset = {name!r}: unknown; allowed: {', '.join(DATASETS)}")
    if name not in RESIZED and image_size != 32:
        raise ConfigError(f"image-size = {image_size}: {name} has 32, or its own; allowed with {', '.join(RESIZED)}")
    folder = expanded("data-dir", data_dir)
    if data_dir and not folder.is_dir():
        raise DataError(f"data-dir = {data_dir!r}: no such folder; name the folder that holds {name}")
    if name == "digits" and data_dir:
        raise ConfigError(f"data-dir = {data_dir!r}: {name} needs none; leave it empty")
    if name != "digits" and not data_dir:
        raise ConfigError(f"data-dir is empty: dataset = {name!r} needs the folder that holds it")
    found = _OPEN[name](folder, seed, image_size, classes)
    if classes and classes != found.classes:
        raise ConfigError(f"classes = {classes}: {name} has {found.classes}; allowed: 0 or {found.classes}")
    return found


def _digits(folder: Path, seed: int, size: int, classes: int) -> TestSet:
    from fedtta_flwr.data.digits import test_part

    images, labels = test_part()
    return Corruptible(images, labels, 10, seed)


def _zenodo(name: str) -> Callable[[Path, int, int, int], TestSet]:
    def open_it(folder: Path, seed: int, size: int, classes: int) -> TestSet:
        from fedtta_flwr.data.zenodo import ZenodoSet

        return ZenodoSet(folder, name)

    return open_it


def _cifar(name: str) -> Callable[[Path, int, int, int], TestSet]:
    def open_it(folder: Path, seed: int, size: int, classes: int) -> TestSet:
        from fedtta_flwr.data.cifar import READERS

        images, labels, found = READERS[name](folder)
        return Corruptible(images, labels, found, seed)

    return open_it


def _folder(folder: Path, seed: int, size: int, classes: int) -> TestSet:
    tree = ImageTree(folder, size)
    unfit = f"image-size = {size}: corruptions need {MIN_SIDE} or more; make it larger, or set corruptions to 'none'"
    unfit = "" if size >= MIN_SIDE else unfit
    return Corruptible(tree, tree.labels, len(tree.class_names), seed, unfit=unfit, class_names=tree.class_names)


def _arrays(folder: Path, seed: int, size: int, classes: int) -> TestSet:
    from fedtta_flwr.data.npy import check_labels, map_array

    remedy, path = "write both with numpy.save", folder / "labels.npy"
    images = map_array(folder / "images.npy", dtype="uint8", shape=(None, None, None, 3), remedy=remedy)
    labels = map_array(path, dtype="integer", shape=(len(images),), remedy=remedy).astype(np.int64)
    check_labels(path, labels, classes or None, "number the classes from 0, and set `classes` to how many there are")
    if not classes and (largest := int(labels.max())) >= max(len(labels), MANY_CLASSES):
        row = int(labels.argmax())
        raise DataError(f"{path}: label {largest} at {row}, of {len(labels)} images; set `classes` if it is meant so")
    height, width = images.shape[1:3]
    unfit = (
        f"{folder / 'images.npy'}: images of {height}x{width} pixels; corruptions need square ones of {MIN_SIDE} a "
        f"side or more; resize them, or set corruptions to 'none'"
    )
    unfit = "" if height == width >= MIN_SIDE else unfit
    return Corruptible(images, labels, classes or int(labels.max()) + 1, seed, unfit=unfit)


_OPEN: dict[str, Callable[[Path, int, int, int], TestSet]] = {
    "digits": _digits,
    **{name: _zenodo(name) for name in ("cifar10-c", "cifar100-c")},
    **{name: _cifar(name) for name in ("cifar10", "cifar100", "cifar10.1")},
    "folder": _folder,
    "arrays": _arrays,
}
