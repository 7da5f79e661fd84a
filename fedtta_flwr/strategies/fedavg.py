"""FedAvg: one mean for everyone (McMahan et al., AISTATS 2017)."""

from torch import Tensor

from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.updates import Updates


class FedAvg(PersonalizedStrategy):
    """Every row of W holds the clients' shares of this round's samples; 1/N for equal batches."""

    selective = False

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N] with equal rows."""
        return fedavg_weights(updates.examples)


def fedavg_weights(examples: Tensor) -> Tensor:
    """Return W [N, N], ``W_ij = n_j / sum n``, for sample counts [N]; 1/N if no client has a sample."""
    total = examples.sum()
    row = examples / total if total > 0 else examples.new_full(examples.shape, 1 / len(examples))
    return row.expand(len(examples), -1).clone()
