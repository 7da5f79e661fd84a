"""Screening, stacking and mixing, against plain loops."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedtta_flwr.records import unstack
from fedtta_flwr.strategies.updates import (
    Update,
    check_row_stochastic,
    check_states,
    form,
    mix,
    mix_,
    screen,
    stack_updates,
)


def update(mean: float = 0.0, var: float = 1.0, examples: int = 5, descriptor: bool = True) -> Update:
    state = {"bn.running_mean": torch.full((3,), mean), "bn.running_var": torch.full((3,), var)}
    return Update(state, torch.full((2,), mean) if descriptor else None, examples)


def altered(name: str, tensor: Tensor) -> Update:
    whole = update()
    return Update(whole.state | {name: tensor}, whole.descriptor, whole.examples)


def lacking(name: str) -> Update:
    whole = update()
    return Update({key: t for key, t in whole.state.items() if key != name}, whole.descriptor, whole.examples)


def test_good_updates_pass() -> None:
    assert screen({}, update()) == {}
    assert screen({"a": update()}, update(math.nan)) == {}  # only the form of what is expected counts
    assert screen({"a": update(-9e17), "b": update(9e17), "c": update(var=0.0), "d": update(var=9e35)}, update()) == {}
    assert screen({"a": update(descriptor=False)}, update(descriptor=False)) == {}
    assert screen({"a": Update({}, None, 5)}, Update({}, None, 0)) == {}  # an adapter of which nothing travels
    empty = altered("bn.running_mean", torch.zeros(0))
    assert screen({"a": empty}, empty) == {}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (update(float("nan")), "not finite"),
        (update(var=float("inf")), "bn.running_var is not finite"),
        (update(var=-1e-30), "bn.running_var is negative"),
        (Update(update().state, torch.tensor([0.0, float("nan")]), 5), "descriptor is not finite"),
        (update(descriptor=False), "descriptor"),
        (Update(update().state, torch.zeros(3), 5), "descriptor"),
        (update(3.4e38), r"bn.running_mean reaches 3.4e+38, allowed: 1e+18"),
        (update(-2e18), "bn.running_mean reaches 2e+18"),
        (update(var=2e36), "bn.running_var reaches 2e+36, allowed: 1e+36"),
        (Update(update().state, torch.tensor([0.0, 2e18]), 5), "descriptor reaches 2e+18"),
        (Update(update().state, torch.zeros(2, dtype=torch.int64), 5), "descriptor"),
        (Update(update().state, torch.zeros(2, dtype=torch.complex64), 5), "descriptor"),
        (Update({}, update().descriptor, 5), "0 tensors, expected the 2 of what was asked for"),
        (altered("descriptor", torch.zeros(2)), "first that differ: descriptor"),
        (Update(update().state | {"descriptor": torch.zeros(2)}, None, 5), "first that differ: descriptor"),
        (altered("bn.running_mean", torch.zeros(3, dtype=torch.complex64)), "bn.running_mean"),
        (altered("bn.running_mean", torch.zeros(3, dtype=torch.int32)), "bn.running_mean"),
        (lacking("bn.running_var"), "bn.running_var"),
        (altered("secret", torch.zeros(1)), "secret"),
        (altered("bn.running_mean", torch.zeros(4)), "bn.running_mean"),
        (altered("bn.running_mean", torch.zeros(3, 1)), "bn.running_mean"),
        (altered("bn.running_mean", torch.zeros(3, dtype=torch.float64)), "bn.running_mean"),
    ],
)
def test_a_bad_update_is_named_with_its_reason_and_no_other(bad: Update, reason: str) -> None:
    for name in ("a", "b", "z"):  # wherever it stands in the order
        others = {client: update(float(i)) for i, client in enumerate("bcd" if name != "b" else "acd")}
        rejected = screen(others | {name: bad}, update())
        assert list(rejected) == [name]
        assert reason in rejected[name]
        assert "\n" not in rejected[name]


def test_only_a_variance_must_not_be_negative() -> None:
    weights = {client: altered("weight", torch.tensor([value])) for client, value in [("a", -1.0), ("b", 1.0)]}
    assert screen(weights, weights["a"]) == {}
    assert screen({"a": update(-1.0), "b": update(-2.0)}, update()) == {}


def test_a_parameter_may_be_named_as_if_it_were_a_variance() -> None:
    log_var = altered("head.log_var", torch.tensor([-1.0]))
    assert screen({"a": log_var}, log_var) == {}
    state = stack_updates(1, {"a": log_var, "b": altered("head.log_var", torch.tensor([3.0]))}, []).state
    assert mix(torch.full((2, 2), 0.5), state, moments=True)["head.log_var"].tolist() == [[1.0], [1.0]]


def test_clients_have_no_vote_on_the_form() -> None:
    wide = altered("bn.running_mean", torch.zeros(4))
    assert list(screen({"a": wide, "b": wide, "c": update()}, update())) == ["a", "b"]
    assert list(screen({"a": wide}, update())) == ["a"]
    assert screen({"a": wide}, wide) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("moments", [False, True])
def test_what_screening_lets_pass_is_finite_when_mixed_and_passes_again(dtype: torch.dtype, moments: bool) -> None:
    def at(mean: float, var: float) -> Update:
        state = {"bn.running_mean": torch.full((3,), mean).to(dtype), "bn.running_var": torch.full((3,), var).to(dtype)}
        return Update(state, None, 5)

    updates = {"a": at(-9.9e17, 9.9e35), "b": at(0.0, 1.0), "c": at(0.1, 0.5)}
    assert screen(updates, at(0.0, 1.0)) == {}
    for seed in range(20):
        mixed = mix(random_weights(3, seed), stack_updates(1, updates, ()).state, moments=moments)
        again = {client: Update(unstack(mixed, i), None, 5) for i, client in enumerate("abc")}
        assert screen(again, at(0.0, 1.0)) == {}


def test_stacking_is_in_the_order_of_names() -> None:
    updates = {"c": update(3.0, examples=7), "a": update(1.0, examples=5), "b": update(2.0)}
    stacked = stack_updates(4, updates, ["b"])
    assert stacked.round == 4
    assert stacked.clients == ("a", "c")
    assert len(stacked) == 2
    assert stacked.state["bn.running_mean"].tolist() == [[1.0] * 3, [3.0] * 3]
    assert stacked.descriptor is not None
    assert stacked.descriptor.tolist() == [[1.0, 1.0], [3.0, 3.0]]
    assert stacked.examples.tolist() == [5.0, 7.0]
    assert stacked.examples.dtype == torch.float64


def test_stacking_without_descriptors_or_clients() -> None:
    assert stack_updates(1, {"a": update(descriptor=False)}, ()).descriptor is None
    empty = stack_updates(1, {"a": update()}, ["a"])
    assert (len(empty), empty.state, empty.descriptor) == (0, {}, None)


def random_weights(n: int, seed: int) -> Tensor:
    return torch.rand((n, n), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(dim=1)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 6),
    shape=st.lists(st.integers(1, 3), max_size=3),
    double=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_mixing_is_the_double_sum(n: int, shape: list[int], double: bool, seed: int) -> None:
    dtype = torch.float64 if double else torch.float32
    weights = random_weights(n, seed)
    theta = torch.randn((n, *shape), generator=torch.Generator().manual_seed(seed + 1), dtype=dtype)
    mixed = mix(weights, {"t": theta})["t"]
    assert mixed.dtype == dtype
    assert mixed.shape == theta.shape
    for i in range(n):
        expected = torch.zeros(shape, dtype=torch.float64)
        for j in range(n):
            expected += weights[i, j].item() * theta[j].double()
        tolerance = 1e-13 if double else 1e-6
        torch.testing.assert_close(mixed[i].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float64])
def test_the_identity_gives_everybody_his_own_bit_for_bit(dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    theta = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    theta[2] *= 1e20
    theta[3] *= 1e-30
    mixed = mix(torch.eye(7, dtype=weights_dtype), {"t": theta})["t"]
    assert mixed.dtype == dtype
    assert torch.equal(mixed, theta)
    assert mix_(torch.eye(7, dtype=weights_dtype), {"t": theta})["t"] is theta  # no product at all


def test_equal_tensors_are_their_own_mixture() -> None:
    """Why what no client changes need not travel."""
    row = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theta = row.expand(5, 4, 3)
    mixed = mix(random_weights(5, 0), {"t": theta})["t"]
    torch.testing.assert_close(mixed, theta, rtol=1e-14, atol=1e-14)


def test_mixing_leaves_its_input_alone() -> None:
    theta = torch.randn(3, 4)
    before = theta.clone()
    mix(random_weights(3, 0), {"t": theta})
    assert torch.equal(theta, before)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 6), seed=st.integers(0, 10_000), far=st.sampled_from([0.0, 1.0, 1e4]))
def test_moments_are_those_of_the_mixed_data(n: int, seed: int, far: float) -> None:
    """Against data: each client has four points, and a mixture has all of them, weighted."""
    generator = torch.Generator().manual_seed(seed)
    points = far + torch.randn((n, 4, 3), generator=generator, dtype=torch.float64)
    weights = random_weights(n, seed)
    state = {"bn.running_var": points.var(dim=1, correction=0), "bn.running_mean": points.mean(dim=1)}
    mixed = mix(weights, state, moments=True)
    assert list(mixed) == list(state)
    for i, row in enumerate(weights.tolist()):
        for k in range(3):
            data = [(w / 4, value) for w, own in zip(row, points[:, :, k].tolist(), strict=True) for value in own]
            mean = sum(w * value for w, value in data)
            variance = sum(w * (value - mean) ** 2 for w, value in data)
            assert mixed["bn.running_mean"][i, k].item() == pytest.approx(mean, rel=1e-12)
            assert mixed["bn.running_var"][i, k].item() == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize("far", [1e4, 1e9, 9.9e17])
def test_who_is_not_in_a_mixture_does_not_change_its_moments(far: float) -> None:
    means, variances = torch.tensor([[0.5], [-0.25], [0.125], [far]]), torch.tensor([[1.0], [2.0], [0.5], [1.0]])
    weights = torch.tensor([[0.5, 0.25, 0.25, 0], [0, 0.5, 0.5, 0], [0.25, 0, 0.75, 0], [0, 0, 0, 1]])
    mixed = mix(weights, {"bn.running_mean": means, "bn.running_var": variances}, moments=True)
    without = mix(weights[:3, :3], {"bn.running_mean": means[:3], "bn.running_var": variances[:3]}, moments=True)
    for name, t in without.items():
        assert mixed[name][:3].flatten().tolist() == pytest.approx(t.flatten().tolist(), rel=1e-6)


def test_a_variance_whose_means_do_not_travel_is_the_weighted_mean() -> None:
    state = {"bn.running_var": torch.tensor([[1.0], [3.0]])}
    assert mix(torch.full((2, 2), 0.5), state, moments=True)["bn.running_var"].tolist() == [[2.0], [2.0]]


def test_without_moments_a_variance_is_the_weighted_mean() -> None:
    state = {"bn.running_var": torch.tensor([[1.0], [3.0]]), "bn.running_mean": torch.tensor([[0.0], [100.0]])}
    assert mix(torch.full((2, 2), 0.5), state)["bn.running_var"].tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("block", [1, 3, 100])
def test_mixing_in_place_is_mixing(moments: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    state = {
        name: torch.rand((4, *shape), generator=generator).to(dtype)
        for name, shape, dtype in [
            ("scalar", (), torch.float32),
            ("bn.running_mean", (7,), torch.float32),
            ("bn.running_var", (7,), torch.float32),
            ("conv.weight", (2, 3, 2), torch.float64),
            ("nothing", (0,), torch.float32),
        ]
    }
    before = {name: t.clone() for name, t in state.items()}
    weights = random_weights(4, 6)
    expected = mix(weights, state, moments=moments)
    assert all(torch.equal(state[name], t) for name, t in before.items())
    monkeypatch.setattr("fedtta_flwr.strategies.updates.BLOCK", block)
    given = dict(state)
    mixed = mix_(weights, given, moments=moments)
    assert given == {}  # who looks at it again shall notice
    assert list(mixed) == list(state)
    for name, t in mixed.items():
        torch.testing.assert_close(t, expected[name], rtol=1e-6, atol=1e-6)
        if t[0].numel() > block:
            assert t.data_ptr() == state[name].data_ptr()


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("block", [2, 100])
def test_one_mixture_for_all_is_made_once(moments: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    state = {name: torch.rand((4, 3), generator=generator) for name in ("running_mean", "running_var", "weight")}
    rows = random_weights(4, 8)[:1]
    nearly = rows.expand(4, 4).clone()
    nearly[3, :2] += torch.tensor([1e-9, -1e-9])  # each row by itself
    monkeypatch.setattr("fedtta_flwr.strategies.updates.BLOCK", block)
    own, expected = (mix(w, state, moments=moments) for w in (rows.expand(4, 4), nearly))
    for name, t in mix_(rows.expand(4, 4), dict(state), moments=moments).items():
        torch.testing.assert_close(t, expected[name])
        assert t.untyped_storage().nbytes() == t[0].nbytes
        assert torch.equal(t, own[name])
        own[name][0] += 1.0  # a client's, and nobody else's
        torch.testing.assert_close(own[name], expected[name] + torch.tensor([[1.0], [0], [0], [0]]))


class LargestMade(TorchDispatchMode):
    """Sees the largest tensor that operations make in memory of its own, in entries."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.entries = max(self.entries, out.numel())
        return out


