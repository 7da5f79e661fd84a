"""What an adapter of anybody's own could break unnoticed, looked at where it costs nothing.

One model serves all clients of a node in turn. What a step changes and neither travels nor is kept goes on to the next
client: results would depend on who is hosted where.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models.checkpoints import dtype_and_shape
from fedtta_flwr.registry import ships


def check_own(adapter: object, model: nn.Module, selected: Mapping[str, Tensor]) -> None:
    """Find out whether the tensors that `select` names can be mixed, and whether the model's are no copies.

    Others (a teacher's, say) have names that the model does not.

    Raises
    ------
    ConfigError
        If one is a copy, or holds no floating-point numbers.
    """
    for name, t in selected.items():
        if not t.is_floating_point():
            raise ConfigError(
                f"{_named(adapter)}: select() names {name}, which is {dtype_and_shape(t)}; allowed: floating-point "
                f"tensors, since they are mixed; declare others with keep(), which stay with their client"
            )
    own = _tensors(model)
    for name in selected.keys() & own.keys():
        if _storage(selected[name]) != _storage(own[name]):
            raise ConfigError(
                f"{_named(adapter)}: select() returned a copy of {name}; return the model's own tensor, which step "
                f"then changes in place"
            )


class StepCheck:
    """Looks at what every step returns, and once, around an adapter's first step, at what it changed.

    Not so with adapters that ship.

    Parameters
    ----------
    adapter : object
        Whose name is in the messages.
    model : nn.Module
        Its model.
    """

    def __init__(self, adapter: object, model: nn.Module) -> None:
        self._adapter = _named(adapter)
        # What ships is tested for this: on a device, where every message is a process, it would be every step.
        self._ships = ships(adapter)
        self._model = model
        self._logits: list[int] | None = None  # the form of one image's
        #: while the first step is not known to be good: the places of all tensors, copies of the undeclared ones
        self._places: dict[str, int] = {}
        self._undeclared: dict[str, Tensor] = {}

    def before(self, x: Tensor, declared: Iterable[Tensor]) -> None:
        """See the model and the batch [B, C, H, W] before a step that may change the declared tensors."""
        if self._logits is not None or self._ships:
            return
        with torch.inference_mode():
            self._logits = list(self._model(x[:1]).shape[1:])
        tensors, storages = _tensors(self._model), {_storage(t) for t in declared}
        self._places = {name: t.data_ptr() for name, t in tensors.items()}
        self._undeclared = {name: t.clone() for name, t in tensors.items() if _storage(t) not in storages}

    def after(self, x: Tensor, logits: object) -> None:
        """See what the step made of the batch, and of the model.

        Raises
        ------
        ConfigError
            If it returned no logits [B, K], replaced a tensor of the model's, or changed one that is not declared.
        """
        if self._ships:
            return
        expected = [len(x), *(self._logits or ())]
        if not (isinstance(logits, Tensor) and logits.is_floating_point() and list(logits.shape) == expected):
            found = type(logits).__name__
            if isinstance(logits, Tensor):
                found = dtype_and_shape(logits)
            raise ConfigError(f"{self._adapter}: step returned {found}, expected floating-point logits {expected}")
        if not self._places:
            return
        now = _tensors(self._model)
        places = {name: t.data_ptr() for name, t in now.items()}
        if moved := [n for n in self._places | places if self._places.get(n) != places.get(n)]:
            raise ConfigError(
                f"{self._adapter}: step replaced, added or removed {_some(moved)}; change the model's tensors in "
                f"place, e.g. with copy_, and declare others with keep()"
            )
        if changed := [name for name, t in self._undeclared.items() if not torch.equal(t, now[name])]:
            raise ConfigError(
                f"{self._adapter}: step changed {_some(changed)}, which select() does not name; add it to select() or "
                f"keep(), or leave it as it is: one model serves all clients of a node"
            )
        self._places, self._undeclared = {}, {}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors but for the counters, which any pass in train mode moves, mostly for nobody."""
    return {
        name: t
        for name, t in model.state_dict().items()
        if isinstance(t, Tensor) and not name.endswith("num_batches_tracked")
    }


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _named(adapter: object) -> str:
    return f"adapter '{type(adapter).__module__}:{type(adapter).__qualname__}'"


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
