"""FedAvg+FT: one mean for everyone, which each client adapts once more to its own batch."""

from fedtta_flwr.strategies.fedavg import FedAvg


class FedAvgFT(FedAvg):
    r"""FedAvg whose mean every client finetunes before it is scored as `post`, and from which it goes on.

    With :math:`x_i` the batch of client i in this round and A the step of its adapter,

    .. math:: \theta_i \leftarrow A\big(\textstyle\sum_j \frac{n_j}{n} \theta_j,\; x_i\big).

    Without labels finetuning is adaptation, so the batch (the last one where a round has several) takes part twice.
    What the published codes of FTTA score is the forward pass of the second step, before it has changed anything; here
    `post` is what the finetuned model predicts. With `bn-stats`, which at a momentum of 1 keeps nothing of what came,
    it equals `local`.
    """

    finetune = True
