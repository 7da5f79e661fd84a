"""timeline.npz against counts by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedtta_flwr.config import SCORES
from fedtta_flwr.reports.timeline import FILE, Timeline
from fedtta_flwr.strategies.rounds import Counts, Round

CLIENTS = ("a", "b", "c")


def counts(number: int, client: str, score: str, seen: int, correct: int, domain: str = "fog") -> Counts:
    return Counts(number, client, domain, score, np.array([seen - 1, 1]), np.array([correct, 0]))


def first() -> Round:
    return Round(
        1,
        domains={"a": frozenset({"fog", "snow"}), "b": frozenset({"snow"}), "c": frozenset()},
        confidence={"a": 0.75, "b": 0.5},
        counts=[counts(1, "a", "pre", 5, 2), counts(1, "a", "pre", 3, 1, "snow"), counts(1, "b", "pre", 4, 0, "snow")],
    )


def second() -> Round:
    """With the `post` of round 1; c is there for the first time, without labels, b is not."""
    return Round(
        2,
        domains={"a": frozenset({"snow"}), "c": frozenset({"none"})},
        confidence={"c": 0.25},
        counts=[
            counts(2, "a", "pre", 6, 3, "snow"),
            counts(1, "a", "post", 5, 4),
            counts(1, "b", "post", 4, 1, "snow"),
        ],
    )


def test_who_replies_first_changes_nothing(tmp_path: Path) -> None:
    there, back = first(), first()
    back.domains = dict(reversed(back.domains.items()))
    for name, round_ in (("there", there), ("back", back)):
        timeline = Timeline(CLIENTS)
        timeline.add(round_)
        (tmp_path / name).mkdir()
        timeline.write(tmp_path / name)
    assert (tmp_path / "there" / FILE).read_bytes() == (tmp_path / "back" / FILE).read_bytes()


def closing() -> Round:
    return Round(3, closing=True, counts=[counts(2, "a", "post", 6, 5, "snow")])


def test_whose_what_when(tmp_path: Path) -> None:
    timeline = Timeline(CLIENTS)
    for round_ in (first(), second(), closing()):
        timeline.add(round_)
    timeline.write(tmp_path)
    with np.load(tmp_path / FILE, allow_pickle=False) as file:
        assert file["rounds"].tolist() == [1, 2]
        assert file["clients"].tolist() == list(CLIENTS)
        assert file["scores"].tolist() == ["pre", "post"]
        names = file["domains"].tolist()
        assert [[names[i] if i >= 0 else None for i in row] for row in file["domain"]] == [
            ["fog", "snow", None],
            ["snow", None, "none"],
        ]
        assert file["seen"].tolist() == [[[8, 4, 0], [6, 0, 0]], [[5, 4, 0], [6, 0, 0]]]
        assert np.array_equal(file["confidence"], [[0.75, 0.5, np.nan], [np.nan, np.nan, 0.25]], equal_nan=True)
        assert file["correct"].tolist() == [[[3, 0, 0], [3, 0, 0]], [[4, 1, 0], [5, 0, 0]]]


def test_the_corruption_of_most_samples_whatever_has_its_post_score_by_now(tmp_path: Path) -> None:
    """Two slots in a visit: of the last, `post` comes a round later."""
    seen = [("pre", 10, "day"), ("tta", 10, "day"), ("post", 10, "day"), ("pre", 15, "night"), ("tta", 15, "night")]
    timeline = Timeline(CLIENTS)
    both = {"a": frozenset({"day", "night"})}
    timeline.add(Round(1, domains=both, counts=[counts(1, "a", s, n, 2, domain=d) for s, n, d in seen]))
    arrays = timeline.arrays()
    assert arrays["domains"][arrays["domain"][0, 0]] == "night"


def test_what_an_earlier_version_has_kept_goes_on() -> None:
    """It did not look at the confidence."""
    before, after = Timeline(CLIENTS), Timeline(CLIENTS)
    before.add(first())
    tensors, domains = before.snapshot()
    after.restore({key: t for key, t in tensors.items() if key != "confidence"}, domains)
    for timeline in (before, after):
        timeline.add(second())
    expected, found = before.arrays(), after.arrays()
    assert np.isnan(found.pop("confidence")[0]).all()
    assert np.array_equal(expected.pop("confidence"), [[0.75, 0.5, np.nan], [np.nan, np.nan, 0.25]], equal_nan=True)
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array)


def test_accuracy_of_a_round_with_what_came_later(tmp_path: Path) -> None:
    timeline = Timeline(CLIENTS)
    timeline.add(first())
    assert timeline.accuracy(1) == {"pre": 100 * 3 / 12}
    timeline.add(second())
    assert timeline.accuracy(1) == {"pre": 100 * 3 / 12, "post": 100 * 5 / 9}
    assert timeline.accuracy(2) == {"pre": 100 * 3 / 6}
    assert timeline.accuracy(3) == {}


def test_a_run_without_rounds_has_a_file_too(tmp_path: Path) -> None:
    Timeline(CLIENTS).write(tmp_path)
    with np.load(tmp_path / FILE, allow_pickle=False) as file:
        assert {key: file[key].shape for key in file.files} == {
            "rounds": (0,),
            "clients": (3,),
            "scores": (0,),
            "domains": (0,),
            "domain": (0, 3),
            "seen": (0, 0, 3),
            "correct": (0, 0, 3),
            "confidence": (0, 3),
        }


def test_without_labels_there_are_rounds_and_no_counts() -> None:
    timeline = Timeline(CLIENTS)
    timeline.add(Round(1, domains={"a": frozenset({"live"})}))
    assert timeline.snapshot()[0]["counts"].numel() == 0
    assert timeline.arrays()["domain"].tolist() == [[0, -1, -1]]
    assert timeline.arrays()["seen"].shape == (0, 1, 3)


def test_every_slot_may_have_a_name_of_its_own() -> None:
    """As of a stream of one's own that names its slots by the hour."""
    clients = tuple(f"client-{i}" for i in range(40_000))
    timeline, again = Timeline(clients), Timeline(clients)
    timeline.add(Round(1, domains={client: frozenset({f"of {client}"}) for client in clients}))
    again.restore(*timeline.snapshot())
    for arrays in (timeline.arrays(), again.arrays()):
        assert arrays["domains"][arrays["domain"][0]].tolist() == [f"of {client}" for client in clients]


