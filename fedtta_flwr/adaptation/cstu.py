"""RoTTA's memory: which samples of a stream are kept, balanced over classes, timely and certain."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FREE = -1


class CSTU:
    r"""Category-balanced sampling with timeliness and uncertainty (RoTTA, algorithm 1).

    What an image is worth forgetting for, at age A in a memory of N and with entropy H of its prediction,

    .. math:: \lambda_t \frac{1}{1 + e^{-A / N}} + \lambda_u \frac{H}{\ln K}

    A new sample of a class that holds fewer than N / K places takes a free place or, if there is none, that of the
    worst sample of the classes that hold most. Of a class that holds its share it takes the place of this class's
    worst sample. In both cases only if that one is worse than itself. All ages grow with every sample of the stream.

    Only what the choice depends on is here; images stay where they are. The choice is sequential by nature: each
    sample costs a few operations on arrays of N.

    Parameters
    ----------
    capacity : int
        N.
    classes : int
        K.
    age_weight, uncertainty_weight : float
        lambda_t and lambda_u.

    Attributes
    ----------
    labels : Tensor
        int64 [N]: predicted class, -1 for a free place.
    ages : Tensor
        int64 [N].
    uncertainties : Tensor
        float64 [N].
    """

    def __init__(self, capacity: int, classes: int, age_weight: float = 1.0, uncertainty_weight: float = 1.0) -> None:
        self.labels = torch.full((capacity,), FREE)
        self.ages = torch.zeros(capacity, dtype=torch.int64)
        self.uncertainties = torch.zeros(capacity, dtype=torch.float64)
        self._classes = classes
        self._age_weight = age_weight
        self._uncertainty_weight = uncertainty_weight / math.log(classes) if classes > 1 else 0.0

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors, on the CPU."""
        return {"memory.labels": self.labels, "memory.ages": self.ages, "memory.uncertainties": self.uncertainties}

    def clear(self) -> None:
        """Forget all."""
        self.labels.fill_(FREE)

    def occupied(self) -> Tensor:
        """Return the places that are taken, int64 [M]."""
        return (self.labels != FREE).nonzero().flatten()

    def insert(self, labels: Tensor, uncertainties: Tensor) -> dict[int, int]:
        """Let samples in, one after the other.

        Parameters
        ----------
        labels, uncertainties : Tensor
            [B] each, on the CPU: predicted classes and entropies in nats.

        Returns
        -------
        dict[int, int]
            Place -> sample, for all places whose sample is now one of these.
        """
        own, ages, entropies = self.labels.numpy(), self.ages.numpy(), self.uncertainties.numpy()
        changed: dict[int, int] = {}
        for sample, (label, entropy) in enumerate(zip(labels.tolist(), uncertainties.double().tolist(), strict=True)):
            place = self._place(own, ages, entropies, label, entropy)
            if place is not None:
                own[place], ages[place], entropies[place] = label, 0, entropy
                changed[place] = sample
            ages += 1
        return changed

    def _place(
        self,
        labels: NDArray[np.int64],
        ages: NDArray[np.int64],
        entropies: NDArray[np.float64],
        label: int,
        entropy: float,
    ) -> int | None:
        """Return the place that a new sample takes, None if it is not let in."""
        counts = np.bincount(labels[labels != FREE], minlength=self._classes)
        if counts[label] < len(labels) / self._classes:
            free = np.flatnonzero(labels == FREE)
            if len(free):
                return int(free[0])
            candidates = np.flatnonzero((counts == counts.max())[labels])
        else:
            candidates = np.flatnonzero(labels == label)
        scores = self._age_weight / (1 + np.exp(-ages[candidates] / len(labels)))
        scores += self._uncertainty_weight * entropies[candidates]
        worst = int(scores.argmax())
        if scores[worst] > self._age_weight / 2 + self._uncertainty_weight * entropy:
            return int(candidates[worst])
        return None
