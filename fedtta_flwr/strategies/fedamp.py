"""FedAMP: the nearer two clients' states, the more they attend to each other (AAAI 2021, arXiv 2007.03797)."""

import math
from logging import WARNING

import torch
from flwr.common.logger import log
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.options import FedAMPOptions
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.similarity import cosines, gram, nearest, scaled, squared_distances
from fedtta_flwr.strategies.updates import Updates


class FedAMP(PersonalizedStrategy):
    r"""W from the mean squared distances d of the clients' states, over all that they upload.

    .. math:: W_{ii} = s, \quad W_{ij} = (1 - s) \frac{e^{-d_{ij}/\sigma}}{\sum_{k \ne i} e^{-d_{ik}/\sigma}}

    is the rule ``normalised``, with s = 0.3 as in the codes of pFedGraph and FedTSA. The paper's own with
    :math:`A(x) = 1 - e^{-x/\sigma}`, the rule ``original``, is

    .. math:: W_{ij} = \alpha A'(d_{ij}) = \alpha e^{-d_{ij}/\sigma} / \sigma, \quad W_{ii} = 1 - \sum_{j \ne i} W_{ij}

    where a client whose own weight would be negative gets 0 and its neighbours are scaled to sum to 1. The paper's d
    is a sum over the P entries, of which the exponential of any real network vanishes, so that nobody collaborates;
    here it is their mean: the paper's :math:`\sigma`, :math:`\alpha` and :math:`\lambda` are :math:`\sigma/P`,
    :math:`\alpha/P` and :math:`\lambda/P` here. The rule ``cosine`` is the paper's HeurFedAMP as pFedGraph compares
    with it: ``normalised`` with exp(10 cos) of what clients have added to the source model in the place of
    :math:`e^{-d/\sigma}`.

    With ``bn-stats`` d is of BatchNorm statistics alone; where parameters travel too all entries count alike. If
    nothing travels all distances are 0. Parameters hardly move, so that their d is near 0: with :math:`\sigma` = 1, as
    published, all others get the same weight. ``sigma = "median"``, for ``normalised``, is that of a round's distances
    to the nearest other client: multiples of all d then give the same W.

    Clients that take gradient steps are pulled towards what they received:
    :math:`\lambda / (2 \alpha) \lVert \theta - u \rVert^2`, which changes nothing with one step a round; when it acts:
    `fedtta_flwr.adaptation.objectives`.

    Parameters
    ----------
    config : RunConfig
        With the table ``fedamp``: rule, self-weight, sigma, alpha, weight (lambda).
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options: FedAMPOptions = config.fedamp
        if self.options.weight:
            self.objectives = {"fedamp.weight": self.options.weight, "fedamp.alpha": self.options.alpha}
        self._warned = False

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N]."""
        options, clients = self.options, len(updates)
        products = gram(updates.state, self.source, clients)
        if options.rule == "cosine":
            return attention(10 * cosines(products), options.self_weight)
        entries = sum(t.numel() for t in updates.state.values()) // clients
        distances = squared_distances(products) / max(1, entries)
        to_nearest = nearest(distances)
        sigma = float(to_nearest.median()) if isinstance(options.sigma, str) else options.sigma
        if options.rule == "normalised":
            # Beyond the nearest other: the same weights, and the limit also where sigma is 0 and the nearest is not.
            beyond = (distances - to_nearest[:, None]).clamp_min(0)
            return attention(-scaled(beyond, sigma), options.self_weight)
        weights, clipped = original_attention(distances, sigma, options.alpha)
        if clipped and not self._warned:
            self._warned = True
            log(
                WARNING,
                "round %d: FedAMP leaves %d of %d clients no weight of their own; make fedamp.alpha smaller, or "
                "fedamp.sigma larger",
                updates.round,
                clipped,
                clients,
            )
        return weights


def attention(scores: Tensor, self_weight: float) -> Tensor:
    """Return W [N, N]: `self_weight` on the diagonal, the rest by the softmax of a row's other scores [N, N]."""
    clients = len(scores)
    if clients == 1:
        return torch.ones_like(scores)
    others = scores.clamp_min(torch.finfo(scores.dtype).min).fill_diagonal_(-math.inf)
    return ((1 - self_weight) * torch.softmax(others, dim=1)).fill_diagonal_(self_weight)


def original_attention(distances: Tensor, sigma: float, alpha: float) -> tuple[Tensor, int]:
    """Return FedAMP's own W [N, N] for distances d [N, N], and for how many clients the sum had to be clipped at 1."""
    # In logarithms, since exp(-d / sigma) / sigma may be out of range where its share is not.
    scores = (math.log(alpha) - math.log(sigma) - distances / sigma).fill_diagonal_(-math.inf)
    excess = torch.logsumexp(scores, dim=1).clamp_min_(0)
    others = (scores - excess[:, None]).exp_()
    return others + torch.diag((1 - others.sum(dim=1)).clamp_min_(0)), int((excess > 0).sum())