def test_it_goes_on_from_a_snapshot_as_if_nothing_had_been() -> None:
    whole, before, after = Timeline(CLIENTS), Timeline(CLIENTS), Timeline(CLIENTS)
    before.add(first())
    after.restore(*before.snapshot())
    before.add(second())  # what happened after the snapshot is gone
    for timeline in (whole, after):
        for round_ in (first(), second(), closing())[timeline is after :]:
            timeline.add(round_)
    for key, array in whole.arrays().items():
        np.testing.assert_array_equal(array, after.arrays()[key], err_msg=key)


def test_a_real_run_agrees_with_its_summary(run_local: Callable[..., Any]) -> None:
    run = run_local()
    with np.load(run.path / FILE, allow_pickle=False) as file:
        assert file["scores"].tolist() == [s for s in SCORES if s in run.summary["accuracy"]]
        for score, seen, correct in zip(file["scores"], file["seen"], file["correct"], strict=True):
            accuracy = run.summary["accuracy"][str(score)]
            assert 100 * correct.sum() / seen.sum() == accuracy["micro"]
            per_client = dict(zip(file["clients"].tolist(), 100 * correct.sum(axis=0) / seen.sum(axis=0), strict=True))
            assert per_client == accuracy["per_client"]
            for index, name in enumerate(file["domains"].tolist()):
                there = file["domain"] == index
                assert 100 * correct[there].sum() / seen[there].sum() == accuracy["per_corruption"][name]
