"""What an adapter of anybody's own could break unnoticed, looked at where it costs nothing.

One model serves all clients of a node in turn. What a step changes and neither travels nor is kept goes on to the next
client: results would depend on who is hosted where.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models.checkpoints import dtype_and_shape
from fedtta_flwr.resolve import ships

if TYPE_CHECKING:
    from fedtta_flwr.adaptation.base import Adapter

#: where it is shown how a tensor is kept whose shape changes
MEMORY = "docs/adapters.md, A memory of images"


def check_own(adapter: object, model: nn.Module, selected: Mapping[str, Tensor]) -> None:
    """Find out whether what `select` names are tensors that can be mixed, and whether the model's are no copies.

    Others (a teacher's, say) have names that the model does not.

    Raises
    ------
    ConfigError
        If one is a copy, or holds no floating-point numbers, or it is something else.
    """
    if not isinstance(selected, Mapping) or not all(isinstance(t, Tensor) for t in selected.values()):
        found = type(selected).__name__
        raise ConfigError(f"{_named(adapter)}: select() returned {found}; return a dict of the model's tensors by name")
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


def check_predict(adapter: "Adapter", x: Tensor, logits: Sequence[int]) -> None:
    """Let an adapter of anybody's own predict a batch x [B, C, H, W], which must change nothing.

    Parameters
    ----------
    adapter : Adapter
        One that ships is passed over.
    x : Tensor
        B > 0.
    logits : sequence of int
        The form of one image's logits.

    Raises
    ------
    ConfigError
        If it returns no logits [B, K], or changes a tensor, the batch, or a layer's mode.
    """
    if ships(adapter):
        return
    live, version = {**_tensors(adapter.model), **adapter.local_state()}, x._version
    before = {name: (t, t.clone()) for name, t in live.items()}
    modes = _modes(adapter.model)
    _check_logits(_named(adapter), "predict", adapter.predict(x), [len(x), *logits])
    if changed := [name for name, (t, copy) in before.items() if not _same(t, copy)]:
        what = _some(changed)
    elif modes != _modes(adapter.model):
        what = "the mode of a layer"
    elif x._version != version:
        what = "its batch"
    else:
        return
    raise ConfigError(f"{_named(adapter)}: predict changed {what}; it must leave all as it is: scores come from it")


class StepCheck:
    """Looks at what every step returns, and once, around an adapter's first step, at what it changed.

    On a CPU the first step is taken again, from the same state, after one with another batch, and must come to the
    same: what a step changes beside that state, or draws from a generator of the process, shows. Not so with adapters
    that ship.

    Parameters
    ----------
    adapter : Adapter
        Whose step it is.
    model : nn.Module
        Its model.
    """

    def __init__(self, adapter: "Adapter", model: nn.Module) -> None:
        self._adapter, self._owner = _named(adapter), adapter
        # What ships is tested for this: on a device, where every message is a process, it would be every step.
        self._ships = ships(adapter)
        self._model = model
        self._logits: list[int] | None = None  # the form of one image's
        #: while the first step is not known to be good: the places of all tensors, copies of the undeclared ones
        self._places: dict[str, int] = {}
        self._undeclared: dict[str, Tensor] = {}
        self._attributes: dict[str, Tensor] = {}  # the adapter's own that are declared
        self._modes: dict[str, bool] = {}  # layer -> whether it is in train mode
        self._version = 0  # the batch's

    def before(self, x: Tensor, declared: Iterable[Tensor]) -> None:
        """See the model and the batch [B, C, H, W] before a step that may change the declared tensors."""
        if self._ships:
            return
        self._version = x._version
        if self._logits is not None:
            return
        with torch.no_grad():
            logits = list(self._model(x[:1]).shape[1:])
        check_predict(self._owner, x, logits)
        self._logits = logits
        self._modes = _modes(self._model)
        tensors, storages = _tensors(self._model), {_storage(t) for t in declared}
        self._places = {name: t.data_ptr() for name, t in tensors.items()}
        self._undeclared = {name: t.clone() for name, t in tensors.items() if _storage(t) not in storages}
        own = vars(self._owner).items()
        self._attributes = {name: t for name, t in own if isinstance(t, Tensor) and _storage(t) in storages}

    def after(self, x: Tensor, logits: object) -> None:
        """See what the step made of the batch, and of the model.

        Raises
        ------
        ConfigError
            If it returned no logits [B, K], changed its batch or a layer's mode, replaced a tensor of the model's or a
            declared one, or changed one that is not declared.
        """
        if self._ships:
            return
        _check_logits(self._adapter, "step", logits, [len(x), *(self._logits or ())])
        if x._version != self._version:
            raise ConfigError(f"{self._adapter}: step changed its batch in place; work on a copy: others see it, too")
        if left := [name for name, training in _modes(self._model).items() if training != self._modes.get(name)]:
            layer = f"layer {left[0]}" if left[0] else "the model"
            mode = "train" if not self._modes.get(left[0]) else "eval"
            raise ConfigError(
                f"{self._adapter}: step left {layer} in {mode} mode; put it back, e.g. with self.model.eval(): scores "
                f"are predicted with it"
            )
        now_own = vars(self._owner)
        if rebound := [n for n, t in self._attributes.items() if not _same_memory(t, now_own.get(n))]:
            raise ConfigError(
                f"{self._adapter}: step put something else in the place of {', '.join(f'self.{n}' for n in rebound)}, "
                f"which is kept or travels; change it in place, e.g. with += or copy_ (one that grows: {MEMORY})"
            )
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

    def settle(self, found: Sequence[Tensor], again: Callable[[], Sequence[Tensor]] | None) -> None:
        """Compare the first step's logits and declared tensors with those of `again`, if given, which takes it again.

        Raises
        ------
        ConfigError
            If they differ.
        """
        if self._ships or not self._places:
            return
        # Elsewhere than on a CPU sums may come out otherwise each time.
        if again is not None and all(t.device.type == "cpu" for t in found):
            before = [t.detach().clone() for t in found]
            if not all(map(_same, before, again())):
                raise ConfigError(
                    f"{self._adapter}: step comes to something else when it is taken again from the same state; "
                    f"declare all that it changes (a counter, an optimizer's moments, a teacher, a memory: {MEMORY}) "
                    f"with keep(), and draw by Draws, not from a generator of the process, as dropout in train mode "
                    f"does: one adapter serves all clients of a node"
                )
        self._places, self._undeclared = {}, {}


def _check_logits(adapter: str, method: str, logits: object, expected: list[int]) -> None:
    if not (isinstance(logits, Tensor) and logits.is_floating_point() and list(logits.shape) == expected):
        found = dtype_and_shape(logits) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(f"{adapter}: {method} returned {found}, expected floating-point logits {expected}")


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal; a NaN is equal to itself here."""
    there = a.is_floating_point() and a.shape == b.shape
    return torch.equal(a, b) or (there and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _same_memory(before: Tensor, now: object) -> bool:
    """Whether an attribute is what it was: the tensor, which may have been resized, or another view of its memory."""
    return now is before or (isinstance(now, Tensor) and _storage(now) == _storage(before))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors but for the counters, which any pass in train mode moves, mostly for nobody."""
    return {
        name: t
        for name, t in model.state_dict().items()
        if isinstance(t, Tensor) and not name.endswith("num_batches_tracked")
    }


def _modes(model: nn.Module) -> dict[str, bool]:
    """Return layer -> whether it is in train mode."""
    return {name: module.training for name, module in model.named_modules()}


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _named(adapter: object) -> str:
    return f"adapter '{type(adapter).__module__}:{type(adapter).__qualname__}'"


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
