"""What `fedtta list adapters` says of an adapter is what it does."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.config import RunConfig
from fedtta_flwr.registry import ADAPTERS
from fedtta_flwr.resolve import resolve

#: so that a step comes soon, and on every sample
SOON = {
    "capacity": 4,
    "update_every": 4,
    "entropy_margin": 1.0,
    "similarity_margin": 1.0,
    "entropy_threshold": 1.0,
}
every_adapter = pytest.mark.parametrize("name", ADAPTERS)


def told(text: str) -> set[str]:
    """What a text names: kinds of tensors, as `found` calls them."""
    names = {
        "affine": ("affine parameters", "all parameters"),
        "convolution": ("all parameters",),
        "classifier": ("all parameters",),
        "statistics": ("BatchNorm statistics",),
        "teacher": ("teacher",),
    }
    kinds = {kind for kind, phrases in names.items() if any(phrase in text for phrase in phrases)}
    return kinds - ({"classifier"} if "but the classifier's" in text else set())


def found(keys: Iterable[str]) -> set[str]:
    """Which kinds of tensors of the tiny network these are."""
    kinds = set()
    for key in keys:
        layer, _, tensor = key.removeprefix("teacher.").rpartition(".")
        if "teacher" in key:
            kinds.add("teacher")
        if tensor.endswith(("_mean", "_var")):
            kinds.add("statistics")
        else:
            kinds.add({"bn": "affine", "co": "convolution", "he": "classifier"}[layer[:2]])
    return kinds


@every_adapter
def test_updates_and_uploads(name: str, tiny: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    method, options = ADAPTERS[name], RunConfig().options(name)
    chosen = {key: value for key, value in SOON.items() if key in type(options).model_fields}
    adapter = resolve("adapter", name, ADAPTERS)(tiny(), options.model_copy(update=chosen))
    travels = adapter.adapted_state()
    uploads = method.updates if method.uploads == "what it updates" else method.uploads
    assert found(travels) == told(uploads)
    assert (uploads == "nothing") == (not travels)
    before = {key: t.clone() for key, t in travels.items()}
    for seed in range(3):
        adapter.adapt(images(8, seed=seed))
    changed = [key for key, t in adapter.adapted_state().items() if not torch.equal(t, before[key])]
    assert found(changed) == told(uploads)


@every_adapter
def test_keeps(name: str, tiny: Callable[..., nn.Module]) -> None:
    adapter = resolve("adapter", name, ADAPTERS)(tiny(), RunConfig().options(name))
    kept = {key for key in adapter.local_state() if not key.startswith("draws.")}
    text = ADAPTERS[name].keeps
    assert text.startswith("nothing") == (not kept)
    for phrase, part in {
        "moments": "optimizer.exp_avg",
        "momentum": "moment",
        "memory": "memory.images",
        "mean prediction": "mean_prediction",
        "mean entropy": "mean_entropy",
        "source's statistics": "source_mean",
    }.items():
        if phrase in text and not text.startswith("nothing"):
            assert any(part in key for key in kept), phrase


def test_facts_of_options_that_are_off_by_default(tiny: Callable[..., nn.Module]) -> None:
    def kept(name: str, **chosen: object) -> set[str]:
        options = RunConfig().options(name).model_copy(update=chosen)
        return set(resolve("adapter", name, ADAPTERS)(tiny(), options).local_state())

    assert "optimizer.exp_avg" in kept("entropy", optimizer="adam")
    assert "fisher" in kept("eata", fisher_weight=1.0)


def test_what_sar_leaves_out_is_what_its_option_names(tiny: Callable[..., nn.Module]) -> None:
    """By default parts that few networks have: not the last block of any."""
    options, method = RunConfig().options("sar"), ADAPTERS["sar"]
    assert method.updates.endswith("without the parts named in `sar.skip` (layer4, ...)")
    assert "layer4" in options.model_dump()["skip"].split(",")
    travels = resolve("adapter", "sar", ADAPTERS)(tiny(), options).adapted_state()
    assert list(travels) == ["bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"]
