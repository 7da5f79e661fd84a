"""Accuracies against sums by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta_flwr.reports.scoreboard import Scoreboard
from fedtta_flwr.strategies.rounds import Counts


def counts(
    client: str, domain: str, seen: list[int], correct: list[int], score: str = "pre", number: int = 1
) -> Counts:
    return Counts(number, client, domain, score, np.array(seen, np.int64), np.array(correct, np.int64))


def test_accuracies_in_percent() -> None:
    board = Scoreboard()
    board.add([counts("a", "fog", [4, 0, 6], [1, 0, 6]), counts("b", "snow", [0, 0, 10], [0, 0, 5])])
    board.add([counts("a", "snow", [2, 0, 0], [2, 0, 0], number=2), counts("a", "fog", [2, 0, 0], [0, 0, 0], number=3)])
    found = board.accuracy("pre")
    assert found is not None
    assert found["micro"] == pytest.approx(100 * 14 / 24)
    assert found["macro"] == pytest.approx(100 * (3 / 8 + 11 / 16) / 2)  # class 1 never occurred
    assert found["macro_all_classes"] == pytest.approx(100 * (3 / 8 + 11 / 16) / 3)
    assert found["per_corruption"] == {"fog": pytest.approx(100 * 7 / 12), "snow": pytest.approx(100 * 7 / 12)}
    assert found["per_corruption_mean_clients"] == {"fog": pytest.approx(100 * 7 / 12), "snow": pytest.approx(75.0)}
    assert found["mean_clients"] == pytest.approx((100 * 7 / 12 + 75) / 2)
    assert found["per_corruption_macro_all_classes"]["fog"] == pytest.approx(100 * (1 / 6 + 1) / 3)
    assert found["per_client"] == {"a": pytest.approx(100 * 9 / 14), "b": pytest.approx(50.0)}
    alone = {"a": pytest.approx(100 * (3 / 8 + 1) / 3), "b": pytest.approx(100 * (1 / 2) / 3)}
    assert found["per_client_macro_all_classes"] == alone
    assert found["per_class"] == {"seen": [8, 0, 16], "correct": [3, 0, 11]}
    assert all(type(found[key]) is float for key in ("micro", "macro", "macro_all_classes", "mean_clients"))


def test_major_and_minor_classes_are_each_clients_own() -> None:
    """pFedBBN, Figures 4 and 10: by the counts of its whole stream; 'c' and 'd' have neither."""
    board = Scoreboard(["fog", "snow"])
    board.add([counts("a", "fog", [4, 0, 1, 3], [1, 0, 1, 0]), counts("a", "snow", [6, 0, 0, 5], [6, 0, 0, 0])])
    board.add([counts("b", "fog", [0, 0, 8, 2], [0, 0, 2, 1]), counts("b", "snow", [2, 0, 0, 0], [1, 0, 0, 0])])
    board.add([counts("c", "fog", [0, 9, 0, 0], [0, 9, 0, 0]), counts("d", "fog", [3, 3, 0, 0], [3, 3, 0, 0])])
    assert board.accuracy("pre")["major_minor"] == {  # type: ignore[index]
        "classes": {"a": [0, 2], "b": [2, 0]},  # b has 2 of class 0 and 2 of class 3: the first
        "per_client": {"a": [70.0, 100.0], "b": [25.0, 50.0]},
        "per_corruption": {"fog": [25.0, 100.0], "snow": [100.0, 50.0]},  # fog: a and b, a; snow: a, b
    }
    board = Scoreboard()
    board.add([counts("a", "fog", [4, 4], [1, 2]), counts("b", "fog", [0, 3], [0, 3])])
    balanced = {"classes": {}, "per_client": {}, "per_corruption": {"fog": [None, None]}}
    assert board.accuracy("pre")["major_minor"] == balanced  # type: ignore[index]


def test_scores_are_kept_apart() -> None:
    board = Scoreboard()
    board.add([counts("a", "fog", [2], [2], "pre"), counts("a", "fog", [2], [0], "post")])
    assert board.scores() == {"pre", "post"}
    assert board.accuracy("pre")["micro"] == 100.0  # type: ignore[index]
    assert board.accuracy("post")["micro"] == 0.0  # type: ignore[index]


def test_an_absent_score_is_none_not_zero() -> None:
    board = Scoreboard()
    assert board.accuracy("pre") is None
    assert board.scores() == set()
    assert board.domains() == []
    board.add([counts("a", "fog", [2], [0], "post")])
    assert board.accuracy("pre") is None
    assert board.accuracy("post") is not None


def test_clients_are_in_the_order_of_their_names() -> None:
    board = Scoreboard()
    board.add([counts(client, "fog", [1], [1]) for client in "cab"])
    assert list(board.accuracy("pre")["per_client"]) == ["a", "b", "c"]  # type: ignore[index]


def test_domains_are_named_once_in_the_order_of_the_run() -> None:
    board = Scoreboard(["none", "snow", "frost", "fog"])
    board.add([counts(c, d, [1], [1], s) for d in ("snow", "fog") for c in "ab" for s in ("pre", "post")])
    assert board.domains() == ["snow", "fog"]
    board.add([counts("a", "none", [1], [1], "pre"), counts("a", "other", [1], [1], "pre")])
    assert board.domains() == ["none", "snow", "fog", "other"]
    assert list(board.accuracy("pre")["per_corruption"]) == board.domains()  # type: ignore[index]


def test_what_was_added_is_not_changed() -> None:
    first = counts("a", "fog", [2, 1], [1, 1])
    board = Scoreboard()
    board.add([first, first])
    board.add([first])
    assert first.seen.tolist() == [2, 1]
    assert board.accuracy("pre")["micro"] == pytest.approx(100 * 2 / 3)  # type: ignore[index]


entry = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from(["fog", "snow"]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3),
).filter(lambda e: sum(seen for seen, _ in e[2]) > 0)


@given(st.lists(entry, min_size=1, max_size=10))
def test_any_counts(entries: list[tuple[str, str, list[tuple[int, int]]]]) -> None:
    board = Scoreboard()
    samples = []  # one (client, domain, class, right) a sample
    for client, domain, classes in entries:
        seen, correct = [s for s, _ in classes], [min(s, c) for s, c in classes]
        board.add([counts(client, domain, seen, correct)])
        for k, (s, c) in enumerate(zip(seen, correct, strict=True)):
            samples += [(client, domain, k, i < c) for i in range(s)]
    found = board.accuracy("pre")
    assert found is not None

    def share(chosen: list[tuple[str, str, int, bool]]) -> float:
        return 100 * sum(right for *_, right in chosen) / len(chosen)

    assert found["micro"] == pytest.approx(share(samples))
    per_class = [share([s for s in samples if s[2] == k]) for k in range(3) if any(s[2] == k for s in samples)]
    assert found["macro"] == pytest.approx(sum(per_class) / len(per_class))
    assert found["macro_all_classes"] == pytest.approx(sum(per_class) / 3)
    means = []
    for name, value in found["per_corruption_mean_clients"].items():
        there = {s[0] for s in samples if s[1] == name}
        means.append(sum(share([s for s in samples if s[:2] == (who, name)]) for who in there) / len(there))
        assert value == pytest.approx(means[-1])
    assert found["mean_clients"] == pytest.approx(sum(means) / len(means))
    for name, value in found["per_corruption_macro_all_classes"].items():
        under = [s for s in samples if s[1] == name]
        of_class = [share([s for s in under if s[2] == k]) for k in {s[2] for s in under}]
        assert value == pytest.approx(sum(of_class) / 3)
    for group, place in (("per_client", 0), ("per_corruption", 1)):
        assert set(found[group]) == {s[place] for s in samples}
        for name, value in found[group].items():
            assert value == pytest.approx(share([s for s in samples if s[place] == name]))
