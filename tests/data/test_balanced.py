"""FedTHE's partition against plain loops over the same draws, and what must hold whatever is drawn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta_flwr.data.balanced import balanced_dirichlet
from fedtta_flwr.seeding import numpy_rng

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))


def oracle(labels: np.ndarray, alpha: float, clients: int, classes: int, seed: int) -> list[list[int]]:
    """Deal samples one by one: a client takes position j of a class if its cumulated share is the first beyond it."""
    rng = numpy_rng(seed, "balanced classes")
    order = [int(i) for i in rng.permutation(len(labels))]
    result: list[list[int]] = []
    first = 0
    while first < clients:
        number = min(10, clients - first)
        part = order[first * len(labels) // clients : (first + number) * len(labels) // clients]
        while True:
            hands: list[list[int]] = [[] for _ in range(number)]
            for k in range(classes):
                own = [i for i in part if labels[i] == k]
                shares = rng.dirichlet([alpha] * number)
                shares = np.array(
                    [s if len(h) < len(part) / number else 0.0 for s, h in zip(shares, hands, strict=True)]
                )
                bounds = [int(np.floor(c * len(own))) for c in np.cumsum(shares / shares.sum())]
                bounds[-1] = len(own)
                for j, sample in enumerate(own):
                    client = next(c for c, bound in enumerate(bounds) if j < bound)
                    hands[client].append(sample)
            if min(len(h) for h in hands) >= len(part) // number // 2:
                break
        result += [sorted(h) for h in hands]
        for hand in hands:
            rng.permutation(hand)  # the order of its samples is drawn, too
        first += number
    return result


@pytest.mark.parametrize(("alpha", "clients"), [(0.1, 4), (0.1, 20), (1.0, 10), (1.0, 13), (100.0, 20)])
def test_it_deals_as_the_oracle_does(alpha: float, clients: int) -> None:
    found = balanced_dirichlet(LABELS, alpha=alpha, clients=clients, classes=10, seed=3)
    assert [sorted(rows.tolist()) for rows in found] == oracle(LABELS, alpha, clients, 10, 3)


@settings(deadline=None, max_examples=25)
@given(alpha=st.sampled_from([1e-4, 0.1, 1.0, 1e4]), clients=st.integers(1, 25), seed=st.integers(0, 1000))
def test_every_sample_goes_to_one_client_and_nobody_starves(alpha: float, clients: int, seed: int) -> None:
    found = balanced_dirichlet(LABELS, alpha=alpha, clients=clients, classes=10, seed=seed)
    assert len(found) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(len(LABELS)))
    assert min(len(rows) for rows in found) >= int(0.5 * (len(LABELS) // clients))


def test_a_small_alpha_gives_a_client_few_classes() -> None:
    def effective(alpha: float) -> float:
        """Mean over clients of exp(entropy of the classes)."""
        values = []
        for rows in balanced_dirichlet(LABELS, alpha=alpha, clients=20, classes=10, seed=1):
            p = np.bincount(LABELS[rows], minlength=10) / len(rows)
            values.append(np.exp(-(p[p > 0] * np.log(p[p > 0])).sum()))
        return float(np.mean(values))

    assert effective(0.1) < 4 < effective(1.0) < 8 < effective(1000.0)


def test_the_same_seed_deals_the_same_and_another_differently() -> None:
    first, again, other = (
        balanced_dirichlet(LABELS, alpha=1.0, clients=5, classes=10, seed=seed) for seed in (1, 1, 2)
    )
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first, other, strict=True))


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 samples cannot be dealt out to 3 clients"):
        balanced_dirichlet(np.array([0, 1]), alpha=1.0, clients=3, classes=2, seed=0)
