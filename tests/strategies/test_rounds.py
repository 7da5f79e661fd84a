"""What a round keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta_flwr.strategies.rounds import Round, busy_seconds


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0.0),
        ([(5.0, 7.0)], 2.0),
        ([(0.0, 2.0), (1.0, 3.0)], 3.0),
        ([(0.0, 10.0), (2.0, 3.0)], 10.0),
        ([(4.0, 5.0), (0.0, 1.0)], 2.0),
        ([(0.0, 1.0), (1.0, 2.0)], 2.0),
        ([(0.0, 1.0), (0.0, 1.0)], 1.0),
        ([(1.0, 1.0)], 0.0),
        ([(0.0, 10.0), (2.0, 3.0), (9.0, 12.0)], 12.0),
    ],
)
def test_busy_seconds_are_the_length_of_the_union(intervals: list[tuple[float, float]], length: float) -> None:
    assert busy_seconds(intervals) == pytest.approx(length)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_busy_seconds_count_every_covered_second_once(pairs: list[tuple[int, int]]) -> None:
    intervals = [(float(start), float(start + length)) for start, length in pairs]
    covered = {second for start, length in pairs for second in range(start, start + length)}
    assert busy_seconds(intervals) == len(covered)


def test_rounds_share_nothing() -> None:
    first = Round(1)
    first.counts.append(None)  # type: ignore[arg-type]
    first.missing["a"] = "gone"
    first.seconds["total"] = 1.0
    assert (Round(2).counts, Round(2).missing, Round(2).seconds) == ([], {}, {})
