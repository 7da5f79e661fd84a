"""DUA: dynamic unsupervised adaptation of running statistics (Mirza et al., CVPR 2022, arXiv 2112.00463)."""

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.augment import crop_and_flip
from fedtta_flwr.adaptation.base import Adapter, Draws, State, statistics
from fedtta_flwr.adaptation.layers import require_batch_norms
from fedtta_flwr.adaptation.norms import batch_statistics
from fedtta_flwr.options import DUAOptions


class DUA(Adapter):
    r"""Let the running statistics of BatchNorm follow the stream, with a momentum that decays to a floor.

    .. math::
        m_t = \omega\, m_{t-1}, \quad \rho_t = m_t + \xi, \quad
        \hat\mu_t = (1 - \rho_t)\,\hat\mu_{t-1} + \rho_t\,\mu_t, \quad
        \hat\sigma^2_t = (1 - \rho_t)\,\hat\sigma^2_{t-1} + \rho_t\,\sigma^2_t

    with :math:`m_0 = 0.1`, :math:`\omega = 0.94`, :math:`\xi = 0.005` and the statistics :math:`\mu_t, \sigma^2_t`
    (unbiased) of a small batch of augmented images: crops after padding by 4, horizontal flips, right-angled
    rotations (of half a turn, where images are not square). The published method sees one image at a time and makes 64
    of it; here a batch of B images is filled up to 64 views, with one of each image at least, in one forward pass:
    for B = 1 that is the published step, and no more costly for larger batches. The logits are those of the new
    running statistics on the images themselves.

    The running statistics travel; the momentum and the count of draws stay at home.

    Parameters
    ----------
    model : nn.Module
        A source model with BatchNorm.
    options : DUAOptions
        Momentum and number of views.

    Raises
    ------
    ConfigError
        If the model has no BatchNorm layer that tracks statistics.
    """

    def __init__(self, model: nn.Module, options: DUAOptions) -> None:
        require_batch_norms(model, "dua")
        super().__init__(model, options)
        self.options: DUAOptions = options
        self.momentum = torch.tensor([options.momentum], dtype=torch.float64)
        self.draws = Draws(self, "dua")
        self.keep({"momentum": self.momentum})

    def select(self) -> State:
        """Return the statistics of all BatchNorm layers."""
        return statistics(self.model)

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """Move the statistics towards those of the views; return the logits [B, K] that follow."""
        views = self._views(x) if self.options.views else x
        self.momentum *= self.options.decay
        with batch_statistics(self.model, track=True, momentum=float(self.momentum) + self.options.floor):
            self.model(views)
        return self.predict(x)

    def _views(self, x: Tensor) -> Tensor:
        generator = self.draws.next()
        x = crop_and_flip(x.repeat_interleave(max(1, self.options.views // len(x)), dim=0), generator)
        turns = torch.randint(4, (len(x), 1, 1, 1), generator=generator).to(x.device)
        x = torch.where(turns >= 2, x.flip(-2, -1), x)
        if x.shape[-1] == x.shape[-2]:
            x = torch.where(turns % 2 == 1, x.rot90(1, (-2, -1)), x)
        return x
