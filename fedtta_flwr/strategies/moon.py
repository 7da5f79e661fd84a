"""MOON: model-contrastive federated learning (Li et al., CVPR 2021, arXiv 2103.16257)."""

from fedtta_flwr.config import RunConfig
from fedtta_flwr.strategies.fedavg import FedAvg


class MOON(FedAvg):
    r"""FedAvg; every client draws its features towards the received model's, and off those of its own previous one.

    .. math::
        \ell_i = F_i(\theta) - \mu \log \frac{\exp(\mathrm{sim}(z, z_{glob}) / \tau)}
            {\exp(\mathrm{sim}(z, z_{glob}) / \tau) + \exp(\mathrm{sim}(z, z_{prev}) / \tau)}

    with the cosine as similarity, a mean over the batch. The features z are those before the classifier, as in the
    published code of FTTA: the paper's projection head would have to be learned from labels. The previous model is the
    one that the client had at the end of its last round. An adapter without gradient steps has no loss to add to:
    FedAvg.

    Parameters
    ----------
    config : RunConfig
        With the table ``moon``: mu, temperature.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.objectives = {"moon.mu": config.moon.mu, "moon.temperature": config.moon.temperature}
