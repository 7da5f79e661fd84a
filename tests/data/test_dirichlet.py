"""Class skew against published counts, and partitions that must come about whatever delta is."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta_flwr.data.dirichlet import class_shares, disjoint, overlapping

#: CIFAR-10's test part has 1,000 samples of each class; which ones does not matter to the counts
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 1000))

#: pFedBBN, delta = 0.01: client -> {class: samples}
PUBLISHED = [
    {0: 266, 4: 2, 5: 447, 8: 285}, {6: 1000}, {0: 1000}, {4: 853, 5: 10, 8: 137}, {0: 96, 8: 904},
    {1: 5, 2: 68, 6: 927}, {2: 399, 8: 1, 9: 600}, {9: 1000}, {8: 999, 9: 1}, {7: 1000},
]  # fmt: skip
#: samples of each class in a round, all clients together
ROUNDS = [
    [496, 5, 268, 0, 200, 0, 327, 200, 304, 200],
    [266, 0, 199, 0, 202, 132, 400, 200, 401, 200],
    [200, 0, 0, 0, 200, 200, 400, 200, 400, 400],
    [200, 0, 0, 0, 200, 115, 400, 200, 485, 400],
    [200, 0, 0, 0, 53, 10, 400, 200, 736, 401],
]


def published(delta: float = 0.01) -> list[np.ndarray]:
    return overlapping(LABELS, delta=delta, clients=10, samples=1000, classes=10, seed=1)


def counts(partition: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.bincount(LABELS[rows], minlength=10) for rows in partition])


def test_the_published_matrix_of_counts() -> None:
    expected = np.zeros((10, 10), int)
    for client, row in enumerate(PUBLISHED):
        for k, number in row.items():
            expected[client, k] = number
    np.testing.assert_array_equal(counts(published()), expected)


def test_the_published_totals_of_the_five_rounds() -> None:
    for r, expected in enumerate(ROUNDS):
        total = sum(np.bincount(LABELS[rows[200 * r : 200 * (r + 1)]], minlength=10) for rows in published())
        assert total.tolist() == expected


def test_the_published_totals() -> None:
    assert counts(published()).sum(axis=0).tolist() == [1362, 5, 467, 0, 855, 457, 1927, 1000, 2326, 1601]
    assert counts(published(0.005)).sum(axis=0).tolist() == [1212, 0, 312, 0, 975, 569, 1995, 1000, 2244, 1693]
    assert (counts(published(0.1)).sum(axis=0) > 0).all()


def test_samples_of_a_class_are_drawn_with_replacement_only_where_there_are_too_few() -> None:
    few = np.repeat(np.arange(100), 100)  # CIFAR-100: 100 of each
    partition = overlapping(few, delta=0.01, clients=10, samples=1000, classes=100, seed=1)
    for rows in partition:
        assert len(rows) == 1000
        for k, number in enumerate(np.bincount(few[rows], minlength=100)):
            distinct = len(np.unique(rows[few[rows] == k]))
            assert distinct == number if number <= 100 else distinct < number


@pytest.mark.parametrize(("delta", "present"), [(0.005, 32), (0.01, 49), (0.1, 98)])
def test_classes_that_occur_in_cifar100(delta: float, present: int) -> None:
    labels = np.repeat(np.arange(100), 100)
    partition = overlapping(labels, delta=delta, clients=10, samples=1000, classes=100, seed=1)
    assert len(np.unique(labels[np.concatenate(partition)])) == present


@pytest.mark.parametrize("delta", [1e-300, 1e-6, 1e-3, 0.01])
@pytest.mark.parametrize("sampler", [overlapping, disjoint])
def test_a_tiny_delta_and_many_clients_end_within_seconds(sampler, delta: float) -> None:
    began = time.perf_counter()
    partition = sampler(LABELS, delta=delta, clients=100, samples=100, classes=10, seed=1)
    assert time.perf_counter() - began < 5
    assert [len(rows) for rows in partition] == [100] * 100


def test_shares_are_always_shares() -> None:
    shares, _ = class_shares(1e-300, 50, 10, 0)
    assert np.isfinite(shares).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert (np.sort(shares, axis=1)[:, -1] == 1).all()  # the limit: one class each
    assert len(np.unique(shares.argmax(axis=1))) > 5


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=2, max_size=6).filter(lambda sizes: sum(sizes) > 0),
    clients=st.integers(1, 12),
    delta=st.sampled_from([1e-9, 0.01, 0.5, 100.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_sample_is_given_twice(sizes: list[int], clients: int, delta: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    samples = len(labels) // clients
    partition = disjoint(labels, delta=delta, clients=clients, samples=samples, classes=len(sizes), seed=seed)
    assert [len(rows) for rows in partition] == [samples] * clients
    everything = np.concatenate(partition)
    assert len(np.unique(everything)) == len(everything) == samples * clients
    for rows in partition:
        assert (np.diff(labels[rows]) >= 0).all()


def test_two_partitions_of_half_the_data_each() -> None:
    """What a class that runs out did to others: 0 / 0, or no end."""
    for seed in range(20):
        partition = disjoint(LABELS, delta=0.05, clients=2, samples=5000, classes=10, seed=seed)
        assert sorted(np.concatenate(partition).tolist()) == list(range(10_000))


def test_a_large_delta_gives_nearly_equal_classes_and_a_small_one_few() -> None:
    equal = disjoint(LABELS, delta=1e4, clients=10, samples=500, classes=10, seed=3)
    assert abs(counts(equal) - 50).max() <= 5
    skewed = disjoint(LABELS, delta=0.01, clients=10, samples=500, classes=10, seed=3)
    assert (np.sort(counts(skewed), axis=1)[:, -2:].sum(axis=1) >= 450).all()


def test_more_than_there_is_cannot_be_shared_out() -> None:
    with pytest.raises(ValueError, match="3 clients x 4000 samples > 10000"):
        disjoint(LABELS, delta=1.0, clients=3, samples=4000, classes=10, seed=0)


def test_classes_without_samples_leave_every_client_its_number() -> None:
    labels = np.array([1, 1, 3, 3, 3])
    for sampler in (overlapping, disjoint):
        partition = sampler(labels, delta=0.1, clients=2, samples=2, classes=6, seed=1)
        assert [len(rows) for rows in partition] == [2, 2]
