"""Streams beyond the default: who draws what, group orders, mixed domains, gradual severity."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.corruptions import CORRUPTIONS, corrupt
from fedtta_flwr.data.datasets import Corruptible, open_test_set
from fedtta_flwr.data.dirichlet import overlapping
from fedtta_flwr.data.orders import parse_group_orders
from fedtta_flwr.data.streams import Stream, gradual_severities, make_stream
from fedtta_flwr.errors import ConfigError

CHEAP = ("contrast", "brightness", "saturate")
N = 60
RNG = np.random.default_rng(1)
IMAGES = RNG.integers(0, 256, (N, 32, 32, 3), dtype=np.uint8)
SET = Corruptible(IMAGES, RNG.permutation(np.arange(N) % 5), 5, seed=0)
SMALL: dict[str, Any] = {
    "num-clients": 4,
    "batch-size": 5,
    "corruptions": ",".join(CHEAP),
    "slots-per-corruption": 3,
    "shift-length": 3,
    "spatial-heterogeneity": 0.25,
}


class Labels:
    """A large test set of which only labels are looked at."""

    def __init__(self, labels: Any, classes: int) -> None:
        self.labels, self.classes = labels, classes

    def images(self, corruption: str, severity: int) -> Any:
        raise AssertionError


CIFAR = Labels(np.random.default_rng(2).permutation(np.repeat(np.arange(10), 1000)), 10)


def streams(source: Any = SET, **overrides: Any) -> list[Stream]:
    config = RunConfig.from_flat(SMALL | {key.replace("_", "-"): value for key, value in overrides.items()})
    return [make_stream(config, name, source) for name in config.client_names()]


def samples(stream: Stream) -> Any:
    """A client's samples under the corruption that it meets first, in stream order."""
    return np.concatenate([r for r, d in zip(stream.rows, stream.domains, strict=True) if d == stream.domains[0]])


