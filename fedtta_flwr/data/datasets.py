"""Test sets that streams are cut from, and the data sets' names."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.errors import ConfigError, DataError

#: name -> one line of explanation
DATASETS: dict[str, str] = {
    "digits": "scikit-learn's 1,797 handwritten digits, upscaled to 32x32x3; embedded, no download",
}
CLEAN = "none"


class TestSet(Protocol):
    """Labelled images of which corrupted versions can be had.

    Attributes
    ----------
    classes : int
        Number of classes K.
    labels : ndarray of int64
        [N], in 0..K-1.
    """

    classes: int
    labels: NDArray[np.int64]

    def images(self, corruption: str, severity: int) -> NDArray[np.uint8]:
        """Return all images [N, H, W, 3] under one corruption (`none` for the clean ones)."""
        ...


class Corruptible:
    """A test set in memory whose corrupted versions are made when they are first asked for, and kept.

    Parameters
    ----------
    clean : ndarray of uint8
        [N, H, W, 3].
    labels : ndarray of int64
        [N].
    classes : int
        Number of classes.
    seed : int
        Of the corruptions.
    """

    def __init__(self, clean: NDArray[np.uint8], labels: NDArray[np.int64], classes: int, seed: int) -> None:
        self.labels = labels
        self.classes = classes
        self._seed = seed
        self._versions: dict[tuple[str, int], NDArray[np.uint8]] = {(CLEAN, 0): clean}

    def images(self, corruption: str, severity: int) -> NDArray[np.uint8]:
        """Return all images [N, H, W, 3] under one corruption (`none` for the clean ones)."""
        from fedtta_flwr.data.corruptions import corrupt

        key = (corruption, 0 if corruption == CLEAN else severity)
        if key not in self._versions:
            clean = self._versions[CLEAN, 0]
            self._versions[key] = corrupt(clean, corruption, severity, seed=self._seed)
        return self._versions[key]


def open_test_set(name: str, data_dir: str, seed: int) -> TestSet:
    """Open a data set's test part by name.

    Parameters
    ----------
    name : str
        One of `DATASETS`.
    data_dir : str
        Its folder; must be empty for an embedded set, and exist for all others.
    seed : int
        Of corruptions that are made here.

    Raises
    ------
    ConfigError
        If the name is unknown.
    DataError
        If its folder or a file in it is not as expected.
    """
    if name not in DATASETS:
        raise ConfigError(f"dataset = {name!r}: unknown; allowed: {', '.join(DATASETS)}")
    if data_dir and not Path(data_dir).expanduser().is_dir():
        raise DataError(f"data-dir = {data_dir!r}: no such folder; name the folder that holds {name}")
    return _OPEN[name](data_dir, seed)


def _digits(data_dir: str, seed: int) -> TestSet:
    from fedtta_flwr.data.digits import test_part

    images, labels = test_part()
    return Corruptible(images, labels, classes=10, seed=seed)


_OPEN: dict[str, Callable[[str, int], TestSet]] = {"digits": _digits}
