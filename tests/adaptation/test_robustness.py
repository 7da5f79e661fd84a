"""What every registered adapter survives and promises; a new one is tested here as soon as it is registered."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.records import from_arrays, to_arrays
from fedtta_flwr.registry import ADAPTERS
from fedtta_flwr.resolve import resolve
from tests.adaptation.conftest import both, copied, make, same_bits

Make = Callable[..., nn.Module]
State = dict[str, Tensor]

#: less work for the same code, where a method has such an option
SMALL = {"capacity": 8, "update_every": 6, "update_frequency": 6, "views": 2, "augmentations": 3}
KINDS = ("random", "random", "same", "black", "white", "one", "empty", "nan", "inf")
every_adapter = pytest.mark.parametrize("name", ADAPTERS)
streams = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 9), st.integers(0, 2**31)), min_size=1, max_size=5)
few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def build(name: str, model: nn.Module) -> Adapter:
    options = RunConfig().options(name)
    smaller = {key: value for key, value in SMALL.items() if key in type(options).model_fields}
    adapter: Adapter = resolve("adapter", name, ADAPTERS)(model, options.model_copy(update=smaller))
    return adapter


def batch(kind: str, count: int, seed: int) -> Tensor:
    x = torch.rand((count, 3, 6, 6), generator=torch.Generator().manual_seed(seed))
    if kind in ("black", "white"):
        return torch.full_like(x, float(kind == "white"))
    if kind in ("nan", "inf"):
        x[-1, 1, 2, 3] = float(kind)
    return {"same": x[:1].repeat(count, 1, 1, 1), "one": x[:1], "empty": x[:0]}.get(kind, x)


def finite(state: State) -> bool:
    return all(bool(t.isfinite().all()) for t in state.values() if t.is_floating_point())


@every_adapter
def test_a_first_step_changes_only_what_is_declared(name: str, tiny: Make) -> None:
    """What is asked of a package of one's own at run time."""
    adapter = build(name, tiny())
    adapter._check._ships = False
    for seed in range(2):
        assert adapter.adapt(batch("random", 9, seed)).shape == (9, 3)
    assert adapter.steps == 2


@every_adapter
@few
@given(stream=streams)
def test_any_stream(name: str, stream, tiny: Make) -> None:
    """No exception, no NaN in any state, logits for every sample, and the network's form stays what it was."""
    adapter = build(name, tiny())
    model_form = [(key, t.shape, t.dtype) for key, t in adapter.model.state_dict().items()]
    adapted_form = [(key, t.shape, t.dtype) for key, t in adapter.adapted_state().items()]
    local_form = [(key, t.dtype) for key, t in adapter.local_state().items()]
    for kind, count, seed in stream:
        x, before, rolled_back = batch(kind, count, seed), both(adapter), adapter.rolled_back
        logits = adapter.adapt(x)
        assert logits.shape == (len(x), 3)
        assert not logits.requires_grad
        if bool(x.isfinite().all()):
            assert bool(logits.isfinite().all())
            assert adapter.rolled_back == rolled_back
        else:
            assert adapter.rolled_back == rolled_back + 1
        if kind in ("empty", "nan", "inf"):
            after = both(adapter)
            assert same_bits(before[0], after[0])
            assert same_bits(before[1], after[1])
        assert finite(adapter.adapted_state())
        assert finite(adapter.local_state())
        assert all((t >= 0).all() for key, t in adapter.adapted_state().items() if key.endswith("running_var"))
        assert [(key, t.shape, t.dtype) for key, t in adapter.model.state_dict().items()] == model_form
        assert [(key, t.shape, t.dtype) for key, t in adapter.adapted_state().items()] == adapted_form
        assert [(key, t.dtype) for key, t in adapter.local_state().items()] == local_form
        for module in adapter.model.modules():
            assert not module.training
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
            assert "forward" not in vars(module)
            if isinstance(module, nn.BatchNorm2d):
                assert module.track_running_stats
                assert module.momentum == 0.1


