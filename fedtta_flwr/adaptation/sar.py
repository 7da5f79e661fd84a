"""SAR: sharpness-aware and reliable entropy minimisation (Niu et al., ICLR 2023, arXiv 2302.12400)."""

import math

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import State
from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.norms import AffineAdapter, batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import SAROptions
from fedtta_flwr.resolve import names_in

LAST = "norm"  # what vision transformers call the last normalisation, and other networks those of their blocks


class SAR(AffineAdapter):
    r"""Minimise the entropy of reliable samples where its surface is flat, and recover from collapse.

    With the reliable samples :math:`S = \{b : H_b < E_0\}`, :math:`E_0 = 0.4 \ln K` (eq. 2), and the gradient
    :math:`g` of their mean entropy at :math:`\theta`,

    .. math::
        \hat\epsilon = \rho\, g / \lVert g \rVert_2, \quad
        \theta \leftarrow \theta - \eta \nabla \,\mathrm{mean}_{b \in S'} H_b(\theta + \hat\epsilon), \quad
        S' = \{b \in S : H_b(\theta + \hat\epsilon) < E_0\}

    (eqs. 3-5) by SGD with momentum. The mean over S' enters a moving average :math:`e_m`; below 0.2 the predictions
    have collapsed, and affine parameters, moments and average go back to where they began. The logits are those before
    the step. No sample left in S or S': no step.

    The published code leaves the top layers alone, by name (``layer4`` of ResNets, ``blocks.9`` to ``blocks.11`` and
    the last ``norm`` of vision transformers); so does ``skip`` here, and networks without such names adapt whole. A
    plain ``norm`` is the network's own, beside its blocks; one within a block adapts. The published code also keeps
    :math:`e_m` through a recovery, which its paper sets back; here it is set back.

    The affine parameters that adapt travel; moments and average stay at home.

    Parameters
    ----------
    model : nn.Module
        The source model.
    options : SAROptions
        Optimiser, margins and recovery.

    Raises
    ------
    ConfigError
        If no normalisation layer that is not skipped has affine parameters.
    """

    name = "sar"
    NONE_YET = -1.0

    def __init__(self, model: nn.Module, options: SAROptions) -> None:
        self.options: SAROptions = options
        super().__init__(model, options)
        parameters = list(self.affine.values())
        self.optimizer = Optimizer(parameters, "sgd", learning_rate=options.learning_rate, momentum=options.momentum)
        self.source = [p.detach().clone() for p in parameters]
        self.aside = [p.detach().clone() for p in parameters]
        self.mean_entropy = torch.full_like(parameters[0].detach().flatten()[:1], self.NONE_YET)
        self.keep(self.optimizer.state | {"mean_entropy": self.mean_entropy})

    def select(self) -> State:
        """Return the affine parameters of the normalisation layers that are not skipped."""
        super().select()
        parts = names_in(self.options.skip)
        self.affine = {name: p for name, p in self.affine.items() if not any(self._skips(part, name) for part in parts)}
        if not self.affine:
            raise ConfigError(
                f"sar.skip = {self.options.skip!r}: leaves no normalisation layer of {type(self.model).__name__} to "
                f"adapt; name fewer"
            )
        return dict(self.affine)

    def _skips(self, part: str, name: str) -> bool:
        if part != LAST:
            return f".{part}." in f".{name}"
        # The network may be within another module, say behind its input normalisation: then all names begin alike.
        holder, found, _ = f".{name}".rpartition(f".{LAST}.")
        return bool(found) and all(f".{other}".startswith(f"{holder}.") for other in self.affine)

    @torch.enable_grad()
    def step(self, x: Tensor) -> Tensor:
        """Take one sharpness-aware step on the reliable samples; return the logits [B, K] before it."""
        logits, values = self._forward(x)
        margin = self.options.entropy_margin * math.log(logits.shape[1])
        reliable = values.detach() < margin
        if not reliable.any():
            return logits
        gradients = self.optimizer.gradients(values[reliable].mean())
        with torch.no_grad():
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
            up = torch._foreach_mul(gradients, float(self.options.rho / (norm + 1e-12)))
            torch._foreach_copy_(self.aside, self.optimizer.parameters)
            torch._foreach_add_(self.optimizer.parameters, up)
        perturbed = self._forward(x)[1][reliable]
        perturbed = perturbed[perturbed.detach() < margin]
        if len(perturbed):
            loss = perturbed.mean()
            gradients = self.optimizer.gradients(loss)
        with torch.no_grad():
            torch._foreach_copy_(self.optimizer.parameters, self.aside)
        if len(perturbed):
            self.optimizer.apply(gradients)
            self._watch(loss.detach())
        return logits

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
        return logits, entropy(logits)

    @torch.no_grad()
    def _watch(self, loss: Tensor) -> None:
        """Let the mean entropy follow; where it says that predictions have collapsed, begin anew."""
        share = self.options.ema if self.mean_entropy >= 0 else 0.0
        self.mean_entropy.mul_(share).add_(loss, alpha=1 - share)
        if self.mean_entropy < self.options.reset_below:
            torch._foreach_copy_(self.optimizer.parameters, self.source)
            self.optimizer.forget()
            self.mean_entropy.fill_(self.NONE_YET)
