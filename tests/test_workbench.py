"""What a strategy may ask clients for: whose answer, to which images."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.datasets import CLEAN
from fedtta_flwr.descriptors import chosen_images, form_of, noise_images
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.strategies.updates import form
from fedtta_flwr.workbench import DESCRIPTORS, Workbench

ABOUT = {"samples": 4, "redraw": "never", "client": "client-00", "round": 1}


@pytest.fixture
def bench(tiny_config: Callable[..., RunConfig]) -> Workbench:
    """Adapted to one batch of the first client."""
    made = Workbench(tiny_config(strategy="local"))
    made.adapter.adapt(batch(made))
    return made


def batch(bench: Workbench) -> Tensor:
    return bench.stream("client-00").batch(0)[0]


def describe(bench: Workbench, name: str, **changed: Any) -> Tensor:
    found = bench.describe(name, ABOUT | changed, batch(bench))
    assert found is not None
    return found


def test_nothing_is_described_unless_asked_for(bench: Workbench) -> None:
    assert bench.describe("", {}, batch(bench)) is None


def test_whose_answer_to_which_images(bench: Workbench) -> None:
    x, noise = batch(bench), noise_images(0, 4, (3, 32, 32))
    clean = chosen_images(bench.test_set.images(CLEAN, 5), 0, 4)
    adapted, source = bench.adapter.model, bench.source
    with torch.no_grad():
        expected = {
            "noise-logits": adapted(noise),
            "noise-features": adapted.features(noise),  # type: ignore[operator]
            "chosen-logits": adapted(clean),
            "chosen-features": adapted.features(clean),  # type: ignore[operator]
            "logit-mean": source(x),
            "feature-mean": source.features(x),  # type: ignore[operator]
        }
    for name, answers in expected.items():
        torch.testing.assert_close(describe(bench, name), answers.mean(dim=0))
    assert torch.equal(describe(bench, "bn-statistics"), torch.cat(list(bench.adapter.adapted_state().values())))
    found = [describe(bench, name) for name in DESCRIPTORS]
    assert len({tuple(t.tolist()) for t in found}) == len(found) == len(expected) + 1


@pytest.mark.parametrize("adapter", ["tent", "cotta", "bbn", "source"])
def test_the_server_knows_the_form_of_what_it_asks_for(tiny_config, adapter: str) -> None:
    bench, other = Workbench(tiny_config(adapter=adapter)), Workbench(tiny_config(adapter=adapter))
    bench.adapter.adapt(batch(bench))
    assert form_of("", other.adapter.model, 10) is None
    for name in DESCRIPTORS:
        expected = form_of(name, other.adapter.model, 10)
        assert expected is not None
        assert form(describe(bench, name)) == form(expected)


@pytest.mark.parametrize("adapter", ["tent", "cotta", "rotta", "note", "bbn", "source", "roid", "lame"])
def test_features_are_those_behind_the_logits_that_are_asked_for(tiny_config, adapter: str) -> None:
    """The classifier of the source, which none of these has changed yet, makes them, and no method what it likes."""
    bench = Workbench(tiny_config(adapter=adapter))
    with torch.inference_mode():
        logits = bench.source.head(describe(bench, "noise-features"))  # type: ignore[operator]
    torch.testing.assert_close(logits, describe(bench, "noise-logits"), rtol=1e-4, atol=1e-4)


def test_an_unknown_descriptor_is_one_line_that_lists_the_others(bench: Workbench) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(bench, "palm-lines")
    text = str(caught.value)
    assert "\n" not in text
    assert all(name in text for name in ("'palm-lines'", *DESCRIPTORS))


def test_shared_images_are_made_once(bench: Workbench) -> None:
    x = batch(bench)
    assert bench.noise(ABOUT, x) is bench.noise(ABOUT | {"client": "client-01", "round": 7}, x)
    assert bench.chosen(ABOUT) is bench.chosen(ABOUT | {"client": "client-01", "round": 7})
    assert bench.noise(ABOUT, x).shape == (4, 3, 32, 32)
    assert bench.noise(ABOUT, x[..., :16]).shape == (4, 3, 32, 16)  # streams may differ in the form of their images
    assert torch.equal(bench.noise(ABOUT, x), noise_images(0, 4, (3, 32, 32)))


def test_noise_is_drawn_anew_as_often_as_asked_for(bench: Workbench) -> None:
    def same(redraw: str, **changed: Any) -> bool:
        first = bench.noise(ABOUT | {"redraw": redraw}, batch(bench))
        again = bench.noise(ABOUT | {"redraw": redraw} | changed, batch(bench))
        return torch.equal(first, again)

    found = {redraw: (same(redraw, round=2), same(redraw, client="client-01")) for redraw in REDRAW}
    assert found == REDRAW
    assert same("each-client")


#: redraw -> (is it the same in another round? for another client?)
REDRAW = {"never": (True, True), "each-round": (False, True), "each-client": (False, False)}


def test_a_set_without_clean_images_is_refused(tiny_config) -> None:
    """Where a strategy of the user's own asks for them."""
    bench = Workbench(tiny_config())
    with pytest.raises(ConfigError, match="798 chosen images: the data set has 797") as caught:
        describe(bench, "chosen-logits", samples=798)
    assert "\n" not in str(caught.value)