def test_mixing_in_place_needs_little_beside_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtta_flwr.strategies.updates.BLOCK", 1000)
    state = {"a": torch.rand(20, 50_000), "b": torch.rand(20, 10)}
    with LargestMade() as copied:
        mix(random_weights(20, 0), state)
    with LargestMade() as in_place:
        mix_(random_weights(20, 0), state)
    assert copied.entries == 20 * 50_000
    assert in_place.entries == 20 * 1000


@pytest.mark.parametrize("moments", [False, True])
def test_there_may_be_more_states_than_mixtures(moments: bool) -> None:
    """As where clients have several each: two rows of what a square matrix gives to five."""
    generator = torch.Generator().manual_seed(4)
    state = {name: torch.rand((5, 2, 3), generator=generator) for name in ("bn.running_mean", "bn.running_var", "w")}
    weights = random_weights(5, 0)
    whole, part = (mix(w, state, moments=moments) for w in (weights, weights[[3, 1]]))
    for name, t in part.items():
        torch.testing.assert_close(t, whole[name][[3, 1]])


def test_variances_stay_between_the_least_and_the_largest() -> None:
    var = torch.rand(6, 20, generator=torch.Generator().manual_seed(2))
    mixed = mix(random_weights(6, 3), {"running_var": var})["running_var"]
    assert (mixed >= var.min(dim=0).values - 1e-6).all()
    assert (mixed <= var.max(dim=0).values + 1e-6).all()


