"""The adapter that does not adapt."""

import torch
from torch import nn

from fedtta_flwr.adaptation.source import Source
from fedtta_flwr.options import NoOptions


def test_nothing_changes_and_nothing_travels(tiny, images) -> None:
    model: nn.Module = tiny()
    adapter = Source(model, NoOptions())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    logits = adapter.adapt(images(4))
    assert torch.equal(logits, adapter.predict(images(4)))
    assert adapter.adapted_state() == {}
    assert adapter.rolled_back == 0
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    adapter.load_adapted_state({})


def test_works_without_batch_norm(no_norm, images) -> None:
    adapter = Source(no_norm(), NoOptions())
    assert torch.equal(adapter.adapt(images(1)), adapter.predict(images(1)))
