"""The life cycle that every adapter follows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedtta_flwr.errors import CheckpointError
from fedtta_flwr.options import Options

State = dict[str, Tensor]


class Adapter(ABC):
    """A model that adapts to a stream of unlabelled batches.

    A method implements `select`, which names the tensors that it may change, and `step`, which changes them. The
    base class keeps the promises that hold for all: names, shapes and dtypes are fixed from construction on, and a
    step that ends in anything non-finite is undone.

    Parameters
    ----------
    model : nn.Module
        The source model; the adapter owns it from here on. Its input is [B, C, H, W] in [0, 1].
    options : Options
        The method's own frozen hyper-parameters.

    Attributes
    ----------
    rolled_back : int
        Steps undone so far because their result was not finite.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model = model.eval().requires_grad_(False)
        self.options = options
        self.rolled_back = 0
        self._adapted: State = {name: t.detach() for name, t in self.select().items()}
        self._live = list(self._adapted.values())
        self._backup = [torch.empty_like(t) for t in self._live]

    @abstractmethod
    def select(self) -> State:
        """Return the model's tensors, by name, that adaptation may change and that therefore travel."""

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """Adapt to the batch and return the logits [B, K] that the method itself would report."""

    @torch.inference_mode()
    def predict(self, x: Tensor) -> Tensor:
        """Return logits [B, K] for x [B, C, H, W]; changes nothing."""
        logits: Tensor = self.model(x)
        return logits

    def adapt(self, x: Tensor) -> Tensor:
        """Adapt to x [B, C, H, W] and return the method's logits [B, K].

        A step whose logits or adapted tensors are not finite is undone: the state is as before, the logits are
        those of `predict`, and `rolled_back` counts one more.
        """
        if len(x) == 0:
            return self.predict(x)
        if self._live:
            torch._foreach_copy_(self._backup, self._live)
        logits = self.step(x).detach()
        if self._finite(logits):
            return logits
        if self._live:
            torch._foreach_copy_(self._live, self._backup)
        self.rolled_back += 1
        return self.predict(x)

    def adapted_state(self) -> State:
        """Return the tensors that may travel: live views, as of ``nn.Module.state_dict``."""
        return dict(self._adapted)

    def load_adapted_state(self, state: Mapping[str, Tensor]) -> None:
        """Install a mixture of adapted states.

        Raises
        ------
        CheckpointError
            If a name or shape differs from `adapted_state`.
        """
        if state.keys() != self._adapted.keys():
            differing = sorted(state.keys() ^ self._adapted.keys())[:3]
            raise CheckpointError(
                f"adapted state: {len(state)} tensors, expected {len(self._adapted)}; "
                f"first that differ: {', '.join(differing)}"
            )
        for name, live in self._adapted.items():
            if state[name].shape != live.shape:
                raise CheckpointError(
                    f"adapted state: {name} has shape {list(state[name].shape)}, expected {list(live.shape)}"
                )
        if self._live:
            torch._foreach_copy_(self._live, [state[name] for name in self._adapted])

    def local_state(self) -> State:
        """Return what stays at home between visits (teachers, memories, moments); empty by default."""
        return {}

    def load_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Install what `local_state` returned.

        Raises
        ------
        CheckpointError
            If the method keeps nothing but is given something.
        """
        if state:
            raise CheckpointError(f"local state: {len(state)} tensors, expected none")

    def _finite(self, logits: Tensor) -> bool:
        # One reduction per tensor inside one fused call, one transfer to the host. The norm of a finite tensor can
        # overflow only above 1e19 per entry, where rolling back is right as well.
        norms = torch._foreach_norm([logits, *self._live])
        return bool(torch.stack(norms).isfinite().all())


def batch_norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Return the model's BatchNorm layers that track statistics, by module name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    }


def statistics(model: nn.Module) -> State:
    """Return the running means and variances of all BatchNorm layers; never the integer counters."""
    found: State = {}
    for name, module in batch_norms(model).items():
        if module.running_mean is not None and module.running_var is not None:
            found[f"{name}.running_mean"] = module.running_mean
            found[f"{name}.running_var"] = module.running_var
    return found