def refused(*words: str, source: Any = SET, **overrides: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        streams(source, **overrides)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- sampling


def test_disjoint_clients_share_no_sample() -> None:
    every = [samples(stream) for stream in streams(sampling="disjoint")]
    assert [len(np.unique(own)) for own in every] == [15] * 4
    assert len(np.unique(np.concatenate(every))) == 60
    overlap = [samples(stream) for stream in streams()]
    assert len(np.unique(np.concatenate(overlap))) < 60


def test_disjoint_all_samples_are_the_clients_equal_shares() -> None:
    every = streams(sampling="disjoint", slots_per_corruption=0, num_clients=7, batch_size=3)
    assert [len(samples(own)) for own in every] == [8] * 7
    assert [[len(r) for r in own.rows[:3]] for own in every] == [[3, 3, 2]] * 7


def test_twenty_clients_of_five_hundred_use_all_of_cifar10() -> None:
    every = streams(CIFAR, sampling="disjoint", num_clients=20, batch_size=10, slots_per_corruption=50)
    assert sorted(np.concatenate([samples(own) for own in every]).tolist()) == list(range(10_000))


def test_more_than_there_is_cannot_be_disjoint() -> None:
    refused("sampling = 'disjoint'", "4 clients x 20", "at most 15", sampling="disjoint", slots_per_corruption=4)
    refused("at most 0", sampling="disjoint", slots_per_corruption=0, num_clients=61)
    refused("class-skew = 0.5", "at most 15", sampling="disjoint", class_skew=0.5, slots_per_corruption=4)


def drawn(**overrides: Any) -> list[list[int]]:
    return [samples(stream).tolist() for stream in streams(**overrides)]


def classes_of(every: list[list[int]]) -> list[list[int]]:
    return [SET.labels[own].tolist() for own in every]


def test_the_seed_decides_samples_but_not_the_class_skew() -> None:
    assert drawn() != drawn(seed=1)
    assert drawn(sampling="disjoint") != drawn(sampling="disjoint", seed=1)
    for sampling in ("fling-iid", "disjoint"):
        skewed = {"class_skew": 0.1, "stream_order": "class-sorted", "sampling": sampling}
        seeds = [drawn(**skewed, seed=seed) for seed in (0, 1, 2)]
        assert seeds[0] != seeds[1] != seeds[2] != seeds[0]
        assert classes_of(seeds[0]) == classes_of(seeds[1]) == classes_of(seeds[2])
        assert classes_of(drawn(**skewed, class_skew_seed=2)) != classes_of(seeds[0])
        assert drawn(**skewed, seed=1) == seeds[1]
    assert len(set(itertools.chain(*seeds[1]))) == sum(map(len, seeds[1]))  # disjoint still


def test_the_samples_of_seed_0_are_the_published_ones() -> None:
    partition = overlapping(SET.labels, delta=0.1, clients=4, samples=15, classes=5, seed=1)
    assert drawn(class_skew=0.1, stream_order="class-sorted") == [own.tolist() for own in partition]


def test_class_sorted_and_shuffled_have_the_same_samples() -> None:
    for options in ({}, {"sampling": "disjoint"}, {"class_skew": 0.2}, {"class_skew": 0.2, "sampling": "disjoint"}):
        for plain, ordered in zip(streams(**options), streams(stream_order="class-sorted", **options), strict=True):
            assert sorted(samples(plain)) == sorted(samples(ordered))
            assert (np.diff(SET.labels[samples(ordered)]) >= 0).all()
    assert any((np.diff(SET.labels[samples(own)]) < 0).any() for own in streams())


def test_the_published_rounds_of_pfedbbn_come_out_of_the_run_config() -> None:
    every = streams(
        CIFAR,
        num_clients=10,
        batch_size=200,
        corruptions=",".join(CORRUPTIONS),
        slots_per_corruption=5,
        shift_length=5,
        spatial_heterogeneity=0.1,
        class_skew=0.01,
        stream_order="class-sorted",
    )
    assert {len(own) for own in every} == {75}
    totals = [
        sum(np.bincount(CIFAR.labels[own.rows[slot]], minlength=10) for own in every).tolist() for slot in range(75)
    ]
    assert totals[:5] * 15 == totals
    assert totals[0] == [496, 5, 268, 0, 200, 0, 327, 200, 304, 200]
    assert totals[4] == [200, 0, 0, 0, 53, 10, 400, 200, 736, 401]


def test_a_stream_depends_on_nothing_but_config_and_client() -> None:
    for options in ({"class_skew": 0.1}, {"mixed_domains": True}, {"sampling": "disjoint"}):
        forwards, again = streams(**options), streams(**options)[::-1][::-1]
        for a, b in zip(forwards, again, strict=True):
            assert a.domains == b.domains
            assert all((x == y).all() for x, y in zip(a.rows, b.rows, strict=True))


# ------------------------------------------------------------------------------------------------------------ orders


def test_the_case_study_of_fedtsa() -> None:
    every = streams(
        CIFAR,
        num_clients=10,
        corruptions=",".join(CORRUPTIONS),
        slots_per_corruption=2,
        shift_length=2,
        group_orders="4:+0,3:+1,3:reverse",
    )
    first = list(CORRUPTIONS)
    expected = [first] * 4 + [first[1:] + first[:1]] * 3 + [first[::-1]] * 3
    assert [[domain for domain, _ in itertools.groupby(own.domains)] for own in every] == expected
    assert [own.group for own in every] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_case_study_of_fedctta_starts_at_glass_and_wraps() -> None:
    own = streams(CIFAR, num_clients=10, corruptions=",".join(CORRUPTIONS), group_orders="4:+0,3:+4,3:reverse")[4]
    assert [own.domains[0], own.domains[-1]] == ["glass_blur", "defocus_blur"]


def test_a_random_order_is_each_clients_own() -> None:
    every = streams(CIFAR, num_clients=10, corruptions=",".join(CORRUPTIONS), group_orders="10:random")
    orders = [tuple(domain for domain, _ in itertools.groupby(own.domains)) for own in every]
    assert len(set(orders)) == 10
    assert all(sorted(order) == sorted(CORRUPTIONS) for order in orders)


@pytest.mark.parametrize("text", ["4", "4:", ":+1", "4:+", "4:-1", "4:1", "0:+1,4:+0", "4:backwards", "4:+0,,", "4;+0"])
def test_orders_that_are_not_understood(text: str) -> None:
    refused(f"group-orders = {text!r}", "COUNT:ORDER", group_orders=text)


def test_orders_are_for_exactly_all_clients() -> None:
    refused("for 3 clients", "num-clients = 4", group_orders="2:+0,1:reverse")
    assert parse_group_orders("") == parse_group_orders("  ") == ()


# --------------------------------------------------------------------------------------------------- mixed and gradual


def test_every_mixed_batch_holds_all_corruptions_evenly() -> None:
    for own in streams(mixed_domains=True, batch_size=6, slots_per_corruption=2, num_clients=2):
        assert own.domains == ("mixed",) * 6
        for names in own.mixture:
            assert sorted(names) == sorted(CHEAP * 2)
        seen = {name: [] for name in CHEAP}
        for rows, names in zip(own.rows, own.mixture, strict=True):
            for row, name in zip(rows, names, strict=True):
                seen[name].append(int(row))
        assert sorted(seen["contrast"]) == sorted(seen["saturate"]) == sorted(seen["brightness"])
        assert len(set(seen["contrast"])) == 12
        assert seen["contrast"] != seen["saturate"]


def test_mixed_images_are_those_of_their_corruption() -> None:
    own = streams(mixed_domains=True)[0]
    x, labels = own.batch(1)
    assert labels is not None
    for i, (row, name) in enumerate(zip(own.rows[1], own.mixture[1], strict=True)):
        expected = corrupt(IMAGES[row : row + 1], name, 5, seed=0, indices=[int(row)])[0]
        np.testing.assert_array_equal((x[i] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy(), expected)
        assert labels[i] == SET.labels[row]


def test_mixed_and_class_sorted() -> None:
    own = streams(mixed_domains=True, stream_order="class-sorted")[0]
    assert (np.diff(SET.labels[np.concatenate(own.rows)]) >= 0).all()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"corruptions": "fog"}, ["mixed-domains", "corruptions names 1"]),
        ({"batch_size": 2}, ["mixed-domains", "batch-size is 2"]),
        ({"group_orders": "4:+0"}, ["group-orders", "mixed-domains"]),
        ({"severity_schedule": "gradual"}, ["severity-schedule = 'gradual'", "mixed-domains"]),
    ],
)
def test_what_cannot_be_mixed(overrides: dict[str, Any], words: list[str]) -> None:
    refused(*words, mixed_domains=True, **overrides)


