"""A client whose predictions collapse, watched and reset."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtta_flwr.adaptation.base import Adapter, State
from fedtta_flwr.adaptation.norms import batch_statistics

Run = Callable[..., Any]
PUSH = 100.0


class Sinking(Adapter):
    """Every step moves the bias of one class: after some, nothing else is predicted."""

    def select(self) -> State:
        """Return the bias."""
        return {"head.bias": self.model.head.bias}  # type: ignore[union-attr, dict-item]

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """Predict, then move."""
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
        self.model.head.bias[3] += PUSH  # type: ignore[union-attr, index]
        return logits


SINKING = {
    "adapter": f"{__name__}:Sinking",
    "corruptions": "contrast",
    "slots-per-corruption": 18,
    "batch-size": 40,
    "strategy": "local",
    "num-clients": 1,
    "spatial-heterogeneity": 1.0,
}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", __name__.partition(".")[0])


def test_a_collapse_is_seen_with_labels_and_without(run_local: Run, warned: list[str]) -> None:
    run = run_local(**SINKING)
    first, *_, last = (line["predictions"] for line in run.lines())
    assert first == {"evenness": None, "collapsed": []}  # of too few images
    assert last == {"evenness": pytest.approx(0, abs=0.1), "collapsed": ["client-00"]}
    rounds = [line["round"] for line in run.lines() if line["predictions"]["collapsed"]]
    assert rounds == list(range(rounds[0], 19))
    assert run.summary["collapsed"] == {"client-00": len(rounds)}
    (told,) = (line for line in warned if "hardly anything but one class" in line)
    assert told.startswith(f"round {rounds[0]}: client-00: predictions are hardly")
    assert run_local(**SINKING, scores="").summary["collapsed"] == run.summary["collapsed"]


def test_a_reset_begins_anew(run_local: Run) -> None:
    """What was predicted before counts no more; the adapter alone is watched and reset on its own."""
    run = run_local(**SINKING, scores="local,tta,post", reset="collapse")
    collapsed = [line["round"] for line in run.lines() if line["predictions"]["collapsed"]]
    assert collapsed[0] >= 4  # 140 images
    assert collapsed[1] - collapsed[0] >= 4
    assert run.summary["accuracy"]["local"] == run.summary["accuracy"]["post"]
    never = run_local(**SINKING, scores="local,tta,post")
    assert run.summary["accuracy"]["tta"]["micro"] > never.summary["accuracy"]["tta"]["micro"] + 2


def test_what_was_predicted_is_remembered_between_visits(run_local: Run) -> None:
    """With several slots a visit the evenness is the same as with one, if nobody is mixed."""
    one, three = run_local(**SINKING), run_local(**SINKING, **{"aggregate-every": 3})
    every_third = [line["predictions"]["evenness"] for line in one.lines()][2::3]
    assert [line["predictions"]["evenness"] for line in three.lines()] == every_third
