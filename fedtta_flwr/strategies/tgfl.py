"""Two heads on one extractor: federated training, then prediction sample by sample (BTFL, FedTHE and others)."""

from collections.abc import Iterable
from logging import WARNING

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedtta_flwr.data.btgfl import SETS
from fedtta_flwr.errors import FederationError
from fedtta_flwr.phases import MEASURE, TRAIN, phase_of
from fedtta_flwr.records import CLIENTS, STATISTICS
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.rounds import Round
from fedtta_flwr.strategies.updates import State, Update, Updates, means_of


class TGFL(PersonalizedStrategy):
    r"""FedAvg of extractor and global head, then of what predictors measured; from then on nothing is mixed.

    With N clients in a round of training every client receives, present or not,

    .. math:: \theta = \frac{1}{N} \sum_j \theta_j ,

    a uniform mean, not one weighted by samples, as the published code of BTFL has it. In the round that follows
    training clients send no network but their descriptor, the discretised-likelihood estimator and the mean feature of
    their training parts, and receive its uniform mean and N, from which each can leave itself out.

    Parameters
    ----------
    config : RunConfig
        Of it the table ``tgfl`` counts; ``strategy`` and ``adapter`` do not.

    References
    ----------
    BTFL (KDD 2025), section 4 and Algorithm 1; FedTHE (ICLR 2023, arXiv 2205.10920).
    """

    descriptor = STATISTICS
    selective = False
    one_for_all = True

    def expected(self) -> Update:
        """Return the network where clients train, the statistics where they measure, and nothing where they predict."""
        phase = phase_of(self.config, self._round.number)
        network = {name: t for name, t in self.source.items() if name not in (STATISTICS, CLIENTS)}
        return Update(network if phase == TRAIN else {}, self.source[STATISTICS] if phase == MEASURE else None, 0)

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N], each entry 1/N."""
        return torch.full((len(updates), len(updates)), 1 / len(updates))

    def personalize(self, updates: Updates) -> State:
        """Return the clients' mean, once for each as a view; of a round that measured, nothing."""
        if phase_of(self.config, updates.round) == MEASURE:
            self._share_statistics(updates)
            return {}
        self._round.weights = self.collaboration_matrix(updates)
        # In double precision the mean of equal tensors, such as the input normalisation, is that tensor.
        means = {name: t.mean(dim=0, dtype=torch.float64) for name, t in updates.state.items()}
        for name in means if self.config.bn_pooling == "moments" else ():
            if own := means_of(name, means):
                means[name] += (updates.state[own].double() - means[own]).square().mean(dim=0)  # as in `mix`
        return {name: means[name].to(t.dtype).expand_as(t) for name, t in updates.state.items()}

    def unmixed(self, updates: Updates) -> tuple[State, str]:
        """Return nothing: where too few took part, all go on with what they had. What was measured is averaged."""
        if phase_of(self.config, updates.round) == MEASURE:
            return self.personalize(updates), "what they measured is averaged all the same"
        return {}, "all go on with what they had"

    def largest_slot(self) -> int:
        """Return no limit but that of the counts: a slot is a client's whole training part or test set."""
        return int(torch.iinfo(torch.int32).max)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Do what the base does; who predicted took part, though it sent no update.

        Raises
        ------
        FederationError
            Also if nobody was measured, for a head that needs it.
        """
        result = super().aggregate_train(server_round, replies)
        if not self._round.clients:
            asked = {client for clients in self._asked_by.values() for client in clients}
            self._round.clients = tuple(sorted(asked - self._round.missing.keys()))
        phase = phase_of(self.config, server_round)
        if phase == MEASURE and not self._round.clients and self.source[STATISTICS].numel():
            raise FederationError(
                f"round {server_round}: nobody could be measured, without which head = {self.config.head!r} cannot "
                f"predict; resume from the last checkpoint"
            )
        if phase in SETS and not self._round.clients:
            log(WARNING, "round %d: test set %s is lost; means over the test sets are without it", server_round, phase)
        return result

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return no closing messages: no score is late."""
        self._round = Round(server_round, closing=True)
        return []

    def _keep(self, clients: tuple[str, ...], states: State) -> None:
        """Give the one new state to all clients of the run, whoever took part."""
        shared = {name: t[0].clone() for name, t in states.items()}
        for client in self.config.client_names() if shared else ():
            self.personal[client] = self.personal.get(client, self.source) | shared

    def _share_statistics(self, updates: Updates) -> None:
        """Give the mean of what was measured to all, and its N; 0 to those who are not in it."""
        mean = self.required_descriptor(updates).mean(dim=0)
        number, none = torch.tensor(float(len(updates))), torch.zeros(())
        for client in self.config.client_names():
            there = number if client in updates.clients else none
            self.personal[client] = self.personal.get(client, self.source) | {STATISTICS: mean, CLIENTS: there}