def test_row_stochastic_matrices_pass() -> None:
    for n in (1, 2, 50):
        assert check_row_stochastic(torch.eye(n), n) is None
        assert check_row_stochastic(random_weights(n, n), n) is None
        assert check_row_stochastic(random_weights(n, n).float(), n) is None


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (torch.eye(3), r"shape \[3, 3\], expected \[2, 2\]"),
        (torch.full((2,), 0.5), "shape"),
        (torch.tensor([[0.5, float("nan")], [0.5, 0.5]]), "not finite"),
        (torch.tensor([[0.5, 0.5], [0.5, 0.6]]), "sums to 1"),
        (torch.zeros(2, 2), "sums to 1"),
        (torch.tensor([[2.0, -1.0], [0.0, 1.0]]), "an entry is -1"),
        (torch.tensor([[0.5, 0.0], [0.5, 1.0]]), "sums to 1"),  # the columns do, the rows do not
        (torch.eye(2, dtype=torch.float16), r"torch\.float16, expected torch\.float32 or torch\.float64"),
        (torch.eye(2, dtype=torch.int64), r"torch\.int64, expected"),
        (np.eye(2), r"ndarray, expected a Tensor \[2, 2\]"),
        (None, "NoneType, expected a Tensor"),
    ],
)
def test_other_matrices_are_refused_with_the_reason(weights: object, reason: str) -> None:
    fault = check_row_stochastic(weights, 2)
    assert fault is not None
    assert re.search(reason, fault)


