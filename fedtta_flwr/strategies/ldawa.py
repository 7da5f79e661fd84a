"""L-DAWA: layers weighted by their angle to the global model (Rehman et al., ICCV 2023, arXiv 2307.07393)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.options import LDAWAOptions
from fedtta_flwr.strategies.fedavg import FedAvg
from fedtta_flwr.strategies.updates import State, Updates, flat, is_statistic


class LDAWA(FedAvg):
    r"""A mean for everyone in which a client counts less, layer by layer, the more it turns off the last mean.

    .. math:: \theta^{t+1}_l = \sum_i \frac{n_i}{n}\, c_{il}\, \theta_{il}, \quad
        c_{il} = \cos(\theta_{il}, \theta^t_l) = \frac{\langle \theta_{il}, \theta^t_l \rangle}
            {\lVert \theta_{il} \rVert \lVert \theta^t_l \rVert}

    The paper's *layer* is what its code iterates over, and is the same here: one named tensor, a weight and its bias
    each for itself. Before the first mean the source model takes its place; the first ``warmup-rounds`` are FedAvg. As
    published the shares are not normalised, so that every layer shrinks by its mean cosine a round; ``renormalise =
    true`` divides by their sum. Clients adapt little in a round: cosines are near 1, and this is near FedAvg.

    Departures from the published code: statistics are plain means, as a scaled variance is none; a tensor of one value
    has no angle and is a plain mean, where the code passes over those without a dimension only; c is 1 where a vector
    is zero, c = 0 where the code would let a negative cosine turn the layer round, and samples count as with `FedAvg`
    also after the warm-up (equal batches: 1/N, as in the code).

    No W is reported after the warm-up unless statistics are all that clients upload: it differs from layer to layer.

    Parameters
    ----------
    config : RunConfig
        With the table ``ldawa``: warmup-rounds, renormalise.
    """

    one_for_all = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options: LDAWAOptions = config.ldawa
        #: the last mean; before the first one the source model
        self._global: State = {}

    def personalize(self, updates: Updates) -> State:
        """Return the same state for all, and remember it."""
        mixed = super().personalize(updates)
        layers = [name for name in mixed if not is_statistic(name)]
        if layers and updates.round > self.options.warmup_rounds:
            self._round.weights = None
            samples = self.collaboration_matrix(updates)[0]
            for name in layers:
                layer = flat(updates.state, [name])
                reference = self._global.get(name, self.source[name])
                shares = samples * cosines(layer, reference.flatten())
                if self.options.renormalise:
                    shares = shares / shares.sum() if shares.any() else samples
                mean = (shares.to(layer.dtype) @ layer).reshape(reference.shape)
                mixed[name] = mean.expand_as(mixed[name]).clone()
        self._global = {name: mixed[name][0].clone() for name in layers}
        return mixed

    def memory(self) -> State:
        """Return the last mean, by name."""
        return dict(self._global)

    def load_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Install what `memory` returned."""
        self._global = dict(memory)


def cosines(layer: Tensor, reference: Tensor) -> Tensor:
    """Return the cosine of each client's layer [N, P] with a reference [P], at least 0 (float64).

    1 where there is no angle: a zero vector, or a single value.
    """
    theta, reference = layer.double(), reference.double()
    norms = torch.linalg.vector_norm(theta, dim=1) * torch.linalg.vector_norm(reference)
    angle = (norms > 0) & (layer.shape[1] > 1)
    return torch.where(angle, (theta @ reference / norms).clamp(0, 1), 1.0)
