"""heads.npz: histograms by test set and client, and going on from a checkpoint."""

from pathlib import Path

import numpy as np

from fedtta_flwr.records import BINS
from fedtta_flwr.reports.interpolation import FILE, Interpolation
from fedtta_flwr.strategies.rounds import Round


def histogram(*bins: int) -> np.ndarray:
    return np.bincount(bins, minlength=BINS).astype(np.int64)


def told() -> Interpolation:
    made = Interpolation()
    made.add(Round(8, interpolation={("b", "E"): histogram(0, 0, 49), ("a", "E"): histogram(7)}))
    made.add(Round(9, interpolation={("b", "A"): histogram(3)}))
    return made


def test_sets_clients_and_bins(tmp_path: Path) -> None:
    told().write(tmp_path)
    with np.load(tmp_path / FILE, allow_pickle=False) as file:
        found = {key: file[key] for key in file}
    assert found["sets"].tolist() == ["A", "E"]
    assert found["clients"].tolist() == ["a", "b"]
    assert found["edges"][[0, 1, -1]].tolist() == [0.0, 1 / BINS, 1.0]
    expected = np.zeros((2, 2, BINS), int)
    expected[0, 1, 3] = 1
    expected[1, 0, 7] = 1
    expected[1, 1, [0, 49]] = 2, 1
    np.testing.assert_array_equal(found["histogram"], expected)


def test_without_weights_there_is_no_file(tmp_path: Path) -> None:
    made = Interpolation()
    made.add(Round(1))
    made.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_set_that_is_predicted_in_two_rounds_is_added_up() -> None:
    made = told()
    made.add(Round(10, interpolation={("b", "A"): histogram(3, 4)}))
    assert made.arrays()["histogram"][0, 1, 3:5].tolist() == [2, 1]


def test_it_goes_on_from_a_snapshot() -> None:
    other = Interpolation()
    other.restore(*told().snapshot())
    last = Round(10, interpolation={("a", "A"): histogram(1)})
    one = told()
    for made in (one, other):
        made.add(last)
    for key, array in one.arrays().items():
        np.testing.assert_array_equal(other.arrays()[key], array)
    empty = Interpolation()
    empty.restore(*Interpolation().snapshot())
    assert len(empty.arrays()["sets"]) == 0
