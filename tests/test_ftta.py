"""A client whose predictions collapse, watched and reset."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


class Unsound(Adapter):
    """What it predicts is NaN."""

    def select(self) -> State:
        """Return nothing that would travel."""
        return {}

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.model(x)  # type: ignore[no-any-return]

    def predict(self, x: Tensor) -> Tensor:
        """Return no prediction."""
        return super().predict(x) * torch.nan


class Sure(Unsound):
    """What it predicts is seven to one against all other classes together, and every third time three to one."""

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """Predict."""
        logits = super().step(x).zero_()
        logits[:, 0] = math.log(7 * (logits.shape[1] - 1))
        logits[::3, 0] = math.log(3 * (logits.shape[1] - 1))
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
    assert 0.1 < first.pop("confidence") < last.pop("confidence") == pytest.approx(1)  # a bias of 1,700
    assert first == {"largest_share": None, "collapsed": []}  # of too few images
    assert last == {"largest_share": pytest.approx(1, abs=0.05), "collapsed": ["client-00"]}
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


@pytest.mark.parametrize("scores", ["", "tta"])
def test_how_sure_clients_are_with_labels_and_without(run_local: Run, scores: str) -> None:
    run = run_local(strategy="local", adapter=f"{__name__}:Sure", scores=scores, **{"aggregate-every": 2})
    expected = pytest.approx((2 * 0.75 + 3 * 0.875) / 5)  # of five images
    assert [line["predictions"]["confidence"] for line in run.lines()] == [expected] * 2
    with np.load(run.path / "timeline.npz") as file:
        assert file["confidence"].tolist() == [[expected] * 4] * 2


def test_predictions_that_are_none_are_wrong_and_named(run_local: Run, warned: list[str]) -> None:
    run = run_local(strategy="local", adapter=f"{__name__}:Unsound", scores="pre,tta", **{"num-clients": 1})
    assert [line["accuracy"]["pre"] for line in run.lines()] == [0.0] * 4
    assert run.summary["accuracy"]["tta"]["micro"] > 0
    assert any(line.startswith("predictions that are not finite count as wrong ones: client-00 (") for line in warned)


@pytest.mark.parametrize("slots", [3, 6, 18])
def test_what_was_predicted_is_remembered_between_visits(run_local: Run, slots: int) -> None:
    """With several slots a visit a client is as with one, if nobody is mixed; what is told is the worst of a visit."""
    one, several = (run_local(**SINKING, **{"aggregate-every": number}) for number in (1, slots))
    shares = [line["predictions"]["largest_share"] for line in one.lines()]
    worst = [max((s for s in shares[i : i + slots] if s is not None), default=None) for i in range(0, 18, slots)]
    assert [line["predictions"]["largest_share"] for line in several.lines()] == worst


@pytest.mark.parametrize("slots", [6, 18])
def test_no_reset_goes_unheard(run_local: Run, slots: int) -> None:
    run = run_local(**SINKING, reset="collapse", **{"aggregate-every": slots})
    assert run.summary["collapsed"]["client-00"] >= 1


def test_a_source_model_that_fails_from_the_start_is_no_reason_to_begin_anew(run_local: Run) -> None:
    """It is told of; but where adaptation has no part in it, a reset would lead to the same, again and again."""
    source = SINKING | {"adapter": "source", "scores": "tta"}  # for contrast, it predicts one class only
    never, reset = run_local(**source), run_local(**source, reset="collapse")
    assert never.summary["collapsed"]["client-00"] > 10
    assert [line["predictions"] for line in reset.lines()] == [line["predictions"] for line in never.lines()]


STREAM = """
import numpy as np, torch
class Gappy:
    domains = ("fog", "fog", EMPTY, "snow", "snow")
    def __len__(self): return 5
    def batch(self, slot):
        count = 0 if slot == 2 else 30
        generator = torch.Generator().manual_seed(slot)
        return torch.rand(count, 3, 32, 32, generator=generator), np.full(count, 3)
def stream(config, client): return Gappy()
"""


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("empty", ["fog", "snow"])
def test_a_shift_behind_a_slot_without_images_is_one_too(
    run_local: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: str, slots: int
) -> None:
    """What has sunk predicts the one class that there is; what begins anew does not."""
    module = f"gappy_{empty}_{slots}"
    (tmp_path / f"{module}.py").write_text(STREAM.replace("EMPTY", repr(empty)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", f"{__name__.partition('.')[0]},{module}")
    settings = SINKING | {"stream": f"{module}:stream", "classes": 10, "scores": "local,tta", "aggregate-every": slots}
    never, each_shift = (
        run_local(**settings, reset=reset).summary["accuracy"]["tta"]["per_corruption"]
        for reset in ("never", "each-shift")
    )
    assert never["snow"] == 100.0
    assert each_shift["snow"] < 80.0  # of its two slots, the first begins anew
    assert each_shift["fog"] == never["fog"] < 80.0
