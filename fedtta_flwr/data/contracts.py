"""What a test set and a client's stream must offer; the project's own and the user's are used through nothing else."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


class Images(Protocol):
    """Images of which some can be read without the others."""

    def __len__(self) -> int:
        """Return the number of images N."""
        ...

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """Return the images [B, H, W, 3] at these positions."""
        ...


def to_tensor(images: NDArray[np.uint8]) -> "Tensor":
    """Return images [B, H, W, C] as a float32 tensor [B, C, H, W] in [0, 1]."""
    import torch

    return torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32).div_(255).contiguous()


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

    def images(self, corruption: str, severity: int) -> Images:
        """Return all images [N, H, W, 3] under one corruption (`none` for the clean ones)."""
        ...


class ClientStream(Protocol):
    """What a client needs of its stream; `fedtta_flwr.data.streams.Stream` is one, an own one may be any class.

    Attributes
    ----------
    domains : sequence of str
        What every slot is counted under in the reports: a corruption, as a rule.
    """

    @property
    def domains(self) -> Sequence[str]: ...  # noqa: D102

    def __len__(self) -> int:
        """Return the number of slots."""
        ...

    def batch(self, slot: int) -> tuple["Tensor", NDArray[np.int64] | None]:
        """Return images [B, 3, H, W] in [0, 1] and labels [B], or None where there are none; B may be 0."""
        ...


@runtime_checkable
class TakesPredictions(Protocol):
    """A stream that wants to know what was predicted for its unlabelled slots."""

    def predicted(self, slot: int, probabilities: "Tensor", version: int) -> None:
        """Take the probabilities [B, K] that the model of round `version` reported while it adapted to a slot."""
        ...