def test_clean_images_have_no_gradual_severity() -> None:
    refused("severity-schedule", "none", severity_schedule="gradual", corruptions="none")


@pytest.mark.parametrize(
    ("length", "peak", "expected"),
    [
        (9, 5, [1, 2, 3, 4, 5, 4, 3, 2, 1]),
        (10, 3, [1, 1, 2, 2, 3, 3, 2, 2, 1, 1]),
        (1, 5, [5]),
        (3, 5, [2, 5, 2]),
        (4, 1, [1, 1, 1, 1]),
    ],
)
def test_gradual_severity(length: int, peak: int, expected: list[int]) -> None:
    found = gradual_severities([0] * length + [1] * length, peak)
    assert found == expected * 2


@given(length=st.integers(1, 60), peak=st.integers(1, 5))
def test_gradual_severity_rises_and_falls_by_steps(length: int, peak: int) -> None:
    found = gradual_severities([7] * length, peak)
    top = found.index(max(found))
    assert found == found[::-1]
    assert found[: top + 1] == sorted(found[: top + 1])
    assert min(found) >= 1
    assert max(found) <= peak
    if length % 2 or length >= 2 * peak - 1:
        assert max(found) == peak
    if length >= 2 * peak - 1:
        assert max(abs(np.diff(found)), default=0) <= 1


def test_gradual_images_have_their_slots_severity() -> None:
    own = streams(severity_schedule="gradual", severity=3)[0]
    assert own.severities == (1, 3, 1) * 3
    x, _ = own.batch(1)
    rows = own.rows[1]
    expected = corrupt(IMAGES[rows], own.domains[1], 3, seed=0, indices=rows)
    np.testing.assert_array_equal((x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy(), expected)


def test_the_digits_can_do_it_all() -> None:
    digits = open_test_set("digits", "", 0)
    own = streams(digits, class_skew=0.1, sampling="disjoint", stream_order="class-sorted", severity_schedule="gradual")
    x, labels = own[3].batch(8)
    assert x.shape == (5, 3, 32, 32)
    assert labels is not None
    assert labels.shape == (5,)
