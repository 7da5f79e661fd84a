"""A CUDA device that computes on the CPU, to run the GPU's tests on a machine without one.

    python -m pytest -p tests.pretended_cuda tests/test_gpu.py tests/adaptation/test_gpu.py

It refuses what a graphics card refuses: tensors of both devices in one operation, the other device's generator, numpy's
view of what lies on the device. So it finds a tensor that was left behind; of speed, memory, TF32 and the order in
which sums are made it tells nothing. It leans on torch's inner workings and is part of no other run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
BETWEEN_DEVICES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
#: operations whose indices may lie on the CPU though the tensor does not
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class OnDevice(Tensor):
    """A tensor that says that it is on the device: to torch one without values, beside the real one."""

    held: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> "OnDevice":
        """Put a tensor on the device."""
        real = real.detach()
        shape = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="meta")
        made: OnDevice = Tensor._make_subclass(cls, shape, False)
        made.held = real
        return made

    device = property(lambda self: DEVICE)
    is_cuda, is_cpu, is_meta = (property(lambda self, value=value: value) for value in (True, False, False))

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__:
            args[0].held = args[1].held
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Sees what is made on the device from nothing, or comes to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Do one operation with the real tensors, where it is allowed."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    here = [t for t in tensors if isinstance(t, OnDevice)]
    away = [t for t in tensors if not isinstance(t, OnDevice)]
    device = kwargs.get("device")
    # "meta" is what torch itself takes for the device of a tensor that it is to make another like.
    on_device = bool(here) if device is None else torch.device(device).type in ("cuda", "meta")
    if func is aten.copy_.default:
        on_device = isinstance(args[0], OnDevice)
    if here and func not in BETWEEN_DEVICES:
        indices = args[1] if func in INDEXING and isinstance(args[0], OnDevice) else ()
        left = [t for t in away if t.dim() and not any(t is index for index in indices)]
        if left or (away and "fused" in str(func)):
            raise RuntimeError(
                f"{func}: tensors {[list(t.shape) for t in left or away]} are on the CPU, others are not"
            )
    if (generator := kwargs.get("generator")) is not None and getattr(generator, "on_device", False) != on_device:
        raise RuntimeError(f"{func}: a generator of the other device")
    changed = {"device": torch.device("cpu")} if device is not None and on_device else {}
    changed |= {"pin_memory": False} if "pin_memory" in kwargs else {}
    real = tree_map(lambda t: t.held if isinstance(t, OnDevice) else t, (args, {**kwargs, **changed}))
    result = func(*real[0], **real[1])
    given = {id(t.held): t for t in here} | {id(t): t for t in away}  # what is changed in place is given back itself

    def placed(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if id(t) in given:
            return given[id(t)]
        return OnDevice(t) if on_device else t

    return tree_map(placed, result)


class Generator(torch.Generator):
    """A generator of either device; both draw the same numbers."""

    on_device = False

    def __new__(cls, device: Any = "cpu") -> "Generator":
        """Make a CPU's that knows where it belongs."""
        made: Generator = torch._C.Generator.__new__(cls)
        made.on_device = torch.device(device).type == "cuda"
        return made

    def __init__(self, device: Any = "cpu") -> None:
        """Do nothing more."""


def install() -> None:
    """Have this process see one CUDA device."""
    for name, value in {
        "is_available": True, "device_count": 1, "is_initialized": False, "memory_allocated": 0, "synchronize": None,
        "manual_seed_all": None, "_is_in_bad_fork": False, "current_device": 0, "_lazy_init": None,
        "get_device_name": "pretended",
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *_, value=value: value)
    torch.Generator = Generator  # type: ignore[misc]
    fork_rng = torch.random.fork_rng

    @contextmanager
    def fork(devices: Any = None) -> Iterator[None]:
        with fork_rng(devices=[]):
            yield

    torch.random.fork_rng = fork
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda _: None
    Tensor.to = moved(Tensor.to)
    Tensor.new_tensor = like(Tensor.new_tensor)
    torch.tensor = made(torch.tensor)
    Tensor.tolist = from_device(Tensor.tolist)
    Tensor.numpy = refused(Tensor.numpy)
    # Lists would become tensors without values.
    OnDevice.__getitem__ = lambda self, i, get=Tensor.__getitem__: get(self, listed(i))
    OnDevice.__setitem__ = lambda self, i, value, put=Tensor.__setitem__: put(self, listed(i), value)
    Device().__enter__()


def listed(index: Any) -> Any:
    """Return an index whose lists are tensors."""
    if isinstance(index, tuple):
        return tuple(map(listed, index))
    return torch.tensor(index) if isinstance(index, list) else index


def moved(to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``Tensor.to`` that knows the device, and leaves a tensor that is there already as it is."""

    def move(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [*args, kwargs.get("device"), kwargs.get("dtype")]
        given += [part for other in args if isinstance(other, Tensor) for part in (other.device, other.dtype)]
        device = next((torch.device(a) for a in given if isinstance(a, str | torch.device)), self.device)
        dtype = next((a for a in given if isinstance(a, torch.dtype)), self.dtype)
        kept = {key: value for key, value in kwargs.items() if key in ("copy", "memory_format")}
        if device.type != "cuda":
            return to(self, device, dtype, **kept)
        if not isinstance(self, OnDevice):
            return to(self, DEVICE, dtype, **kept)
        return to(self, dtype, **kept) if kept or dtype != self.dtype else self

    return move


def like(new_tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``Tensor.new_tensor`` that makes one with values."""

    def make(self: Tensor, data: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, OnDevice):
            return new_tensor(self, data, **kwargs)
        return torch.tensor(data, **{"dtype": self.dtype, "device": DEVICE} | kwargs)

    return make


def made(tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``torch.tensor`` that makes it on the CPU and moves it."""
    return lambda data, device=None, **kwargs: tensor(data, **kwargs).to(device or "cpu")


def from_device(tolist: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return ``Tensor.tolist`` for both devices."""
    return lambda self: tolist(self.held if isinstance(self, OnDevice) else self)


def refused(numpy: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Tensor.numpy`` that refuses what is on the device, as torch does."""

    def view(self: Tensor, **kwargs: Any) -> Any:
        if isinstance(self, OnDevice):
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")
        return numpy(self, **kwargs)

    return view


install()
