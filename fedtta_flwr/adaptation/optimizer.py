"""torch's update rules with moments that have a fixed name, shape and dtype before the first step."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import Rule


class Optimizer:
    """Adam or SGD on an adapter's own parameters.

    torch makes its moments at the first step, one tensor a parameter. Here they exist from construction on, as views
    of one flat buffer a moment, so that `state` has few tensors and they can be saved, copied and undone at any time.

    Parameters
    ----------
    parameters : sequence of Tensor
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
    fused : bool
        Adam's step in one kernel, which rounds otherwise.

    Attributes
    ----------
    parameters : list of Tensor
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
        parameters: Sequence[Tensor],
        rule: Rule,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fused: bool = False,
    ) -> None:
        self.parameters: list[Tensor] = list(parameters)
        for p in self.parameters:
            p.requires_grad_(True)
        self.added: Callable[[], Tensor] | None = None
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) != 1:
            found = ", ".join(sorted(map(str, dtypes))) or "no parameter"
            raise ConfigError(f"optimizer: parameters of one dtype are needed, found {found}")
        self.state: dict[str, Tensor] = {}
        # torch's functions, not its classes: to make one of those imports torch._dynamo, more than a second of CPU in
        # a process that Flower starts anew for every visit of a device.
        self._rule: Callable[[list[Tensor], list[Tensor]], None]
        if rule == "adam":
            steps = self.state["optimizer.step"] = torch.zeros(len(self.parameters))  # as torch wants it, on the CPU
            self._rule = partial(
                adam,
                exp_avgs=self._moment("exp_avg"),
                exp_avg_sqs=self._moment("exp_avg_sq"),
                max_exp_avg_sqs=[],
                state_steps=list(steps.unbind()),
                foreach=not fused,
                fused=fused,
                amsgrad=False,
                beta1=betas[0],
                beta2=betas[1],
                lr=learning_rate,
                weight_decay=weight_decay,
                eps=1e-8,
                maximize=False,
            )
        else:
            buffers: list[Tensor | None] = [None] * len(self.parameters)
            if momentum:  # a buffer of zeros is where torch's first step would leave one: 0 * momentum + gradient
                buffers = [*self._moment("momentum_buffer")]
            self._rule = partial(
                sgd,
                momentum_buffer_list=buffers,
                foreach=True,
                weight_decay=weight_decay,
                momentum=momentum,
                lr=learning_rate,
                dampening=0.0,
                nesterov=nesterov,
                maximize=False,
            )

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
        with torch.no_grad():
            self._rule(self.parameters, list(gradients))

    def forget(self) -> None:
        """Set all moments to zero, as before the first step."""
        if self.state:
            torch._foreach_zero_(list(self.state.values()))

    def _moment(self, name: str) -> list[Tensor]:
        """Make a flat buffer of zeros; return its views, one a parameter."""
        sizes = [p.numel() for p in self.parameters]
        flat = self.state[f"optimizer.{name}"] = self.parameters[0].detach().new_zeros(sum(sizes))
        return [t.view(p.shape) for t, p in zip(torch.split(flat, sizes), self.parameters, strict=True)]
