"""pFedGraph: the collaboration graph as the solution of a quadratic programme (ICML 2023)."""

import torch
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.options import PFedGraphOptions
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.fedavg import fedavg_weights
from fedtta_flwr.strategies.similarity import cosines, gram
from fedtta_flwr.strategies.updates import Updates


class PFedGraph(PersonalizedStrategy):
    r"""W from the directions in which the clients have moved away from the source model.

    .. math:: W_i = \arg\min_{w \in \Delta} \; \lambda \lVert w - p \rVert^2 + d_i^\top w, \quad
        d_{ij} = -\cos(\theta_i - \theta_0, \theta_j - \theta_0)

    on the simplex (Ye et al., "Personalized Federated Learning with Inferred Collaboration Graphs"), with the clients'
    shares p of this round's samples; as in the published code d below -0.9 counts as -1. Completing the square, it is
    the projection of :math:`p - d_i / (2 \lambda)` onto the simplex, which needs no solver.

    The angles are of all that the clients upload: with ``bn-stats`` of the BatchNorm statistics less the source's.
    Where parameters travel too, statistics, which move further, decide. A client that has not moved has no direction:
    it receives p, as does everybody if nothing travels, and counts as orthogonal (d = 0) to the others. Clients that
    take gradient steps are pulled towards what they received by their cosine, which changes nothing with one step a
    round; when it acts: `fedtta_flwr.adaptation.objectives`.

    Parameters
    ----------
    config : RunConfig
        With the table ``pfedgraph``: lam (lambda), weight (of the local term).
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options: PFedGraphOptions = config.pfedgraph
        if self.options.weight:
            self.objectives = {"pfedgraph.weight": self.options.weight}

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N]."""
        similarity = cosines(gram(updates.state, self.source, len(updates)))
        return pfedgraph_weights(similarity, fedavg_weights(updates.examples)[0], self.options.lam)


def pfedgraph_weights(similarity: Tensor, shares: Tensor, lam: float) -> Tensor:
    """Return W [N, N] for cosines [N, N] and shares p [N]; a row of zeros, without a direction, gets p."""
    close = torch.where(similarity > 0.9, 1.0, similarity)
    # A constant a row changes no projection; without it tiny lambdas would overflow.
    return project_onto_simplex(shares + (close - close.amax(dim=1, keepdim=True)) / (2 * lam))


def project_onto_simplex(points: Tensor) -> Tensor:
    """Return the nearest points of the probability simplex, row by row, for points [M, N].

    By sorting (Held, Wolfe and Crowder 1974): ``max(v - tau, 0)`` with tau from the largest k for which the k-th
    largest entry stays positive.
    """
    # What lies 1 or more below the largest entry gets nothing, however far below.
    v = (points - points.amax(dim=1, keepdim=True)).clamp_min_(-1)
    ordered = v.sort(dim=1, descending=True).values
    ranks = torch.arange(1, v.shape[1] + 1, dtype=v.dtype)
    thresholds = (ordered.cumsum(dim=1) - 1) / ranks
    support = (ordered > thresholds).sum(dim=1, keepdim=True)
    return (v - thresholds.gather(1, support - 1)).clamp_min_(0)
