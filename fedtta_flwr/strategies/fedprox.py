"""FedProx: FedAvg of clients that are held near the mean they received (Li et al., MLSys 2020, arXiv 1812.06127)."""

from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.fedavg import FedAvg


class FedProx(FedAvg):
    r"""FedAvg; every client adds a proximal term to the loss of its adapter.

    .. math:: h_i(\theta) = F_i(\theta) + \frac{\mu}{2} \lVert \theta - \theta^t \rVert^2   \qquad \text{(eq. 2)}

    with :math:`\theta^t` as received, over the parameters that the adapter's optimiser moves. With one step a round, as
    published, this is FedAvg bit for bit; when the term acts: `fedtta_flwr.adaptation.objectives`. An adapter without
    gradient steps has no loss to add to: FedAvg.

    Parameters
    ----------
    config : RunConfig
        With the table ``fedprox``: mu.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.objectives = {"fedprox.mu": config.fedprox.mu}
