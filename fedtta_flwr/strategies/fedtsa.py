"""FedTSA: attention over time and clients, trained on their features (KDD 2024, doi 10.1145/3637528.3671908)."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.options import FedTSAOptions
from fedtta_flwr.seeding import torch_rng
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.ts_block import Attention, new_block, train_block, untrained_attention
from fedtta_flwr.strategies.updates import State, Updates, is_statistic, mix

ROUND, INDICATOR = "round", "indicator"


class FedTSA(PersonalizedStrategy):
    r"""W from what the clients' features have in common, now and in the last T rounds.

    A client's indicator is the mean of the source model's features over its (in a round of several slots, its last)
    batch. From the last T of all clients, X [N, T, D], self-attention makes for each client and then for each slot

    .. math:: A = \mathrm{softmax}\Big(\frac{(X W_Q + b)(X W_K)^\top}{\sqrt D}\Big), \quad X' = A X

    (eqs. 9-14), both trained to give X back, and to give the same with a part of their cells masked (eq. 18;
    `ts_block`, `ts_masks`). W is the attention over clients in the last slot, at the step with the lowest loss.

    Where the paper leaves it open or cannot be meant literally, this follows the published code: W is the softmax, not
    the raw products of eq. 13, which have negative entries; masked cells have no weight at all; training begins anew
    every round, from queries and keys that are the features; the graph is of the attended features. Beyond both:

    * With clients that come and go, slots are rounds, and W is made for those who replied. A client that missed a
      round has in its slot what it sent last before, and one that is new, in the slots before its first, that first.
      X has min(t, T) slots in round t.
    * ``mix-time``: BatchNorm statistics that a client j gives to a mixture are those of its last T slots, weighted by
      its attention over time, :math:`\sum_\tau A_{j \tau} m_{j \tau}` (an earlier version of the code). All else is
      of this round alone, in any case.
    * ``warm-start``: training goes on from the block that the last round's ended with; Adam's moments begin anew.

    Works with every adapter: W depends on the batches alone, whatever they are adapted to and whatever travels.

    Parameters
    ----------
    config : RunConfig
        With the table ``fedtsa``: slots, steps, learning-rate, augmentation-weight, variant, masks, mix-time,
        warm-start.
    """

    descriptor = "feature-mean"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options: FedTSAOptions = config.fedtsa
        self._bank = MemoryBank(config.fedtsa.slots)
        self._block: State = {}
        self._temporal = torch.empty(0)

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N] in float64; remembers each client's indicators under its name."""
        remembered = {INDICATOR: self.required_descriptor(updates)}
        if self.options.mix_time:
            remembered |= _statistics(updates.state)
        self._bank.add(updates.round, updates.clients, remembered)
        attention = self._attention(self._bank.window(updates.round, updates.clients, INDICATOR), updates.round)
        self._temporal = attention.temporal
        return attention.spatial.double()

    def personalize(self, updates: Updates) -> State:
        """Return the mixtures, each [N, *shape]; with ``mix-time``, statistics are those of all T slots."""
        mixed = super().personalize(updates)
        if self.options.mix_time and self._round.weights is not None:
            weights = self._round.weights[:, :, None] * self._temporal  # [N, N, T]
            slots = {
                name: self._bank.window(updates.round, updates.clients, name).flatten(0, 1)
                for name in _statistics(updates.state)
            }
            mixed |= mix(weights.flatten(1), slots, moments=self.config.bn_pooling == "moments")
        return mixed

    def memory(self) -> State:
        """Return ``bank/CLIENT/NAME`` [S, ...] for the last S rounds of each client, and ``block/NAME`` if kept."""
        return {f"bank/{key}": t for key, t in self._bank.memory().items()} | {
            f"block/{name}": t for name, t in self._block.items()
        }

    def load_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Install what `memory` returned."""
        self._bank.load_memory(_below("bank/", memory))
        self._block = _below("block/", memory)

    def _attention(self, x: Tensor, round_: int) -> Attention:
        """Return the attention of the run's variant on x [N, T, D]."""
        variant = self.options.variant
        if variant == "s-sim":
            return untrained_attention(x[:, -1:])
        if variant == "ts-sim":
            return untrained_attention(x)
        block = self._block or new_block(x.shape[-1], over_time=variant != "wo-time")
        generator = torch_rng(self.config.seed, round_, "fedtsa", "masks")
        attention, trained = train_block(block, x, self.options, generator)
        self._block = trained if self.options.warm_start else {}
        return attention


class MemoryBank:
    """What each client sent in its last rounds, by name.

    Parameters
    ----------
    slots : int
        T: how many rounds back.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        #: of each client, in ascending order: its last S <= T rounds [S], and what it sent in them, each [S, *shape]
        self._kept: dict[str, State] = {}

    def add(self, round_: int, clients: Iterable[str], values: Mapping[str, Tensor]) -> None:
        """Remember what the clients sent in a round, each [N, *shape], in place of anything from it or a later one."""
        for i, client in enumerate(clients):
            sent = {ROUND: torch.tensor(round_)} | {name: t[i] for name, t in values.items()}
            if (old := self._kept.get(client)) is None:
                self._kept[client] = {name: t[None].clone() for name, t in sent.items()}
                continue
            earlier = old[ROUND] < round_
            self._kept[client] = {
                name: torch.cat([old[name][earlier], t[None]])[-self.slots :] for name, t in sent.items()
            }

    def window(self, round_: int, clients: Iterable[str], name: str) -> Tensor:
        """Return [N, min(round, T), *shape]: for each of the last rounds up to this one, what was sent last by then.

        In the slots before a client's first round it is what the client sent in its first.
        """
        rounds = torch.arange(max(round_ - self.slots, 0), round_) + 1
        found = []
        for client in clients:
            kept = self._kept[client]
            # T kept rounds reach back as far as the window does: where one is lacking, the first kept was the first.
            last = torch.searchsorted(kept[ROUND], rounds, right=True) - 1
            found.append(kept[name][last.clamp_min(0)])
        return torch.stack(found)

    def memory(self) -> State:
        """Return all by ``CLIENT/NAME``."""
        return {f"{client}/{name}": t for client, kept in self._kept.items() for name, t in kept.items()}

    def load_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Install what `memory` returned."""
        self._kept = {}
        for key, t in memory.items():
            client, _, name = key.partition("/")
            self._kept.setdefault(client, {})[name] = t


def _statistics(state: State) -> State:
    return {name: t for name, t in state.items() if is_statistic(name)}


def _below(prefix: str, memory: Mapping[str, Tensor]) -> State:
    return {key.removeprefix(prefix): t for key, t in memory.items() if key.startswith(prefix)}
