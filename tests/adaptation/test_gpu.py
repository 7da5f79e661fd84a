"""Every registered adapter on a GPU: the CPU's arithmetic, and the promises that it keeps there.

Without one, `tests.pretended_cuda` finds tensors that were left on the other device.
"""

import gc
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter, Draws
from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.datasets import open_test_set
from fedtta_flwr.records import from_arrays, to_arrays
from fedtta_flwr.registry import ADAPTERS
from fedtta_flwr.resolve import resolve
from fedtta_flwr.workbench import Workbench
from tests.adaptation.conftest import both, copied, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
State = dict[str, Tensor]
Build = Callable[..., Adapter]

GPU, CPU = torch.device("cuda"), torch.device("cpu")
every_adapter = pytest.mark.parametrize("name", ADAPTERS)
#: less work for the same code, where a method has such an option
SMALL = {"capacity": 16, "update_every": 16, "views": 8, "augmentations": 4}
#: what lives on the CPU wherever the network is: counts, and what decides on one sample after the other
AT_HOME = {
    "optimizer.step",
    "momentum",
    "memory.labels",
    "memory.ages",
    "memory.uncertainties",
    "memory.seen",
    "memory.waiting",
}


@pytest.fixture
def build(resnet8: nn.Module) -> Build:
    """Make equal adapters around the embedded model: ``build("tent", GPU, small=False)``."""

    def make(name: str, device: torch.device, *, dtype: torch.dtype = torch.float32, small: bool = True) -> Adapter:
        options = RunConfig().options(name)
        if small:
            smaller = {key: value for key, value in SMALL.items() if key in type(options).model_fields}
            options = options.model_copy(update=smaller)
        model = deepcopy(resnet8).to(device, dtype)
        adapter: Adapter = resolve("adapter", name, ADAPTERS)(model, options)
        adapter.identity = (3, "client-00")
        return adapter

    return make


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gradients of convolutions summed in a fixed order; cuDNN's fastest way adds them up as they come."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def digits(count: int, start: int = 0, corruption: str = "gaussian_noise") -> tuple[Tensor, Tensor]:
    """Return corrupted test images [B, 3, 32, 32] and labels [B], on the CPU."""
    data = open_test_set("digits", "", 0)
    pixels = torch.from_numpy(data.images(corruption, 5)[slice(start, start + count)])  # type: ignore[index]
    return pixels.permute(0, 3, 1, 2).float().div(255), torch.from_numpy(data.labels[start : start + count])


