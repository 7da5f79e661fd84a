"""pFedSD: federated self-knowledge distillation (Jin et al. 2022, IEEE TPDS)."""

from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.fedavg import FedAvg


class PFedSD(FedAvg):
    r"""FedAvg; every client distils what its own previous model knew into the mean that it received.

    .. math:: \ell_i = F_i(\theta) + \lambda\, T^2\, \mathrm{KL}\big(\mathrm{softmax}(g_{prev} / T) \,\Vert\,
        \mathrm{softmax}(g / T)\big)

    for logits g of the batch, a mean over it. The previous model is the one that the client had at the end of its last
    round. An adapter without gradient steps has no loss to add to: FedAvg.

    Parameters
    ----------
    config : RunConfig
        With the table ``pfedsd``: weight (:math:`\lambda`), temperature.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.objectives = {"pfedsd.weight": config.pfedsd.weight, "pfedsd.temperature": config.pfedsd.temperature}
