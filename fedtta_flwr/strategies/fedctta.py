"""FedCTTA: clients that answer alike on shared noise help each other (IJCNN 2025, arXiv 2505.13643)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.checks import require_clean_images
from fedtta_flwr.options import FedCTTAOptions
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.similarity import distances, median_nearest, softmax_weights
from fedtta_flwr.strategies.updates import State, Updates

#: (images, indicator) -> what the clients are asked for
DESCRIPTORS = {
    ("noise", "logits"): "noise-logits",
    ("noise", "features"): "noise-features",
    ("chosen", "logits"): "chosen-logits",
    ("chosen", "features"): "chosen-features",
    ("original", "logits"): "logit-mean",
    ("original", "features"): "feature-mean",
}


class FedCTTA(PersonalizedStrategy):
    r"""W from the distances between the clients' mean logits on noise that all share.

    .. math:: u_i = \frac{1}{M} \sum_m f_{\theta_i}(z_m), \quad
        W_i = \mathrm{softmax}_j(-\lVert u_i - u_j \rVert_2 / T)

    (eqs. 5-7, where T = 1). As in the published code, u is smoothed over rounds: ``u <- a u + (1 - a) u_new``; a = 0
    is the paper's text. The noise is uniform in [0, 1), drawn once from the run's seed.

    The paper evaluates the noise on the server, through the uploaded models. Here the clients do it and send u, a few
    numbers: for the same noise it is the same u, and the server needs no network.

    T = 1 leaves it to the scale of a network's logits how sharp W is. ``temperature = "median"`` divides the distances
    of a round by the median of those to the nearest other client: multiples of all logits then give the same W. If
    nobody differs, W is uniform.

    The ablation of table IV, by ``metric``, ``indicator`` and ``images``:

    - ``kl`` is :math:`\mathrm{KL}(p_i \,\|\, p_j)` with :math:`p = \mathrm{softmax}(u)`; ``ce`` is this plus the
      entropy of :math:`p_i`, which falls out of the softmax over j: the weights are the same. ``cosine`` is one minus
      the cosine. The published code takes an exponential of each before the softmax, so that no weight is more than
      e times another for kl and ce (:math:`e^{e - 1/e}` for cosine): nearly FedAvg, as its results are. Here all are
      distances as above.
    - ``features`` are penultimate ones, of which kl and ce mean nothing.
    - ``chosen`` are clean images of the data set in place of noise, the same for all ("Selected (CIFAR)"): all clients
      have to hold the same set. ``original`` is the source model's mean answer to the batch at hand.

    The published code draws the noise anew for every client and round (``redraw = "each-client"``) and, with
    ``bn-stats``, answers it with the statistics that came from the server, one round late (``lagged``; here those of
    the source in the first round, there those of the noise). Both go together: where all begin alike and answer the
    same noise before they adapt, all answers are equal, W is 1/N, and all go on alike for ever.

    Parameters
    ----------
    config : RunConfig
        With the table ``fedctta``.

    Raises
    ------
    ConfigError
        If clean images are asked for and the data set has none.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options: FedCTTAOptions = config.fedctta
        if self.options.images == "chosen":
            require_clean_images(config, "fedctta.images = 'chosen'")
        self.descriptor = DESCRIPTORS[self.options.images, self.options.indicator]
        self.descriptor_options = {
            "samples": self.options.noise_samples,
            "redraw": self.options.redraw,
            "lagged": self.options.lagged,
        }
        self._smoothed: dict[str, Tensor] = {}

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N]; remembers each client's smoothed answer under its name."""
        share = self.options.ema
        for client, new in zip(updates.clients, self.required_descriptor(updates), strict=True):
            old = self._smoothed.get(client, new)
            self._smoothed[client] = torch.lerp(new, old, share)  # of equal ones exactly that
        smoothed = torch.stack([self._smoothed[client] for client in updates.clients])
        return fedctta_weights(smoothed, self.options.temperature, self.options.metric)

    def memory(self) -> State:
        """Return the clients' smoothed answers."""
        return {f"smoothed/{client}": u for client, u in self._smoothed.items()}

    def load_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Install what `memory` returned."""
        self._smoothed = {name.removeprefix("smoothed/"): u for name, u in memory.items()}


def fedctta_weights(u: Tensor, temperature: float | str, metric: str = "euclid") -> Tensor:
    """Return ``softmax_j(-d(u_i, u_j) / temperature)``, [N, N], for answers u [N, D].

    With a temperature of ``"median"`` it is that of the distances to the nearest other client.
    """
    distance = METRICS[metric](u.to(torch.float64))
    return softmax_weights(distance, median_nearest(distance) if isinstance(temperature, str) else temperature)


def kl_divergences(logits: Tensor) -> Tensor:
    """Return ``KL(p_i || p_j)`` in nats, [N, N], of p = softmax(logits) for logits [N, K]."""
    log_p = F.log_softmax(logits, dim=1)
    # Row by row in blocks: differences first, so that equal clients are exactly 0 apart, and no [N, N, K].
    row = torch.vmap(lambda own: (own.exp() * (own - log_p)).sum(dim=1), chunk_size=16)
    divergence: Tensor = row(log_p)
    return divergence.clamp_min_(0)


def cosine_distances(u: Tensor) -> Tensor:
    """Return ``1 - cos(u_i, u_j)``, [N, N], for u [N, D] in float64; zeros are at right angles to all but zeros.

    As half the squared distance of unit vectors, which is exactly 0 between equal ones.
    """
    length = torch.linalg.vector_norm(u, dim=1, keepdim=True)
    zero = length == 0
    found = distances(u / length.clamp_min(torch.finfo(u.dtype).tiny)).square_() / 2
    return found.masked_fill_(zero != zero.T, 1.0)


METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "euclid": distances,
    "kl": kl_divergences,
    "ce": kl_divergences,  # plus the entropy of p_i, which is the same in all of a row
    "cosine": cosine_distances,
}