@every_adapter
@few
@given(stream=streams, cut=st.integers(0, 4))
def test_saving_and_loading_in_mid_stream_continues_bit_for_bit(name: str, stream, cut: int, tiny: Make) -> None:
    """As a client's visits do: through Flower's records, into an adapter that served somebody else before."""
    adapter, other = build(name, tiny()), build(name, tiny())
    other.adapt(batch("random", 9, 99))
    for step, (kind, count, seed) in enumerate(stream):
        if step == cut:
            other.load_adapted_state(from_arrays(to_arrays(adapter.adapted_state())))
            other.load_local_state(from_arrays(to_arrays(adapter.local_state())))
        x = batch(kind, count, seed)
        logits = adapter.adapt(x)
        if step >= cut:
            assert torch.equal(logits.nan_to_num(), other.adapt(x).nan_to_num())
            for a, b in zip(both(adapter), both(other), strict=True):
                assert same_bits(a, b)


@every_adapter
def test_one_adapter_serves_two_clients_like_two_adapters(name: str, tiny: Make) -> None:
    shared, alone = build(name, tiny()), {client: build(name, tiny()) for client in ("a", "b")}
    initial = copied(shared.adapted_state())
    saved: dict[str, tuple[State, State]] = {client: (initial, {}) for client in alone}
    for seed in range(3):
        for client, own in alone.items():
            own.identity = shared.identity = (7, client)
            shared.load_adapted_state(saved[client][0])
            shared.load_local_state(saved[client][1])
            x = batch("random", 7, seed + 10 * ord(client))
            assert torch.equal(shared.adapt(x), own.adapt(x))
            saved[client] = both(shared)
    shared.reset(initial)
    fresh = build(name, tiny())
    shared.identity = fresh.identity
    assert torch.equal(shared.adapt(batch("random", 7, 0)), fresh.adapt(batch("random", 7, 0)))


class Activated(nn.BatchNorm2d):
    """A layer with its activation in it, like timm's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@every_adapter
def test_a_batch_norm_that_does_more_does_it_or_is_refused(name: str, tiny: Make) -> None:
    plain, more = tiny(), tiny()
    for layer in (more.bn1, more.bn2):
        layer.__class__ = Activated  # a ReLU follows anyway
    if name in ("note", "rotta", "bbn"):  # which put a normalisation of their own in its place
        with pytest.raises(ConfigError, match=rf"adapter = '{name}': bn1 is a Activated, .* choose another adapter"):
            build(name, more)
        return
    one, other = build(name, plain), build(name, more)
    for seed in range(2):
        x = batch("random", 9, seed)
        torch.testing.assert_close(other.adapt(x), one.adapt(x))
        torch.testing.assert_close(other.predict(x), one.predict(x))


class Unusual(nn.Module):
    """Two BatchNorm layers that share their parameters, and a mask that is made when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.bn2.weight, self.bn2.bias = self.bn1.weight, self.bn1.bias
        self.head = nn.Linear(4, 3)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1.5, x.shape[-1])
        h = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu() * self.mask)).relu()
        logits: Tensor = self.head(h.mean(dim=(2, 3)))
        return logits


@every_adapter
def test_a_network_may_keep_a_tensor_from_its_first_pass_and_share_parameters(name: str) -> None:
    adapter = build(name, make(Unusual, torch.float32))
    adapter.predict(batch("random", 9, 0))  # what a step keeps for its gradients is made here
    before = copied(adapter.adapted_state())
    assert len({t.data_ptr() for t in adapter.adapted_state().values()}) == len(before)
    adapter.adapt(batch("random", 9, 1))
    assert adapter.rolled_back == 0
    if name == "tent":  # Adam's first step is the learning rate
        moved = adapter.adapted_state()["bn1.weight"] - before["bn1.weight"]
        torch.testing.assert_close(moved.abs(), torch.full((4,), 1e-3), rtol=1e-3, atol=0)


