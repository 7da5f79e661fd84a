"""What has to hold for any adapter, and what this one is made for."""

import pytest
import torch
from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.options import NoOptions
from torch import Tensor, nn

from my_adapter.adapter import MyAdapter


def images(batch: int, seed: int = 0) -> Tensor:
    return torch.rand((batch, 3, 8, 8), generator=torch.Generator().manual_seed(seed))


def adapter() -> MyAdapter:
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return MyAdapter(nn.Sequential(*features, nn.Linear(8, 5)), NoOptions())


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_biases_alone_change_and_travel() -> None:
    adapted = adapter()
    before = copied(adapted.model.state_dict())
    adapted.adapt(images(6))
    changed = {name for name, t in adapted.model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == set(adapted.adapted_state()) == {"1.bias", "5.bias"}


def test_predictions_become_more_certain() -> None:
    adapted, x = adapter(), images(6)
    before = entropy(adapted.predict(x)).mean()
    logits = adapted.adapt(x)
    torch.testing.assert_close(entropy(logits).mean(), before)
    assert entropy(adapted.predict(x)).mean() < before


def test_predicting_changes_nothing() -> None:
    adapted = adapter()
    before = copied(adapted.model.state_dict())
    adapted.predict(images(6))
    assert same(adapted.model.state_dict(), before)


@pytest.mark.parametrize("batch", [0, 1])
def test_a_small_batch_is_survived(batch: int) -> None:
    adapted = adapter()
    logits = adapted.adapt(images(batch))
    assert logits.shape == (batch, 5)
    assert logits.isfinite().all()
    assert adapted.rolled_back == 0


def test_what_is_kept_continues_identically() -> None:
    first, second = adapter(), adapter()
    first.adapt(images(6, seed=1))
    second.load_adapted_state(first.adapted_state())
    second.load_local_state(copied(first.local_state()))
    assert torch.equal(first.adapt(images(6, seed=2)), second.adapt(images(6, seed=2)))
    assert same(first.adapted_state(), second.adapted_state())
