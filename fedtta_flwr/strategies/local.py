"""No collaboration: every client keeps its own adapted state."""

import torch
from torch import Tensor

from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.updates import Updates


class Local(PersonalizedStrategy):
    """The baseline of every table: W is the identity."""

    selective = False

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return the identity [N, N]."""
        return torch.eye(len(updates))

    def bounded(self, updates: Updates) -> Updates:
        """Return the updates as they are: there is nobody whom they could harm."""
        return updates
