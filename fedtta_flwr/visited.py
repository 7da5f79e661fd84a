"""What one client's visit contributes to its node's reply."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedtta_flwr.memory import Remembered
from fedtta_flwr.records import NOT_KNOWN


@dataclass
class Visited:
    """What one client contributes to the reply."""

    domains: list[str] = field(default_factory=list)
    counts: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    failure: str = ""
    late_domain: str = ""
    late_round: int = 0
    samples: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    descriptor: Tensor | None = None
    largest_share: float = NOT_KNOWN  # of one class in the predictions, at its worst
    memory: Remembered | None = None
    forgot: bool = False
    histogram: Tensor | None = None
    loss: float | None = None  # of a training
    unknown: int = 0  # predictions that are none, not being finite

    def count(self, key: str, correct: Tensor) -> None:
        """Enter counts [K] for the latest slot, since those before it may have had no labels."""
        self.counts.setdefault(key, {})[0 if key.startswith("late") else len(self.domains) - 1] = correct

    def score(self, key: str, logits: Tensor, labels: Tensor) -> None:
        """Enter for the latest slot how many samples of each class the logits [B, K] get right; labels are on the CPU.

        What is not finite predicts nothing: the largest of NaN would be class 0. A graphics card is waited for once:
        boolean indices and `bincount` would do that on their own.
        """
        largest, classes = logits.max(dim=1)
        found = torch.where(largest.isfinite(), classes, -1).cpu()
        self.unknown += int((found < 0).sum())
        self.count(key, torch.bincount(labels[found == labels], minlength=logits.shape[1]))
