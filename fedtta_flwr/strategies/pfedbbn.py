"""pFedBBN: clients with similar balanced BatchNorm statistics help each other (arXiv 2511.18066)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtta_flwr.adaptation.base import Adapter, statistics
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import PFedBBNOptions
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.similarity import distances, median_distance, softmax_weights
from fedtta_flwr.strategies.updates import Updates


class PFedBBN(PersonalizedStrategy):
    r"""W from the distances between the clients' BatchNorm statistics; with the adapter ``bbn`` the method.

    .. math:: D_{ij} = \frac{1}{|L|} \sum_{l \in L} \frac{1}{2} \left(\lVert \mu_l^i - \mu_l^j \rVert_2 +
        \lVert \sigma_l^{2,i} - \sigma_l^{2,j} \rVert_2\right), \quad W_i = \mathrm{softmax}_j(-D_{ij} / \tau)

    (eqs. 7-8; the two cases of eq. 8 are this softmax with :math:`D_{ii} = 0`), over the running statistics of the
    network that learns: the student's balanced ones with ``bbn``. All that travels is mixed by this W (eq. 9): affine
    parameters, the statistics of student and teacher, and those of every class, from which a client then balances its
    own anew (`fedtta_flwr.adaptation.bbn`), so that the mixture outlives the next batch. W is row-stochastic, but not
    symmetric, as the paper calls it.

    An adapter that uploads no running statistics (it may have none of its own, or upload nothing at all) is asked
    for those of its last batch, as TTA-bn would take them.

    The paper does not give tau, and D, whose norms grow with the number of channels, is on another scale for every
    network. ``tau = "median"`` is that of a round's distances between two clients: statistics that are multiples of
    others give the same W. If nobody differs, W is uniform.

    Parameters
    ----------
    config : RunConfig
        With the table ``pfedbbn``.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options: PFedBBNOptions = config.pfedbbn
        #: the statistics' names and sizes, in the order in which a client would describe them
        self._sizes: dict[str, int] = {}

    def prepare(self, adapter: Adapter) -> None:
        """Learn the network's statistics, and whether they travel.

        Raises
        ------
        ConfigError
            If the network has none.
        """
        super().prepare(adapter)
        self._sizes = {name: len(t) for name, t in statistics(adapter.model).items()}
        if not self._sizes:
            raise ConfigError(
                f"strategy = 'pfedbbn': {type(adapter.model).__name__} has no BatchNorm layer with statistics; choose "
                f"a model with BatchNorm, or another strategy"
            )
        self.descriptor = "" if self._sizes.keys() <= self.source.keys() else "bn-statistics"

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N]."""
        if self.descriptor:
            of_layers = torch.split(self.required_descriptor(updates), list(self._sizes.values()), dim=1)
        else:
            of_layers = tuple(updates.state[name] for name in self._sizes)
        return pfedbbn_weights(statistics_distances(of_layers), self.options.tau)


def statistics_distances(of_layers: Sequence[Tensor]) -> Tensor:
    """Return D [N, N] (eq. 7), in float64, for the means and variances of all layers, each [N, C]."""
    total = distances(of_layers[0])
    for t in of_layers[1:]:
        total += distances(t)
    return total / len(of_layers)  # each layer has two, of which half counts


def pfedbbn_weights(distance: Tensor, tau: float | str) -> Tensor:
    """Return ``softmax_j(-D_ij / tau)``, [N, N] (eq. 8), for D [N, N]; with "median", D's own is tau."""
    return softmax_weights(distance, median_distance(distance) if isinstance(tau, str) else tau)
