"""Streams: the schedule of the published protocol, and who draws which samples."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.corruptions import CORRUPTIONS
from fedtta_flwr.data.datasets import open_test_set
from fedtta_flwr.data.digits import test_part as digits_test_part
from fedtta_flwr.data.streams import Stream, corruption_of, group_of, make_stream, position_schedule
from fedtta_flwr.errors import ConfigError

PAPER: dict[str, Any] = {
    "num-clients": 20,
    "batch-size": 10,
    "corruptions": ",".join(CORRUPTIONS),
    "slots-per-corruption": 50,
    "shift-length": 50,
    "spatial-heterogeneity": 0.2,
}
DIGITS = open_test_set("digits", "", 0)


def streams(**overrides: Any) -> dict[str, Stream]:
    config = RunConfig.from_flat(PAPER | overrides)
    return {name: make_stream(config, name, DIGITS) for name in config.client_names()}


def stream(client: str = "client-00", **overrides: Any) -> Stream:
    return make_stream(RunConfig.from_flat(PAPER | overrides), client, DIGITS)


@given(positions=st.integers(1, 6), slots=st.integers(1, 20), shift=st.integers(1, 25))
def test_the_schedule_takes_a_run_of_each_position_in_turn(positions: int, slots: int, shift: int) -> None:
    left, expected = [slots] * positions, []
    while any(left):
        for position in range(positions):
            for _ in range(shift):
                if left[position]:
                    left[position] -= 1
                    expected.append(position)
    assert position_schedule(positions, slots, shift) == expected


@pytest.mark.parametrize(("shift", "heterogeneity"), [(50, 0.02), (10, 0.1), (1, 1.0)])
def test_temporal_heterogeneity_is_one_over_the_run_length(shift: int, heterogeneity: float) -> None:
    for own in streams(**{"shift-length": shift}).values():
        runs = [len(list(group)) for _, group in itertools.groupby(own.domains)]
        assert set(runs) == {shift}
        assert 1 / np.mean(runs) == pytest.approx(heterogeneity)
        assert len(own) == 750
        assert Counter(own.domains) == dict.fromkeys(CORRUPTIONS, 50)


def test_a_last_run_may_be_shorter() -> None:
    runs = [len(list(group)) for _, group in itertools.groupby(stream(**{"shift-length": 20}).domains)]
    assert runs == [20] * 30 + [10] * 15


def test_four_groups_of_five_start_at_0_4_8_12() -> None:
    every = streams()
    assert [own.group for own in every.values()] == [k // 5 for k in range(20)]
    for k, own in enumerate(every.values()):
        for position in range(15):
            assert own.domains[50 * position] == CORRUPTIONS[(position + 4 * (k // 5)) % 15]


def test_iid_is_one_group_that_sees_the_order_as_given() -> None:
    every = streams(**{"spatial-heterogeneity": 0.05})
    assert {own.group for own in every.values()} == {0}
    assert {own.domains for own in every.values()} == {tuple(c for c in CORRUPTIONS for _ in range(50))}


def test_full_heterogeneity_is_one_group_a_client() -> None:
    every = streams(**{"spatial-heterogeneity": 1.0, "num-clients": 15})
    assert [own.group for own in every.values()] == list(range(15))
    assert [own.domains[0] for own in every.values()] == list(CORRUPTIONS)


@given(st.integers(1, 60), st.integers(1, 60))
def test_groups_are_contiguous_and_of_equal_size_up_to_one(clients: int, groups: int) -> None:
    groups = min(clients, groups)
    of = [group_of(k, clients, groups) for k in range(clients)]
    assert of == sorted(of)
    sizes = Counter(of)
    assert set(sizes) == set(range(groups))
    assert max(sizes.values()) - min(sizes.values()) <= 1


@given(st.integers(1, 19), st.integers(1, 30))
def test_every_group_sees_every_corruption_once(corruptions: int, groups: int) -> None:
    for group in range(groups):
        seen = [corruption_of(position, group, corruptions, groups) for position in range(corruptions)]
        assert sorted(seen) == list(range(corruptions))
    if groups <= corruptions:  # no two groups see the same at once
        assert len({corruption_of(0, group, corruptions, groups) for group in range(groups)}) == groups


@pytest.mark.parametrize("shift", [50, 7])
def test_a_client_sees_the_same_samples_in_the_same_order_under_each_corruption(shift: int) -> None:
    own = stream("client-07", **{"shift-length": shift})
    rows: dict[str, list[int]] = {}
    for domain, batch in zip(own.domains, own.rows, strict=True):
        rows.setdefault(domain, []).extend(batch.tolist())
    first = rows[CORRUPTIONS[0]]
    assert len(first) == len(set(first)) == 500  # without replacement
    assert all(0 <= row < 797 for row in first)
    assert all(other == first for other in rows.values())


def test_clients_draw_independently() -> None:
    every = streams()
    drawn = [frozenset(np.concatenate(own.rows[:50]).tolist()) for own in every.values()]
    assert len(set(drawn)) == 20
    overlaps = [len(a & b) for a, b in itertools.combinations(drawn, 2)]
    assert np.mean(overlaps) == pytest.approx(500 * 500 / 797, rel=0.02)  # hypergeometric mean
    order = np.corrcoef([np.concatenate(own.rows[:50]) for own in every.values()])
    assert abs(order[~np.eye(20, dtype=bool)]).max() < 5 / math.sqrt(500)


@pytest.mark.parametrize("override", [{"num-clients": 5}, {"spatial-heterogeneity": 1.0}, {"corruptions": "fog"}])
def test_a_client_draws_the_same_whoever_else_there_is(override: dict[str, Any]) -> None:
    own, other = stream("client-03"), stream("client-03", **override)
    assert all((a == b).all() for a, b in zip(own.rows[:50], other.rows[:50], strict=True))


def test_another_seed_draws_other_samples() -> None:
    assert (stream().rows[0] != stream(seed=1).rows[0]).any()


def test_all_samples_with_a_last_batch_that_is_smaller() -> None:
    own = stream(**{"slots-per-corruption": 0, "corruptions": "fog,snow", "shift-length": 100})
    assert len(own) == 2 * 80
    assert [len(rows) for rows in own.rows[:80]] == [10] * 79 + [7]
    assert sorted(np.concatenate(own.rows[:80])) == list(range(797))
    assert len(own.batch(79)[0]) == 7


@pytest.mark.parametrize(
    ("batch", "slots"), [(798, 1), (798, 0), (65_536, 0), (400, 2), (1, 798), (10, 80)], ids=lambda v: str(v)
)
def test_more_samples_than_there_are(batch: int, slots: int) -> None:
    with pytest.raises(ConfigError) as caught:
        stream(**{"batch-size": batch, "slots-per-corruption": slots})
    text = str(caught.value)
    assert "\n" not in text
    assert f"batch-size = {batch}" in text
    assert "at most 797" in text


@pytest.mark.parametrize(
    ("batch", "slots", "length"), [(797, 1, 1), (797, 0, 1), (1, 797, 797), (1, 0, 797), (398, 2, 2)]
)
def test_as_many_samples_as_there_are(batch: int, slots: int, length: int) -> None:
    own = stream(**{"batch-size": batch, "slots-per-corruption": slots, "corruptions": "fog"})
    assert len(own) == length
    assert {len(rows) for rows in own.rows} == {batch}


def test_a_client_of_another_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"client-20.*client-00 to client-19") as caught:
        stream("client-20")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_batch_holds_the_images_and_labels_of_its_rows(batch: int) -> None:
    own = stream(**{"batch-size": batch, "slots-per-corruption": 2, "corruptions": "none,contrast", "shift-length": 2})
    images, labels = digits_test_part()
    x, y = own.batch(1)
    assert x.shape == (batch, 3, 32, 32)
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert y is not None
    assert y.tolist() == labels[own.rows[1]].tolist()
    for i, row in enumerate(own.rows[1]):
        expected = images[row].astype(np.float64).transpose(2, 0, 1) / 255
        assert np.abs(x[i].numpy() - expected).max() < 1e-6
    x.zero_()  # a batch is the caller's own
    assert own.batch(1)[0].max() > 0.5
    corrupted, _ = own.batch(2)
    assert own.domains[2] == "contrast"
    assert corrupted.std() < 0.5 * own.batch(0)[0].std()
