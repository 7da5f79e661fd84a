"""A method that has become another one is named once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.reports.watch import Watch, resembles
from fedtta_flwr.strategies.rounds import Round

ALONE, EQUAL = torch.eye(4), torch.full((4, 4), 0.25)
OTHERS = 0.3 * ALONE + 0.7 / 3 * (1 - ALONE)  # FedAMP's W where it tells nobody apart
CHOOSING = torch.tensor([[0.4, 0.4, 0.1, 0.1]] * 2 + [[0.1, 0.1, 0.4, 0.4]] * 2)
MISSING = None


def watch(matrices: list[Tensor | None], rounds: int | None = None, **flat: Any) -> None:
    observer = Watch()
    observer.on_start(RunConfig.from_flat(flat), ("a", "b", "c", "d"), rounds or len(matrices))
    for number, weights in enumerate(matrices, start=1):
        observer.on_round(Round(number, weights=weights))
    observer.on_round(Round(len(matrices) + 1, closing=True))
    observer.on_end()


@pytest.mark.parametrize(("weights", "method", "change"), [(ALONE, "local", "larger"), (EQUAL, "fedavg", "smaller")])
def test_ten_rounds_in_a_row_are_said_once(weights: Tensor, method: str, change: str, warned: list[str]) -> None:
    watch([CHOOSING, *[weights] * 9], rounds=40)
    assert warned == []
    watch([CHOOSING, *[weights] * 30], rounds=40)
    (line,) = warned
    assert line.startswith(f"fedctta has silently become {method}: for 10 rounds in a row")
    assert line.endswith(f'; make fedctta.temperature {change}, or fedctta.temperature = "median"')
    assert "\n" not in line


@pytest.mark.parametrize("between", [CHOOSING, EQUAL, MISSING])
def test_a_round_between_breaks_the_row(between: Tensor | None, warned: list[str]) -> None:
    watch([*[ALONE] * 9, between, *[ALONE] * 9], rounds=19)
    assert warned == []


def test_nothing_is_said_a_second_time(warned: list[str]) -> None:
    watch([*[ALONE] * 10, CHOOSING, *[ALONE] * 10, *[EQUAL] * 10])
    assert len(warned) == 1


def test_a_short_run_is_said_at_its_end(warned: list[str]) -> None:
    watch([ALONE] * 3, rounds=4)
    watch([ALONE, ALONE, CHOOSING], rounds=3)
    assert warned == []
    watch([ALONE] * 3, rounds=3)
    (line,) = warned
    assert "for 3 rounds in a row" in line


@pytest.mark.parametrize(
    ("strategy", "hint"),
    [
        ("fedamp", '; make fedamp.sigma larger, or fedamp.sigma = "median"'),
        ("pfedgraph", "; make pfedgraph.lam larger"),
        ("pfedbbn", '; make pfedbbn.tau larger, or pfedbbn.tau = "median"'),
        ("fedtsa", "is above 0.99"),  # it has no scale
    ],
)
def test_the_hint_names_the_methods_own_scale(strategy: str, hint: str, warned: list[str]) -> None:
    watch([ALONE], strategy=strategy)
    (line,) = warned
    assert line.endswith(hint)


def test_who_answers_before_adapting_is_told_apart_by_no_scale(warned: list[str]) -> None:
    watch([EQUAL], **{"fedctta.lagged": True})
    watch([ALONE], **{"fedctta.lagged": True})
    watch([EQUAL], **{"fedctta.lagged": True, "fedctta.redraw": "each-client"})
    first, *others = warned
    assert first.endswith('the same weight; set fedctta.lagged = false, or fedctta.redraw = "each-client"')
    assert all("; make fedctta.temperature" in line for line in others)
    assert len(others) == 2


def test_a_relative_scale_is_not_to_be_changed(warned: list[str]) -> None:
    watch([ALONE], **{"fedctta.temperature": "median"})
    (line,) = warned
    assert line.endswith("a client's own weight is above 0.99")


@pytest.mark.parametrize(
    ("weights", "method"),
    [
        (ALONE, "local"),
        (0.992 * ALONE + 0.008 * EQUAL, "local"),
        (0.98 * ALONE + 0.02 * CHOOSING, None),
        (EQUAL, "fedavg"),
        (EQUAL + torch.tensor([[9e-4, -9e-4, 0, 0]]), "fedavg"),
        (EQUAL + torch.tensor([[2e-3, -2e-3, 0, 0]]), None),
        (OTHERS, "fedavg of the others"),
        (OTHERS + torch.tensor([[9e-4, -9e-4, 0, 0]]), "fedavg of the others"),
        (OTHERS + torch.tensor([[2e-3, -2e-3, 0, 0]]), None),
        (torch.cat((OTHERS[:3], ALONE[3:])), None),  # one does without the others
        (torch.tensor([[0.3, 0.7], [0.7, 0.3]]), None),  # one other is no choice
        (CHOOSING, None),
        (torch.ones(1, 1), None),  # nobody to choose
        (None, None),
    ],
)
def test_resemblance(weights: Tensor | None, method: str | None) -> None:
    assert resembles(weights) == method


def test_of_many_clients_a_small_difference_counts() -> None:
    """1/N is below 0.001 itself: two halves that help themselves have chosen."""
    half = torch.zeros(2000, 2000)
    half[:1000, :1000] = half[1000:, 1000:] = 1e-3
    assert resembles(half) is None
    assert resembles(torch.full((2000, 2000), 5e-4)) == "fedavg"


# ------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize(
    ("flat", "method"),
    [
        ({"fedctta.temperature": 1e-9}, "local"),
        ({"fedctta.temperature": 1e9}, "fedavg"),
        ({"strategy": "pfedgraph", "pfedgraph.lam": 1e9}, "fedavg"),
        ({"fedctta.temperature": "median"}, None),
        ({"strategy": "fedamp", "adapter": "entropy"}, "fedavg of the others"),
        ({"strategy": "fedamp", "adapter": "entropy", "fedamp.sigma": "median"}, None),
        ({"strategy": "local"}, None),
        ({"strategy": "fedavg"}, None),
        ({"strategy": "fedavgm"}, None),
        ({"strategy": "pfedgraph", "adapter": "source"}, None),  # nothing travels
        ({"strategy": "fedamp", "adapter": "source"}, None),
    ],
)
def test_real_runs(flat: dict[str, Any], method: str | None, run_local: Callable[..., Any], warned: list[str]) -> None:
    run_local(scores="", **flat)
    found = [line for line in warned if "silently" in line]
    assert len(found) == (method is not None)
    assert all(f"has silently become {method}: for 4 rounds" in line for line in found)
