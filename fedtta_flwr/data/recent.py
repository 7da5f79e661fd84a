"""Images that take long to make or to read, kept in memory while there is room."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

#: bytes that are kept: all of CIFAR-10-C (460 MB) is made once
ROOM = 512 * 2**20
Key = TypeVar("Key", bound=Hashable)


class Recent(Generic[Key]):
    """The images that were made last, by key; the oldest make room for others."""

    def __init__(self) -> None:
        self._kept: dict[Key, NDArray[np.uint8]] = {}  # the oldest first

    def take(self, keys: Sequence[Key], make: Callable[[list[Key]], Iterable[NDArray[np.uint8]]]) -> NDArray[np.uint8]:
        """Return the images [B, H, W, 3] of one or more keys; `make` is asked for those that are not kept."""
        if lacking := [key for key in dict.fromkeys(keys) if key not in self._kept]:
            self._kept |= zip(lacking, make(lacking), strict=True)
        images = np.stack([self._kept[key] for key in keys])
        for oldest in list(islice(self._kept, max(len(self._kept) - ROOM // images[0].nbytes, 0))):
            del self._kept[oldest]
        return images
