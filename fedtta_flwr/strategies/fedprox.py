"""FedProx: FedAvg of clients that are held near the mean they received (Li et al., MLSys 2020, arXiv 1812.06127)."""

from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.fedavg import FedAvg


class FedProx(FedAvg):
    r"""FedAvg; every client adds a proximal term to the loss of its adapter.

    .. math:: h_i(\theta) = F_i(\theta) + \frac{\mu}{2} \lVert \theta - \theta^t \rVert^2   \qquad \text{(eq. 2)}

    with :math:`\theta^t` as received, over the parameters that the adapter's optimiser moves. The first step of a
    round begins there, where the term has no gradient: with one step a round, as published, FedProx is FedAvg bit for
    bit, and acts from ``aggregate-every`` = 2 on. (`sar` looks at its loss beside the parameters, so there it acts at
    once.) An adapter without gradient steps has no loss to add to: FedAvg.

    Parameters
    ----------
    config : RunConfig
        With the table ``fedprox``: mu.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.objectives = {"fedprox.mu": config.fedprox.mu}
