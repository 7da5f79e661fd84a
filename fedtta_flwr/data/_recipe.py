"""What a corruption's recipe is given and gives back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
Floats = NDArray[np.float64]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Batch:
    """Images to corrupt, each with its own random generator.

    Parameters
    ----------
    images : ndarray of uint8, shape (N, S, S, 3)
        RGB images, 0 to 255.
    rngs : sequence of N numpy generators
        The n-th makes every draw of the n-th image, which therefore depends on no other image.
    frost_dir : Path, optional
        The folder of the frost photographs.
    """

    images: Images
    rngs: Sequence[np.random.Generator]
    frost_dir: Path | None = None

    @property
    def side(self) -> int:
        """Height and width S of an image in pixels."""
        return int(self.images.shape[1])

    @property
    def unit(self) -> Floats:
        """The images scaled to [0, 1], shape (N, S, S, 3)."""
        return self.images / 255

    def draw(self, sample: Callable[[np.random.Generator], NDArray[Scalar]]) -> NDArray[Scalar]:
        """Return `sample` of every image's generator, stacked along a new first axis."""
        return np.stack([sample(rng) for rng in self.rngs])


class Recipe(NamedTuple):
    """A corruption and its five published settings.

    `apply(batch, *settings[severity - 1])` returns images of shape (N, S, S, 3): either floats on
    the scale [0, 1], to be clipped and truncated to uint8, or finished uint8.
    """

    apply: Callable[..., NDArray[Any]]
    settings: tuple[tuple[float, ...], ...]
