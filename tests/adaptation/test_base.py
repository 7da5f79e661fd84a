"""What every adapter promises, whatever its method."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter, batch_norms, statistics
from fedtta_flwr.adaptation.bn_stats import BNStats
from fedtta_flwr.adaptation.entropy import Entropy
from fedtta_flwr.adaptation.source import Source
from fedtta_flwr.errors import CheckpointError
from fedtta_flwr.options import EntropyOptions, NoOptions
from tests.adaptation.conftest import copied, same_bits

Make = Callable[..., nn.Module]
Images = Callable[..., Tensor]
ADAPTERS: dict[str, Callable[[nn.Module], Adapter]] = {
    "source": lambda model: Source(model, NoOptions()),
    "bn-stats": lambda model: BNStats(model, NoOptions()),
    "entropy": lambda model: Entropy(model, EntropyOptions(learning_rate=0.01)),
}
every_adapter = pytest.mark.parametrize("make_adapter", ADAPTERS.values(), ids=ADAPTERS.keys())
changing_adapter = pytest.mark.parametrize("make_adapter", [ADAPTERS["bn-stats"], ADAPTERS["entropy"]])


@every_adapter
def test_names_shapes_and_dtypes_never_change(make_adapter: Callable[..., Adapter], tiny: Make, images: Images) -> None:
    adapter = make_adapter(tiny())
    model_keys = list(adapter.model.state_dict())

    def forms() -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        return [(n, tuple(t.shape), t.dtype) for n, t in adapter.adapted_state().items()]

    before = forms()
    for batch in (images(4), images(1), images(0), images(3) * float("nan")):
        adapter.adapt(batch)
        assert forms() == before
        assert list(adapter.model.state_dict()) == model_keys
    assert all(t.is_floating_point() for t in adapter.adapted_state().values())
    assert not any("num_batches_tracked" in name for name in adapter.adapted_state())


@every_adapter
def test_predict_changes_nothing(make_adapter: Callable[..., Adapter], tiny: Make, images: Images) -> None:
    adapter = make_adapter(tiny())
    before = copied(adapter.model.state_dict())
    first = adapter.predict(images(4))
    assert torch.equal(first, adapter.predict(images(4)))
    assert same_bits(before, adapter.model.state_dict())
    assert first.shape == (4, 3)


@every_adapter
def test_predictions_are_those_of_the_model_in_eval_mode(
    make_adapter: Callable[..., Adapter], tiny: Make, images: Images
) -> None:
    with torch.no_grad():
        expected = tiny().eval()(images(4))
    assert torch.equal(make_adapter(tiny()).predict(images(4)), expected)


@every_adapter
def test_an_empty_batch_changes_nothing(make_adapter: Callable[..., Adapter], tiny: Make, images: Images) -> None:
    adapter = make_adapter(tiny())
    before = copied(adapter.model.state_dict())
    assert adapter.adapt(images(0)).shape == (0, 3)
    assert adapter.predict(images(0)).shape == (0, 3)
    assert same_bits(before, adapter.model.state_dict())
    assert adapter.rolled_back == 0


@changing_adapter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_step_that_is_not_finite_is_undone(
    make_adapter: Callable[..., Adapter], tiny: Make, images: Images, bad: float
) -> None:
    adapter = make_adapter(tiny())
    adapter.adapt(images(4))
    before = copied(adapter.adapted_state())
    x = images(4, seed=1)
    x[2, 1, 3, 3] = bad
    logits = adapter.adapt(x)
    assert same_bits(before, adapter.adapted_state())
    assert adapter.rolled_back == 1
    assert torch.equal(logits.nan_to_num(), adapter.predict(x).nan_to_num())
    # and the next good batch counts as if the bad one had not been there
    other = make_adapter(tiny())
    other.adapt(images(4))
    assert torch.equal(adapter.adapt(images(4, seed=2)), other.adapt(images(4, seed=2)))
    assert same_bits(other.adapted_state(), adapter.adapted_state())
    assert adapter.rolled_back == 1


def test_source_counts_a_step_that_is_not_finite(tiny: Make, images: Images) -> None:
    adapter = ADAPTERS["source"](tiny())
    adapter.adapt(images(2) * float("nan"))
    assert adapter.rolled_back == 1


@every_adapter
def test_adapted_state_survives_a_round_trip(make_adapter: Callable[..., Adapter], tiny: Make, images: Images) -> None:
    adapter, other = make_adapter(tiny()), make_adapter(tiny())
    adapter.adapt(images(4))
    saved = copied(adapter.adapted_state())
    other.adapt(images(4, seed=5))
    other.load_adapted_state(saved)
    assert same_bits(saved, other.adapted_state())
    assert torch.equal(adapter.predict(images(3, seed=2)), other.predict(images(3, seed=2)))
    # the installed state is a copy, not the tensors that came
    for t in saved.values():
        t.zero_()
    assert same_bits(adapter.adapted_state(), other.adapted_state())
    other.load_local_state(adapter.local_state())


@changing_adapter
def test_wrong_names_are_refused(make_adapter: Callable[..., Adapter], tiny: Make) -> None:
    adapter = make_adapter(tiny())
    before = copied(adapter.adapted_state())
    missing, extra = copied(before), copied(before)
    del missing["bn2.running_var"]
    extra["other"] = torch.zeros(1)
    for wrong, name in ((missing, "bn2.running_var"), (extra, "other"), ({}, "running")):
        with pytest.raises(CheckpointError, match=name) as caught:
            adapter.load_adapted_state(wrong)
        assert "\n" not in str(caught.value)
        assert same_bits(before, adapter.adapted_state())


@changing_adapter
def test_a_wrong_shape_is_refused_before_anything_is_installed(
    make_adapter: Callable[..., Adapter], tiny: Make
) -> None:
    adapter = make_adapter(tiny())
    before = copied(adapter.adapted_state())
    wrong = {name: torch.full_like(t, 7.0) for name, t in before.items()}
    wrong["bn2.running_var"] = torch.ones(6)
    with pytest.raises(CheckpointError, match=r"bn2\.running_var has shape \[6\], expected \[5\]"):
        adapter.load_adapted_state(wrong)
    assert same_bits(before, adapter.adapted_state())


@every_adapter
def test_local_state_is_refused_where_there_is_none(make_adapter: Callable[..., Adapter], tiny: Make) -> None:
    adapter = make_adapter(tiny())
    assert adapter.local_state() == {}
    with pytest.raises(CheckpointError, match="expected none"):
        adapter.load_local_state({"teacher": torch.zeros(1)})


def test_statistics_are_those_of_layers_that_track_them() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.BatchNorm2d(4, track_running_stats=False), nn.GroupNorm(1, 4), nn.BatchNorm1d(5)
    )
    assert list(batch_norms(model)) == ["0", "3"]
    found = statistics(model)
    assert list(found) == ["0.running_mean", "0.running_var", "3.running_mean", "3.running_var"]
    assert found["3.running_var"] is model[3].running_var