STATES = {"fc.weight": torch.ones(2, 3), "bn.running_mean": torch.zeros(2, 4), "bn.running_var": torch.ones(2, 4)}


def test_states_of_the_same_form_pass() -> None:
    forms = {name: form(t) for name, t in STATES.items()}
    assert check_states({name: 2 * t for name, t in reversed(STATES.items())}, forms) is None
    assert check_states(STATES | {"bn.running_var": torch.zeros(2, 4)}, forms) is None
    assert check_states({}, {}) is None


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (None, "NoneType, expected tensors by name"),
        ([*STATES.values()], "list, expected tensors by name"),
        ({}, r"0 tensors, expected the 3 .*: bn\.running_mean, bn\.running_var, fc\.weight"),
        (STATES | {"fc.bias": torch.ones(2)}, r"4 tensors, expected the 3 .*: fc\.bias"),
        (STATES | {"fc.weight": torch.ones(3)}, r"fc\.weight is torch\.float32 \[3\] on cpu, expected .*\[2, 3\]"),
        (STATES | {"fc.weight": torch.ones(1, 3)}, r"\[1, 3\] on cpu, expected .*\[2, 3\]"),
        (STATES | {"fc.weight": torch.ones(2, 3).double()}, r"torch\.float64 .*, expected torch\.float32"),
        (STATES | {"fc.weight": torch.ones(2, 3, device="meta")}, "on meta, expected .* on cpu"),
        (STATES | {"fc.weight": torch.ones(2, 3).requires_grad_()}, "with a gradient"),
        (STATES | {"fc.weight": np.ones((2, 3))}, r"fc\.weight is ndarray"),
        (STATES | {"fc.weight": torch.full((2, 3), math.inf)}, r"fc\.weight is not finite"),
        (STATES | {"bn.running_mean": torch.full((2, 4), math.nan)}, r"bn\.running_mean is not finite"),
        (STATES | {"bn.running_var": torch.full((2, 4), -1e-9)}, r"bn\.running_var is negative"),
    ],
)
def test_other_states_are_refused_with_the_reason(states: object, reason: str) -> None:
    fault = check_states(states, {name: form(t) for name, t in STATES.items()})
    assert fault is not None
    assert re.search(reason, fault), fault
    assert "\n" not in fault
