"""Seeds: fixed for ever, and independent of each other."""

import hashlib
import random
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtta_flwr.seeding import derive_seed, numpy_rng, seeded, torch_rng

purposes = st.lists(st.integers(-(2**70), 2**70) | st.text("abc-019", max_size=5), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("purpose", "seed"),
    [
        ((0,), 4761921975702974394),
        ((0, "a"), 8109984738409489985),
        ((7, "client-03", 17, "augment"), 451626157304984513),
        ((2**63 - 1, "x", -1), 1798865480675967949),
    ],
)
def test_seeds_never_change(purpose: tuple[int | str, ...], seed: int) -> None:
    """Every published number depends on them: a failure here is a change of all results."""
    assert derive_seed(*purpose) == seed  # type: ignore[arg-type]


def test_draws_never_change() -> None:
    assert numpy_rng(0, "client-00", "samples").permutation(797)[:5].tolist() == [706, 667, 390, 387, 134]
    drawn = torch.rand(3, generator=torch_rng(0, "shared noise")).tolist()
    assert drawn == pytest.approx([0.5029795169830322, 0.4816057085990906, 0.08638018369674683], abs=0)


def test_a_seed_is_the_hash_of_the_typed_purpose() -> None:
    text = "\x1f".join(["5", "str:client-1", "int:3"])
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    assert derive_seed(5, "client-1", 3) == int(digest, 16) // 2


@given(st.integers(0, 2**63 - 1), purposes, st.integers(0, 2**63 - 1), purposes)
def test_seeds_are_in_range_and_differ_with_the_purpose(
    seed: int, purpose: tuple[int | str, ...], other_seed: int, other: tuple[int | str, ...]
) -> None:
    first, second = derive_seed(seed, *purpose), derive_seed(other_seed, *other)
    assert 0 <= first < 2**63
    same = seed == other_seed and [(type(p), p) for p in purpose] == [(type(p), p) for p in other]
    assert (first == second) == same


def test_neighbouring_purposes_differ() -> None:
    variants = [
        (0, "a", 1),
        (0, "a", "1"),
        (0, "a1"),
        (0, 1, "a"),
        (0, "a", 1, ""),
        (1, "a", 1),
        (0, "A", 1),
        (0, "a", 11),
    ]
    assert len({derive_seed(*v) for v in variants}) == len(variants)  # type: ignore[arg-type]
    many = {derive_seed(s, f"client-{c:02d}", r) for s in range(10) for c in range(20) for r in range(50)}
    assert len(many) == 10 * 20 * 50


@pytest.mark.parametrize("use", ["numpy", "torch"])
def test_generators_of_neighbouring_purposes_are_uncorrelated(use: str) -> None:
    def draw(i: int) -> list[float]:
        if use == "numpy":
            return numpy_rng(0, "client", i).standard_normal(2000).tolist()
        return torch.randn(2000, generator=torch_rng(0, "client", i)).tolist()

    correlations = np.corrcoef(np.array([draw(i) for i in range(20)]))
    off = correlations[~np.eye(20, dtype=bool)]
    assert abs(off).max() < 5 / np.sqrt(2000)
    assert abs(off.mean()) < 0.01


def test_a_draw_depends_on_no_draw_before_and_touches_no_global_state() -> None:
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    first = numpy_rng(3, "x").random(4)
    numpy_rng(3, "y").random(100)
    torch_rng(3, "y").seed()
    assert (numpy_rng(3, "x").random(4) == first).all()
    assert (np.random.get_state()[1] == numpy_state).all()
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_all_global_generators_are_seeded_for_a_purpose_and_restored() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    def left() -> list[object]:
        return [random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()]

    cpu = torch.device("cpu")
    with seeded(cpu, 3, "a"):
        first = drawn()
    drawn()
    before = left()
    with seeded(cpu, 3, "a"):
        assert drawn() == first
    with seeded(cpu, 3, "b"):
        assert not set(drawn()) & set(first)
    with suppress(ZeroDivisionError), seeded(cpu, 3, "c"):
        drawn()[0] /= 0
    assert left() == before


def test_seeds_do_not_depend_on_the_hash_seed_of_python() -> None:
    code = "from fedtta_flwr.seeding import derive_seed; print(derive_seed(7, 'client-03', 17, 'augment'))"
    for value in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": value}, capture_output=True, text=True, check=True
        )
        assert int(run.stdout) == 451626157304984513