def stream(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Yield batches of several sizes, down to one."""
    start = 0
    for count in (24, 24, 7, 1, 24):
        yield digits(count, start)[0].to(device, dtype)
        start += count


@every_adapter
def test_auto_is_the_gpu(name: str) -> None:
    """With nothing in the run config but the adapter's name."""
    bench = Workbench(RunConfig.from_flat({"adapter": name}))
    assert bench.device.type == GPU.type
    for adapter in (bench.adapter, bench.lone):
        x = digits(10)[0].to(bench.device)
        for logits in (adapter.adapt(x), adapter.predict(x)):
            assert logits.device.type == GPU.type
            assert bool(logits.isfinite().all())
        assert adapter.rolled_back == 0


@every_adapter
def test_the_arithmetic_is_that_of_the_cpu(
    name: str, build: Build, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where no order of summation shows, with all draws made on the CPU.

    The posterised views of MEMO are a step function of pixels: one that lies on a step may fall to either side.
    """
    drawn = Draws.next
    monkeypatch.setattr(Draws, "next", lambda draws, device="cpu": drawn(draws))
    here, there = (build(name, device, dtype=torch.float64) for device in (CPU, GPU))
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if name == "memo" else {"rtol": 1e-6, "atol": 1e-7}
    for x in stream(CPU, torch.float64):
        expected, found = here.adapt(x), there.adapt(x.to(GPU))
        torch.testing.assert_close(found.cpu(), expected, **tolerance)
        torch.testing.assert_close(there.predict(x.to(GPU)).cpu(), here.predict(x), **tolerance)
        for mine, its in zip(both(here), both(there), strict=True):
            assert list(mine) == list(its)
            for key in mine:
                torch.testing.assert_close(its[key].cpu(), mine[key], **tolerance, msg=lambda m, key=key: f"{key}: {m}")
    assert here.rolled_back == there.rolled_back == 0


@every_adapter
def test_errors_are_those_of_the_cpu(name: str, build: Build) -> None:
    """In float32, with convolutions in TF32 as torch has them by default, and draws made where the network is.

    Of 600 predictions (MEMO: of 90) nine (three) may differ.
    """
    size, count, allowed = (10, 3, 3.4) if name == "memo" else (50, 4, 1.5)
    errors = []
    for device in (CPU, GPU):
        adapter, wrong = build(name, device, small=name == "memo"), 0
        for corruption in ("gaussian_noise", "contrast", "pixelate"):
            for number in range(count):
                x, y = digits(size, number * size, corruption)
                wrong += int((adapter.adapt(x.to(device)).argmax(dim=1).cpu() != y).sum())
        errors.append(100 * wrong / (3 * count * size))
        assert adapter.rolled_back == 0
    assert errors[1] == pytest.approx(errors[0], abs=allowed)


@every_adapter
def test_states_stay_where_they_began(name: str, build: Build) -> None:
    """Also where what is installed comes from the CPU, as from a message or from ``context.state``."""
    adapter = build(name, GPU)

    def check() -> None:
        assert all(t.device.type == GPU.type for t in adapter.adapted_state().values())
        for key, t in adapter.local_state().items():
            at_home = key in AT_HOME or key.startswith("draws.")
            assert t.device.type == (CPU if at_home else GPU).type, key

    check()
    for x in stream(GPU):
        adapter.adapt(x)
        check()
        adapter.load_adapted_state(from_arrays(to_arrays(adapter.adapted_state())))
        adapter.load_local_state(from_arrays(to_arrays(adapter.local_state())))
        check()
    adapter.reset(copied(adapter.adapted_state()))
    check()
    assert bool(adapter.adapt(x).isfinite().all())


@every_adapter
def test_saving_and_loading_in_mid_stream_continues_bit_for_bit(name: str, build: Build, deterministic: None) -> None:
    """As a client's visits do: through Flower's records, into an adapter that served somebody else before."""
    adapter, other = build(name, GPU), build(name, GPU)
    other.adapt(digits(9, 99)[0].to(GPU))
    for step, x in enumerate(stream(GPU)):
        if step == 2:
            other.load_adapted_state(from_arrays(to_arrays(adapter.adapted_state())))
            other.load_local_state(from_arrays(to_arrays(adapter.local_state())))
        logits = adapter.adapt(x)
        if step >= 2:
            assert torch.equal(logits, other.adapt(x))
            for a, b in zip(both(adapter), both(other), strict=True):
                assert same_bits(a, b)


@every_adapter
def test_a_client_may_move_from_a_node_without_gpu(name: str, build: Build) -> None:
    """What is installed is what was sent; BBN makes the balanced statistics anew, in the GPU's order of summation."""
    anew = ("running_mean", "running_var", "teacher_mean", "teacher_var") if name == "bbn" else ()
    here, there = build(name, CPU), build(name, GPU)
    for x in stream(CPU):
        here.adapt(x)
    there.load_adapted_state(from_arrays(to_arrays(here.adapted_state())))
    there.load_local_state(from_arrays(to_arrays(here.local_state())))
    for mine, its in zip(both(here), both(there), strict=True):
        exact = {key: t for key, t in mine.items() if not key.endswith(anew)}
        assert same_bits(exact, {key: its[key].cpu() for key in exact})
        for key in mine.keys() - exact.keys():
            torch.testing.assert_close(its[key].cpu(), mine[key], rtol=1e-5, atol=1e-6)
    assert bool(there.adapt(x.to(GPU)).isfinite().all())


@every_adapter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_undone(name: str, build: Build, deterministic: None, bad: float) -> None:
    adapter, other = build(name, GPU), build(name, GPU)
    good = list(stream(GPU))
    for x in good[:2]:
        adapter.adapt(x)
        other.adapt(x)
    before, x = both(adapter), good[2].clone()
    x[-1, 1, 2, 3] = bad
    assert adapter.adapt(x).shape == (len(x), 10)
    assert adapter.rolled_back == 1
    for a, b in zip(before, both(adapter), strict=True):
        assert same_bits(a, b)
    # and the next good batch counts as if the bad one had not been there
    assert torch.equal(adapter.adapt(good[4]), other.adapt(good[4]))
    for a, b in zip(both(adapter), both(other), strict=True):
        assert same_bits(a, b)
    assert adapter.rolled_back == 1


@every_adapter
def test_memory_does_not_grow_with_visits(name: str, build: Build) -> None:
    adapter, x = build(name, GPU), digits(8)[0].to(GPU)
    initial = copied(adapter.adapted_state())
    saved = dict.fromkeys(range(4), (to_arrays(initial), to_arrays({})))
    taken = []
    for _ in range(6):
        for client, (adapted, local) in saved.items():
            adapter.load_adapted_state(from_arrays(adapted))
            adapter.load_local_state(from_arrays(local))
            adapter.adapt(x)
            saved[client] = to_arrays(adapter.adapted_state()), to_arrays(adapter.local_state())
        gc.collect()
        taken.append(torch.cuda.memory_allocated())
    assert taken[-1] == taken[2]  # after every kind of step: torch keeps the libraries' workspaces from then on
