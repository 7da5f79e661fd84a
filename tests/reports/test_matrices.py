"""The matrices of a run: all of them, or as many as there is room for."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedtta_flwr.reports import matrices
from fedtta_flwr.reports.matrices import FILE, Matrices

NAMES = ("a", "b", "c")


def add(kept: Matrices, numbers: range) -> None:
    for number in numbers:
        kept.add(number, NAMES, torch.full((3, 3), float(number)))


def rounds_of(kept: Matrices, folder: Path) -> list[int]:
    kept.write(folder)
    with np.load(folder / FILE, allow_pickle=False) as file:
        assert file["weights"].dtype == np.float32
        assert file["weights"].shape == (len(file["rounds"]), 3, 3)
        assert file["weights"][:, 0, 0].tolist() == file["rounds"].tolist()
        assert file["clients"].tolist() == list(NAMES)
        return file["rounds"].tolist()


def test_who_was_absent_has_zeros(tmp_path: Path) -> None:
    kept = Matrices(NAMES)
    assert rounds_of(kept, tmp_path) == []
    kept.add(1, ("c", "a"), torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    kept.write(tmp_path)
    with np.load(tmp_path / FILE) as file:
        assert file["weights"].tolist() == [[[0.5, 0, 0.5], [0, 0, 0], [0.25, 0, 0.75]]]


@pytest.mark.parametrize(
    ("last", "rounds"),
    [
        (5, [1, 2, 3, 4, 5]),
        (6, [1, 3, 5, 6]),
        (7, [1, 3, 5, 7]),
        (8, [1, 3, 5, 7, 8]),
        (9, [1, 3, 5, 7, 9]),
        (10, [1, 5, 9, 10]),
        (16, [1, 5, 9, 13, 16]),
        (17, [1, 5, 9, 13, 17]),
        (18, [1, 9, 17, 18]),
    ],
)
def test_where_there_are_too_many_every_other_one_goes(
    last: int, rounds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setattr(matrices, "BUDGET", 5 * 9 * 4)
    kept = Matrices(NAMES)
    add(kept, range(1, last + 1))
    assert rounds_of(kept, tmp_path) == rounds
    assert len(warned) == (last > 5) + (last > 9) + (last > 17)


def test_what_is_resumed_goes_on_as_if_nothing_had_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "BUDGET", 5 * 9 * 4)
    for stop in range(1, 24):
        whole, first, second = Matrices(NAMES), Matrices(NAMES), Matrices(NAMES)
        add(whole, range(1, 25))
        add(first, range(1, stop + 1))
        every = first.every
        first.write(tmp_path)
        second.restore(tmp_path, stop, every)
        add(second, range(stop + 1, 25))
        assert rounds_of(second, tmp_path) == rounds_of(whole, tmp_path)


def test_one_that_is_larger_than_all_may_be_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "BUDGET", 1)
    kept = Matrices(NAMES)
    add(kept, range(1, 10))
    assert rounds_of(kept, tmp_path) == [1, 9]


@pytest.mark.parametrize("alike", [True, False])
def test_matrices_are_compressed_where_that_saves_much(alike: bool, tmp_path: Path) -> None:
    names = tuple(f"client-{i:02d}" for i in range(40))
    kept, weights = Matrices(names), torch.rand((2, 40, 40), generator=torch.Generator().manual_seed(0))
    for number, w in enumerate(weights, 1):
        kept.add(number, names, w[:1].expand(40, 40) if alike else w)
    kept.write(tmp_path)
    assert ((tmp_path / FILE).stat().st_size < weights.nbytes / 2) == alike
    with np.load(tmp_path / FILE) as file:
        assert np.array_equal(file["weights"], weights[:, :1].expand(2, 40, 40) if alike else weights)
