"""The life cycle that every adapter follows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.promises import MEMORY, StepCheck, check_own
from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.models.base import last_linear
from fedtta_flwr.options import Options
from fedtta_flwr.seeding import torch_rng

if TYPE_CHECKING:
    from fedtta_flwr.adaptation.objectives import Objectives

State = dict[str, Tensor]


class Adapter(ABC):
    """A model that adapts to a stream of unlabelled batches.

    A method implements `select`, which names the tensors that it may change, and `step`, which changes them. What it
    remembers beside them (moments, memories, averages) it declares with `keep` in its constructor. The base class
    keeps the promises that hold for all: names, shapes and dtypes are fixed from construction on, a step that ends in
    anything non-finite is undone, and one that changes what is not declared is refused (`promises`).

    Parameters
    ----------
    model : nn.Module
        The source model; the adapter owns it from here on. Its input is [B, C, H, W] in [0, 1].
    options : Options
        The method's own frozen hyper-parameters.

    Attributes
    ----------
    steps, rolled_back : int
        Steps taken so far, and those of them that were undone because their result was not finite.
    identity : tuple
        The run's seed and whom the adapter serves; every random draw depends on it (`generator`). Whoever serves
        several clients with one adapter sets it before each.
    proven : bool
        Whether it has served this client before, maybe in another process: its first step here is not repeated then.
    objectives : Objectives or None
        What a strategy adds to the method's own loss.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        before = set(vars(self))
        self.model = model.eval().requires_grad_(False)
        self.options = options
        self.steps = self.rolled_back = 0
        self.identity: tuple[str | int, ...] = (0,)
        self.proven = False
        self.objectives: Objectives | None = None
        selected = self.select()
        check_own(self, self.model, selected)
        self._adapted: State = {name: t.detach() for name, t in selected.items()}
        self._check = StepCheck(self, self.model)
        self._live = list(self._adapted.values())
        self._local: State = {}
        self._initial: State = {}
        self._growing: set[str] = set()
        self._backup: list[Tensor] = []
        self._begun = {name: value for name, value in vars(self).items() if name not in {*before, "model"}}

    @abstractmethod
    def select(self) -> State:
        """Return the model's tensors, by name, that adaptation may change and that therefore travel."""

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """Adapt to the batch and return the logits [B, K] that the method itself would report."""

    @torch.no_grad()  # not inference mode: what a network keeps for its next pass, a mask say, must serve a step
    def predict(self, x: Tensor) -> Tensor:
        """Return logits [B, K] for x [B, C, H, W]; changes nothing."""
        logits: Tensor = self.model(x)
        return logits

    def answer(self, x: Tensor) -> Tensor:
        """Return the network's own logits [B, K] for x, as descriptors are made of; changes nothing.

        An adapter whose `predict` does more to a batch's logits, such as smoothing them, overrides it.
        """
        return self.predict(x)

    def adapt(self, x: Tensor) -> Tensor:
        """Adapt to x [B, C, H, W] and return the method's logits [B, K].

        A step whose logits, adapted or local tensors are not finite is undone: both states are as before, the logits
        are those of `predict`, and `rolled_back` counts one more.

        Raises
        ------
        ConfigError
            If the step returned no logits, or the first one changed what is not declared, or depends on it.
        """
        if len(x) == 0:
            return self.predict(x)
        live = [*self._live, *self.local_state().values()]
        self._back_up(live)
        if self.objectives is not None:
            self.objectives.begin_step(x)
        self._check.before(x, live)
        logits = self.step(x)
        self._check.after(x, logits)
        self._check.settle([logits, *live], None if self.proven else lambda: self._again(x, live))
        logits = logits.detach()
        self.steps += 1
        if self.objectives is not None:
            self.objectives.end_step()
        if _all_finite([logits, *live]):
            return logits
        _copy(live, self._backup)
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
        if self.objectives is not None:
            self.objectives.begin_round()

    def keep(self, state: Mapping[str, Tensor], *, growing: bool = False) -> None:
        """Declare tensors of the local state; for constructors.

        Parameters
        ----------
        state : Mapping[str, Tensor]
            Live tensors by name, with the values that a client begins with. `step` changes them in place.
        growing : bool
            Whether they take their shape from the first batch (memories of images): they begin empty, `step` resizes
            them with `reshape_in_place`, and `load_local_state` accepts any shape.

        Raises
        ------
        ConfigError
            If one is no tensor, or its name is taken.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"keep() takes tensors by name; it was given {type(state).__name__}: make it a dict")
        for name, t in state.items():
            if not isinstance(t, Tensor):
                raise ConfigError(f"keep() takes tensors; {name} is {type(t).__name__}: make it one")
            if name in self._local:
                raise ConfigError(f"keep() has {name} already; give each a name of its own, and call it once for each")
            self._local[name] = t.detach() if t.requires_grad else t
            # Moments begin as zeros: one zero, expanded, is enough to remember.
            self._initial[name] = t.detach().clone() if t.any() else t.new_zeros(()).expand(t.shape)
        if growing:
            self._growing.update(state)

    def local_state(self) -> State:
        """Return what stays at home between visits (teachers, memories, moments): live tensors; none by default."""
        return dict(self._local)

    def load_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Install what `local_state` returned; an empty state is that of a client that was never here.

        Raises
        ------
        CheckpointError
            If a name or shape differs from `local_state`.
        """
        state = state or self._initial
        if state.keys() != self._local.keys():
            differing = ", ".join(sorted(state.keys() ^ self._local.keys())[:3])
            expected = len(self._local) or "none"
            raise CheckpointError(
                f"local state: {len(state)} tensors, expected {expected}; first that differ: {differing}"
            )
        for name, live in self._local.items():
            if state[name].shape != live.shape and name not in self._growing:
                raise CheckpointError(
                    f"local state: {name} has shape {list(state[name].shape)}, expected {list(live.shape)}; one that "
                    f"changes its shape is kept with growing=True ({MEMORY})"
                )
        _copy(list(self._local.values()), [state[name] for name in self._local])

    def reset(self, adapted: Mapping[str, Tensor]) -> None:
        """Forget everything: install an adapted state and the local state that a client begins with."""
        self.load_adapted_state(adapted)
        self.load_local_state({})

    def _again(self, x: Tensor, live: list[Tensor]) -> list[Tensor]:
        """Take a step again, after one with the negatives, as if of another client; return logits and live tensors."""
        for batch in (1 - x, x):
            _copy(live, self._backup)
            logits = self.step(batch)
        return [logits, *live]

    def _back_up(self, live: list[Tensor]) -> None:
        if len(live) != len(self._backup):
            self._backup = [torch.empty_like(t) for t in live]
        _copy(self._backup, live)

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return the generator of one draw, on the CPU: draw there, then move; devices draw differently.

        It depends on the seed, the client and the purpose alone: make a count that is part of the local state a part
        of the purpose, as `Draws` does.
        """
        seed, *whom = self.identity
        return torch_rng(int(seed), *whom, *purpose)


class Draws:
    """Generators of an adapter's successive draws for one purpose.

    Parameters
    ----------
    adapter : Adapter
        Whose `identity` the draws depend on; the counter becomes part of its local state.
    purpose : str
        What they are for: draws for different purposes are independent.
    """

    def __init__(self, adapter: Adapter, purpose: str) -> None:
        self._adapter = adapter
        self._purpose = purpose
        self._count = torch.zeros(1, dtype=torch.int64)
        adapter.keep({f"draws.{purpose}": self._count})

    def next(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return the generator of the next draw.

        What is drawn on the CPU, then moved, is the same everywhere. Draws of the size of images or weights are better
        made on their own device, whose numbers are others than the CPU's.
        """
        generator = self._adapter.generator(self._purpose, int(self._count))
        self._count += 1
        if torch.device(device).type == "cpu":
            return generator
        return torch.Generator(device).manual_seed(generator.initial_seed())


