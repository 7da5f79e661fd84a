"""Clipped changes and capped weights, against plain numpy and against a poisoner in a real run."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtta_flwr.adaptation.base import Adapter, State
from fedtta_flwr.strategies.robust import cap_weights, clip_changes

Run = Callable[..., Any]


def states(n: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "conv.weight": (3, 2, 1, 1),
        "bn.bias": (4,),
        "scale": (),
        "bn.running_mean": (4,),
        "bn.running_var": (4,),
    }
    return {name: torch.rand(n, *shape, generator=g) for name, shape in shapes.items()}


def clip(state: State, received: State, factor: float, source: State | None = None) -> tuple[State, Tensor]:
    """Without a source model, one that is far from everybody."""
    began = [{name: t[client] for name, t in received.items()} for client in range(len(received["scale"]))]
    return clip_changes(state, began, source or {name: t[0] + 1e30 for name, t in received.items()}, factor)


def norm(state: dict[str, Tensor], received: dict[str, Tensor], client: int, *, statistics: bool) -> float:
    parts = [
        (t[client].double() - received[name][client].double()).numpy().ravel()
        for name, t in state.items()
        if name.startswith("bn.running") == statistics
    ]
    return float(np.linalg.norm(np.concatenate(parts)))


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("n", [3, 6])
def test_a_large_change_is_as_long_as_so_many_medians_and_the_others_are_untouched(n: int, statistics: bool) -> None:
    received, state = states(n, 0), states(n, 1)
    for name, t in state.items():
        if name.startswith("bn.running") == statistics:
            t[1] += 1000 * received[name][1]
    before = sorted(norm(state, received, client, statistics=statistics) for client in range(n))
    median = before[(n - 1) // 2]
    result, clipped = clip(state, received, 2.0)
    assert clipped.tolist() == [client == 1 for client in range(n)]
    for client in range(n):
        if client != 1:
            assert all(torch.equal(result[name][client], t[client]) for name, t in state.items())
    assert norm(result, received, 1, statistics=statistics) == pytest.approx(2 * median, rel=1e-6)
    assert norm(result, received, 1, statistics=not statistics) == norm(state, received, 1, statistics=not statistics)
    assert (result["bn.running_var"] >= 0).all()
    for name, t in state.items():  # in the same direction
        change, smaller = (s[1].double() - received[name][1].double() for s in (t, result[name]))
        if name.startswith("bn.running") == statistics:
            torch.testing.assert_close(smaller / smaller.norm(), change / change.norm(), rtol=1e-4, atol=1e-4)


def test_clients_that_changed_nothing_do_not_make_everybody_stand_still() -> None:
    received = states(5, 0)
    state = {name: t.clone() for name, t in received.items()}
    state["bn.bias"][4] += 1.0
    result, clipped = clip(state, received, 1.0)
    assert not clipped.any()
    assert all(torch.equal(result[name], t) for name, t in state.items())
    result, clipped = clip(received, received, 1.0)
    assert not clipped.any()
    result, clipped = clip_changes({}, ({}, {}), {}, 1.0)
    assert (result, clipped.tolist()) == ({}, [False, False])


def test_of_two_changes_nobody_can_say_which_is_too_large() -> None:
    received = states(4, 0)
    state = {name: t.clone() for name, t in received.items()}
    state["bn.bias"][0] += 1.0
    state["bn.bias"][1] += 1e6
    assert not clip(state, received, 1.0)[1].any()
    state["bn.bias"][2] += 2.0
    assert clip(state, received, 1.0)[1].tolist() == [False, True, False, False]


def test_a_client_that_was_reset_has_gone_no_way() -> None:
    """From afar to beside the source model is the change beside it."""
    received, source = states(5, 0), {name: t[0] for name, t in states(1, 2).items()}
    state = {name: t + 0.1 for name, t in received.items()}
    for name in state:
        received[name][3] += 1000
        state[name][3] = source[name] + 0.1
    assert not clip(state, received, 1.1, source)[1].any()
    state["conv.weight"][3] += 50
    result, clipped = clip(state, received, 1.1, source)
    assert clipped.tolist() == [False, False, False, True, False]
    beside = {name: t.expand(5, *t.shape) for name, t in source.items()}
    expected = 1.1 * norm(state, received, 0, statistics=False)
    assert norm(result, beside, 3, statistics=False) == pytest.approx(expected, rel=1e-5)


def test_the_largest_numbers_that_are_let_in_are_clipped() -> None:
    received, state = states(4, 0), states(4, 1)
    state["conv.weight"][2] = 1e18
    result, clipped = clip(state, received, 3.0)
    assert clipped.tolist() == [False, False, True, False]
    assert all(t.isfinite().all() for t in result.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_capped_weights(dtype: torch.dtype) -> None:
    weights = torch.tensor([[0.1, 0.7, 0.2], [0.05, 0.9, 0.05], [0.5, 0.5, 0.0]], dtype=dtype)
    expected = torch.tensor([[0.5, 0.3, 0.2], [0.05, 0.9, 0.05], [0.3, 0.3, 0.4]], dtype=dtype)
    torch.testing.assert_close(cap_weights(weights, 0.3), expected)
    assert torch.equal(cap_weights(weights, 1.0), weights)


class Poisoner(Adapter):
    """One client sends a head that makes everybody predict class 3."""

    def select(self) -> State:
        """Return the head."""
        return {f"head.{name}": p for name, p in self.model.head.named_parameters()}  # type: ignore[union-attr, operator]

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """Predict; the honest move by next to nothing."""
        logits: Tensor = self.model(x)
        bias = self.model.head.bias
        if self.identity[1] == "client-02":
            bias[3] += 1e6  # type: ignore[union-attr, index]
        else:
            bias.mul_(1.001)  # type: ignore[union-attr, operator]
        return logits


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedctta", "fedtsa"])
def test_a_poisoner_in_a_run(run_local: Run, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", __name__.partition(".")[0])
    settings = {"adapter": f"{__name__}:Poisoner", "strategy": strategy, "corruptions": "defocus_blur"}
    settings |= {"fedctta.temperature": 1e6, "batch-size": 20, "scores": "pre,post"}  # so that all are mixed
    bare, clipped = run_local(**settings), run_local(**settings, **{"clip-updates": 3.0})
    assert clipped.summary["clipped"] == {"client-02": clipped.summary["rounds"]}
    assert bare.summary["clipped"] == {}
    honest = [
        np.mean(
            [
                accuracy
                for client, accuracy in run.summary["accuracy"]["post"]["per_client"].items()
                if client[-1] != "2"
            ]
        )
        for run in (bare, clipped)
    ]
    assert honest[0] < 40
    assert honest[1] > 80


def test_nothing_is_clipped_where_nothing_travels_or_nobody_is_mixed(
    run_local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", __name__.partition(".")[0])
    assert run_local(adapter="source", scores="", **{"clip-updates": 1.0}).summary["finished"]
    poisoned = {"adapter": f"{__name__}:Poisoner", "corruptions": "defocus_blur", "scores": "post"}
    bare, clipped = (run_local(**poisoned, strategy="local", **{"clip-updates": c}).summary for c in (0.0, 3.0))
    assert clipped["clipped"] == {}
    assert clipped["accuracy"] == bare["accuracy"]


def test_a_cap_on_weights_in_a_run(run_local: Run) -> None:
    run = run_local(strategy="fedavg", **{"weight-cap": 0.1})
    assert run.summary["collaboration"]["self_weight"] == pytest.approx(0.7)
    assert run_local(strategy="fedavg").summary["collaboration"]["self_weight"] == pytest.approx(0.25)
