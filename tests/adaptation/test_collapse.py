"""The mean prediction against its definition: sums that forget, written out sample by sample in numpy."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy
from torch import Tensor

from fedtta_flwr.adaptation.collapse import (
    COLLAPSED,
    WINDOW,
    evenness,
    has_collapsed,
    no_predictions,
    predicted,
)

CPU = torch.device("cpu")


def after(*batches: Tensor, classes: int = 10) -> Tensor:
    sums = no_predictions(classes, CPU)
    for batch in batches:
        sums = predicted(sums, batch)
    return sums


def logits(count: int, seed: int, classes: int = 10) -> Tensor:
    return 3 * torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))


def sure(count: int, of: int = 3, classes: int = 10) -> Tensor:
    return 30.0 * torch.nn.functional.one_hot(torch.full((count,), of), classes)


def test_the_mean_of_batches_weighted_by_age() -> None:
    batches = [logits(count, seed) for seed, count in enumerate([60, 10, 1, 50, 0, 30])]
    weighted, weights = np.zeros(10), 0.0
    for batch in batches:
        keep = 1 - len(batch) / WINDOW
        weighted, weights = keep * weighted, keep * weights
        for row in batch.double().numpy():
            weighted += softmax(row) / WINDOW
            weights += 1 / WINDOW
    assert weights > 0.5
    found = evenness(after(*batches))
    assert found == pytest.approx(entropy(weighted / weights) / np.log(10), abs=1e-6)


def test_a_batch_larger_than_the_window_is_all_that_counts() -> None:
    large = logits(WINDOW + 1, 0)
    torch.testing.assert_close(after(sure(50), large), after(large))
    expected = entropy(softmax(large.double().numpy(), axis=1).mean(axis=0)) / np.log(10)
    assert evenness(after(large)) == pytest.approx(expected, abs=1e-6)


def test_few_samples_say_nothing() -> None:
    assert evenness(after()) is None
    few = after(*[sure(10)] * 13)
    assert evenness(few) is None
    assert not has_collapsed(few)
    assert has_collapsed(after(*[sure(10)] * 14))
    assert has_collapsed(after(*[sure(1)] * 139))


def test_from_one_class_to_all_alike() -> None:
    assert evenness(after(sure(WINDOW))) == pytest.approx(0, abs=1e-6)
    each = torch.cat([sure(WINDOW // 10, of) for of in range(10)])
    assert evenness(after(each)) == pytest.approx(1, abs=1e-6)
    assert evenness(after(torch.zeros(WINDOW, 10))) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("rest", "collapsed"), [(1, True), (15, True), (19, False), (40, False)])
def test_one_of_ten_classes_with_more_than_91_percent(rest: int, collapsed: bool) -> None:
    others = torch.cat([sure(1, 4 + i % 6) for i in range(rest)])
    sums = after(torch.cat([sure(WINDOW - rest), others]))
    assert has_collapsed(sums) is collapsed
    assert (evenness(sums) < COLLAPSED) is collapsed  # type: ignore[operator]


def test_a_model_recovers() -> None:
    batches = [sure(10)] * 40
    assert has_collapsed(after(*batches))
    assert not has_collapsed(after(*batches, *(logits(10, seed) for seed in range(5))))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_samples_without_a_prediction_count_for_nothing(value: float) -> None:
    spoilt = logits(50, 0)
    spoilt[7:20, 2] = value
    torch.testing.assert_close(after(spoilt), after(spoilt[[*range(7), *range(20, 50)]]))
    torch.testing.assert_close(after(logits(30, 1), torch.full((5, 10), value)), after(logits(30, 1)))