@every_adapter
def test_predicting_changes_nothing(name: str, tiny: Make) -> None:
    adapter = build(name, tiny())
    for seed in range(2):
        adapter.adapt(batch("random", 8, seed))
    before, model = both(adapter), copied(adapter.model.state_dict())
    first = adapter.predict(batch("random", 5, 3))
    assert torch.equal(first, adapter.predict(batch("random", 5, 3)))
    assert same_bits(model, adapter.model.state_dict())
    for a, b in zip(before, both(adapter), strict=True):
        assert same_bits(a, b)
    assert adapter.predict(batch("empty", 1, 0)).shape == (0, 3)


@every_adapter
def test_nothing_but_floating_point_travels_and_only_what_is_named_changes(name: str, tiny: Make) -> None:
    adapter = build(name, tiny())
    before = copied(adapter.model.state_dict())
    for seed in range(3):
        adapter.adapt(batch("random", 8, seed))
    assert all(t.is_floating_point() for t in adapter.adapted_state().values())
    for key, t in adapter.model.state_dict().items():
        if key not in adapter.adapted_state() and not key.endswith("num_batches_tracked"):
            assert torch.equal(t, before[key]), key


@every_adapter
def test_a_collapse_to_one_class_is_survived(name: str, tiny: Make) -> None:
    model = tiny()
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([1e4, 0.0, 0.0]))
    adapter = build(name, model)
    for seed in range(4):
        logits = adapter.adapt(batch("random", 8, seed))
        assert bool(logits.isfinite().all())
        assert (logits.argmax(dim=1) == 0).all()
    assert adapter.rolled_back == 0
    assert finite(adapter.local_state())


@every_adapter
def test_dropout_stays_off(name: str, tiny: Make) -> None:
    """Two adapters under different global random states do the same."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        adapter = build(name, tiny())
        results.append([adapter.adapt(batch("random", 8, s)) for s in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@every_adapter
def test_maps_of_one_pixel(name: str, tiny: Make) -> None:
    """One image of one pixel: no BatchNorm layer has a variance to take."""
    adapter = build(name, tiny())
    for count in (1, 3, 1):
        logits = adapter.adapt(torch.rand((count, 3, 1, 1), generator=torch.Generator().manual_seed(count)))
        assert bool(logits.isfinite().all())
    assert adapter.rolled_back == 0


def test_a_refusal_names_the_adapters_that_work_without_batch_norm(no_norm: Make) -> None:
    grouped = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    work: dict[str, set[str]] = {}
    told: dict[str, str] = {}
    for kind, model in (("none", no_norm()), ("grouped", grouped)):
        for name in ADAPTERS:
            try:
                build(name, model)
                work.setdefault(kind, set()).add(name)
            except ConfigError as error:
                told[name] = str(error)
    named = {name: set(re.findall("`(.+?)`", text)) for name, text in told.items()}
    assert named["bn-stats"] == work["grouped"]
    assert set(re.findall("`(.+?)`", told["bn-stats"].partition("; where there is")[0])) == work["none"]
    assert named["tent"] == work["none"]


@every_adapter
def test_networks_without_batch_norm_work_or_are_refused_in_one_line(name: str, no_norm: Make) -> None:
    grouped = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    for model in (no_norm(), grouped):
        try:
            adapter = build(name, model)
        except ConfigError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert name in str(error)  # noqa: PT017
            continue
        for kind, count in (("random", 8), ("one", 1), ("nan", 3), ("same", 4)):
            logits = adapter.adapt(batch(kind, count, 1))
            assert kind == "nan" or bool(logits.isfinite().all())
        assert finite(adapter.adapted_state())
        assert finite(adapter.local_state())


@every_adapter
def test_a_local_state_of_another_form_is_refused(name: str, tiny: Make) -> None:
    adapter = build(name, tiny())
    before = both(adapter)
    with pytest.raises(CheckpointError, match="something") as caught:
        adapter.load_local_state(copied(adapter.local_state()) | {"something": torch.zeros(1)})
    assert "\n" not in str(caught.value)
    assert same_bits(before[1], both(adapter)[1])