def reshape_in_place(t: Tensor, shape: Sequence[int]) -> None:
    """Give a tensor new storage, of zeros, and another shape."""
    t.data = t.new_zeros(shape)  # not resize_: numpy may have seen the storage, which fixes its size


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy in one fused call for each device and dtype; a target whose shape differs takes its source's."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.shape != source.shape:
            reshape_in_place(target, source.shape)
        group = groups.setdefault((target.device, target.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)


def _all_finite(tensors: list[Tensor]) -> bool:
    # One reduction per tensor, in one fused call for each device and dtype, whose result is read once. The norm of a
    # finite tensor can overflow only above 1e19 per entry, where rolling back is right as well.
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        if t.is_floating_point() and t.numel():
            groups.setdefault((t.device, t.dtype), []).append(t)
    return all(bool(torch.stack(torch._foreach_norm(group)).isfinite().all()) for group in groups.values())


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


@contextmanager
def inputs_of(layer: nn.Module | None) -> Iterator[list[Tensor]]:
    """Collect what enters a layer while it is looked at, the latest last; nothing without a layer."""
    seen: list[Tensor] = []
    hook = None
    if layer is not None:
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        if hook is not None:
            hook.remove()


def classifier(model: nn.Module, by: str) -> tuple[str, nn.Linear]:
    """Return the name of the last linear layer, which maps features [B, D] to logits [B, K], and the layer.

    Raises
    ------
    ConfigError
        If there is none; `by` whom it is needed is in the message.
    """
    last = last_linear(model)
    if last is None:
        raise ConfigError(
            f"{by!r} needs a classifier, and {type(model).__name__} has no linear layer; choose a model with one, or a "
            f"method that needs none"
        )
    return last
