"""torch's optimisers with moments that have a fixed name, shape and dtype before the first step."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedtta_flwr.errors import ConfigError

Rule = Literal["adam", "sgd"]


class Optimizer:
    """Adam or SGD on an adapter's own parameters.

    torch makes its moments at the first step, one tensor a parameter. Here they exist from construction on, as views
    of one flat buffer a moment, so that `state` has few tensors and they can be saved, copied and undone at any time.

    Parameters
    ----------
    parameters : sequence of nn.Parameter
        The model's own, all of one dtype and device; they are changed in place and must not be replaced.
    rule : {"adam", "sgd"}
        Adam with torch's epsilon of 1e-8, or SGD.
    learning_rate : float
        The step size.
    momentum : float
        SGD's; a momentum of 0 keeps no state.
    nesterov : bool
        SGD's look-ahead.
    betas : (float, float)
        Adam's.
    weight_decay : float
        L2 coefficient.

    Attributes
    ----------
    parameters : list of nn.Parameter
        What is optimised.
    added : callable or None
        Returns a scalar that is added to every loss (`fedtta_flwr.adaptation.objectives`).
    state : dict[str, Tensor]
        The live moments for `Adapter.keep`: ``optimizer.step`` [n], ``optimizer.exp_avg`` [P] and
        ``optimizer.exp_avg_sq`` [P] of Adam, ``optimizer.momentum_buffer`` [P] of SGD with momentum, for n parameters
        with P values in all.

    Examples
    --------
    In an adapter's constructor, then in its `step`::

        self.optimizer = Optimizer(list(self.affine.values()), "adam", learning_rate=options.learning_rate)
        self.keep(self.optimizer.state)
        ...
        self.optimizer.minimize(loss)
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rule: Rule,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters: list[Tensor] = list(parameters)
        for p in self.parameters:
            p.requires_grad_(True)
        self.added: Callable[[], Tensor] | None = None
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) != 1:
            found = ", ".join(sorted(map(str, dtypes))) or "no parameter"
            raise ConfigError(f"optimizer: parameters of one dtype are needed, found {found}")
        self.rule: torch.optim.Optimizer
        self.state: dict[str, Tensor]
        if rule == "adam":
            self.rule = torch.optim.Adam(
                self.parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay, foreach=True
            )
            self.state = {
                "step": torch.zeros(len(self.parameters)),  # on the CPU and float32, as torch wants it
                "exp_avg": self._flat(),
                "exp_avg_sq": self._flat(),
            }
        else:
            self.rule = torch.optim.SGD(
                self.parameters,
                lr=learning_rate,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay,
                foreach=True,
            )
            # A buffer of zeros is where torch's first step would leave one: 0 * momentum + gradient.
            self.state = {"momentum_buffer": self._flat()} if momentum else {}
        sizes = [p.numel() for p in self.parameters]
        for name, flat in self.state.items():
            views = flat.unbind() if name == "step" else torch.split(flat, sizes)
            for p, view in zip(self.parameters, views, strict=True):
                self.rule.state[p][name] = view if name == "step" else view.view(p.shape)
        self.state = {f"optimizer.{name}": flat for name, flat in self.state.items()}

    def minimize(self, loss: Tensor) -> None:
        """Take one step down the gradient of a scalar loss."""
        self.apply(self.gradients(loss))

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of a scalar loss for each parameter: zero where the loss does not depend on it."""
        if self.added is not None:
            loss = loss + self.added()
        return torch.autograd.grad(loss, self.parameters, materialize_grads=True, allow_unused=True)

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Take one step with given gradients, in the order of `parameters`."""
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        self.rule.step()
        self.rule.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Set all moments to zero, as before the first step."""
        if self.state:
            torch._foreach_zero_(list(self.state.values()))

    def _flat(self) -> Tensor:
        return self.parameters[0].detach().new_zeros(sum(p.numel() for p in self.parameters))
