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
    sure: list[Tensor] = field(default_factory=list)  # of each slot, see `enter_confidence`
    memory: Remembered | None = None
    forgot: bool = False
    histogram: Tensor | None = None
    loss: float | None = None  # of a training
    unknown: int = 0  # predictions that are none, not being finite

    @property
    def confidence(self) -> float:
        """The mean probability of what was predicted, from 1/K to 1; `NOT_KNOWN` without predictions."""
        total, known = torch.stack(self.sure).sum(dim=0).tolist() if self.sure else (0.0, 0.0)
        return min(1.0, total / known) if known else NOT_KNOWN

    def enter_confidence(self, logits: Tensor) -> None:
        """Enter how sure logits [B, K] are: of their largest probabilities the sum, and of how many samples it is.

        A graphics card is not waited for. What is not finite predicts nothing.
        """
        largest = logits.float().softmax(dim=1).amax(dim=1)
        self.sure.append(torch.stack([largest.nan_to_num().sum(), largest.isfinite().sum()]))

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
