"""FedCTTA: clients that answer alike on shared noise help each other (IJCNN 2025, arXiv 2505.13643)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.options import FedCTTAOptions
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.updates import State, Updates


class FedCTTA(PersonalizedStrategy):
    r"""W from the distances between the clients' mean logits on noise that all share.

    .. math:: u_i = \frac{1}{M} \sum_m f_{\theta_i}(z_m), \quad
        W_i = \mathrm{softmax}_j(-\lVert u_i - u_j \rVert_2 / T)

    (eqs. 5-7, where T = 1). As in the published code, u is smoothed over rounds: ``u <- a u + (1 - a) u_new``; a = 0
    is the paper's text. The noise is uniform in [0, 1), drawn once from the run's seed.

    Parameters
    ----------
    config : RunConfig
        With the table ``fedctta``: temperature, ema, noise-samples.
    """

    descriptor = "noise-logits"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options: FedCTTAOptions = config.fedctta
        self.descriptor_options = {"samples": config.fedctta.noise_samples}
        self._smoothed: dict[str, Tensor] = {}

    def collaboration_matrix(self, updates: Updates) -> Tensor:
        """Return W [N, N]; remembers each client's smoothed mean logits under its name."""
        share = self.options.ema
        for client, new in zip(updates.clients, self.required_descriptor(updates), strict=True):
            old = self._smoothed.get(client, new)
            self._smoothed[client] = share * old + (1 - share) * new
        smoothed = torch.stack([self._smoothed[client] for client in updates.clients])
        return fedctta_weights(smoothed, self.options.temperature)

    def memory(self) -> State:
        """Return the clients' smoothed mean logits."""
        return {f"smoothed/{client}": u for client, u in self._smoothed.items()}

    def load_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Install what `memory` returned."""
        self._smoothed = {name.removeprefix("smoothed/"): u for name, u in memory.items()}


def fedctta_weights(logits: Tensor, temperature: float) -> Tensor:
    """Return ``softmax_j(-||u_i - u_j||_2 / temperature)``, [N, N], for mean logits u [N, K].

    Differences are taken before squaring, in float64: the usual expansion of the square loses the small distances.
    """
    u = logits.to(torch.float64)
    distance = torch.linalg.vector_norm(u[:, None] - u[None], dim=-1)
    return torch.softmax(-distance / temperature, dim=1)
