"""The share of one class against its definition: sums that forget, written out sample by sample in numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtta_flwr.adaptation.collapse import WINDOW, has_collapsed, largest_share, no_predictions, predicted

CPU = torch.device("cpu")


def after(*batches: Tensor) -> Tensor:
    sums = no_predictions(batches[0].shape[1] if batches else 10, CPU)
    for batch in batches:
        sums = predicted(sums, batch)
    return sums


def logits(count: int, seed: int, classes: int = 10) -> Tensor:
    return 3 * torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))


def sure(count: int, of: int = 3, classes: int = 10) -> Tensor:
    return 30.0 * torch.nn.functional.one_hot(torch.full((count,), of), classes)


def test_the_share_in_batches_weighted_by_age() -> None:
    batches = [logits(count, seed) for seed, count in enumerate([60, 10, 1, 50, 0, 30])]
    weighted, weights = np.zeros(10), 0.0
    for batch in batches:
        keep = 1 - len(batch) / WINDOW
        weighted, weights = keep * weighted, keep * weights
        for row in batch.double().numpy():
            weighted[row.argmax()] += 1 / WINDOW
            weights += 1 / WINDOW
    assert weights > 0.5
    assert largest_share(after(*batches)) == pytest.approx(max(weighted) / weights, abs=1e-6)


def test_a_batch_larger_than_the_window_is_all_that_counts() -> None:
    large = logits(WINDOW + 1, 0)
    torch.testing.assert_close(after(sure(50), large), after(large))
    expected = np.bincount(large.numpy().argmax(axis=1)).max() / len(large)
    assert largest_share(after(large)) == pytest.approx(expected, abs=1e-6)


def test_few_samples_say_nothing() -> None:
    assert largest_share(after()) is None
    each = [torch.cat([sure(1, of) for of in range(10)])]
    assert largest_share(after(*each * 13)) is None
    assert largest_share(after(*each * 14)) == pytest.approx(0.1, abs=1e-6)
    assert largest_share(after(*[sure(1)] * 139)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("classes", [2, 10, 100, 1000])
@pytest.mark.parametrize(("rest", "collapsed"), [(1, True), (9, True), (11, False), (100, False)])
def test_one_class_with_more_than_95_percent(classes: int, rest: int, collapsed: bool) -> None:
    """However many classes there are."""
    before = torch.cat([sure(1, of % classes, classes) for of in range(WINDOW)])
    others = torch.cat([sure(1, (4 + i % (classes - 1)) % classes, classes) for i in range(rest)])
    of = (3 + classes) % classes  # which the others are not
    mixed = torch.cat([sure(WINDOW - rest, of, classes), others[others.argmax(dim=1) != of]])
    mixed = torch.cat([mixed, sure(WINDOW - len(mixed), (of + 1) % classes, classes)])
    assert has_collapsed(after(before, mixed)) is collapsed
    assert largest_share(after(mixed)) == pytest.approx(1 - rest / WINDOW, abs=1e-5)


def test_a_model_that_predicts_nothing_else_from_the_start_has_not_come_to_it() -> None:
    from_the_start = after(*[sure(10)] * 40)
    assert largest_share(from_the_start) == pytest.approx(1.0, abs=1e-6)
    assert not has_collapsed(from_the_start)
    for seed in range(5):
        from_the_start = predicted(from_the_start, logits(10, seed))
    assert not has_collapsed(from_the_start)
    for _ in range(40):
        from_the_start = predicted(from_the_start, sure(10))
    assert has_collapsed(from_the_start)  # once it had predicted more


def test_how_sure_it_is_does_not_count() -> None:
    """Of a covered lens a source model makes much the same each time, and is sure of nothing."""
    covered = torch.full((40, 10), 0.0)
    covered[:, 2] = 0.1
    assert largest_share(after(*[covered] * 5)) == pytest.approx(1.0)
    assert has_collapsed(after(torch.cat([sure(20, of) for of in range(10)]), *[covered] * 5, *[covered] * 15))


def test_one_output_is_all_of_the_prediction() -> None:
    assert largest_share(after(torch.zeros(WINDOW, 1))) == 1.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_samples_without_a_prediction_count_for_nothing(value: float) -> None:
    spoilt = logits(50, 0)
    spoilt[7:20, 2] = value
    torch.testing.assert_close(after(spoilt), after(spoilt[[*range(7), *range(20, 50)]]))
    torch.testing.assert_close(after(logits(30, 1), torch.full((5, 10), value)), after(logits(30, 1)))
