"""MyStrategy: clients whose BatchNorm means are alike help each other."""

import torch
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.updates import Updates, flat
from torch import Tensor


class MyStrategy(PersonalizedStrategy):
    r"""W from the squared distances between the clients' BatchNorm means.

    .. math:: W_i = \mathrm{softmax}_j(-d_{ij} / (T \bar d)), \quad d_{ij} = \lVert m_i - m_j \rVert_2^2

    where :math:`\bar d` is the mean over pairs of different clients, so that T means the same for any network. With an
    adapter whose means do not travel, m is all that does.
    """

    #: T: the smaller, the less clients take from others; ``strategy-options = "temperature=0.1"`` in the run config
    #: sets another
    temperature = 0.05

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N], row-stochastic: client i receives ``sum_j W_ij theta_j``."""
        if not updates.state:  # an adapter of which nothing travels
            return torch.eye(len(updates))
        means = [name for name in updates.state if name.endswith("_mean")] or list(updates.state)
        return my_strategy_weights(flat(updates.state, means), self.temperature)


def my_strategy_weights(m: Tensor, temperature: float) -> Tensor:
    """Return W [N, N] for the clients' vectors m [N, P]; in float64, which loses no small difference."""
    d = torch.cdist(m.double(), m.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    unit = temperature * d.sum() / max(1, len(d) * (len(d) - 1))
    return torch.softmax(-d / unit.clamp_min(torch.finfo(d.dtype).tiny), dim=1)
