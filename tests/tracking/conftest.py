"""Tiny tracked federations, what rounds.jsonl says of them, and ways to break them."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr.config import RunConfig
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.server import federation
from fedtta_flwr.strategies.rounds import Round
from tests.conftest import TINY

Numbers = dict[int, dict[str, float]]  # step -> name -> number


class Broken(BaseException):
    """What nothing in the run may catch."""


class After:
    """An observer that does something after a round."""

    def __init__(self, round_: int, act: Callable[[], None]) -> None:
        self._round, self._act = round_, act

    def on_start(self, config: RunConfig, clients: tuple[str, ...], rounds: int) -> None: ...

    def on_round(self, round_: Round) -> None:
        if round_.number == self._round:
            self._act()

    def on_end(self) -> None: ...


def breaks() -> None:
    raise Broken


@pytest.fixture(autouse=True)
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have set up the services for runs of their own."""
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def start(apps: tuple[Any, Any], tmp_path: Path) -> Callable[..., Path]:
    """Run a tiny federation of 4 rounds: ``start("name", after=(2, act), tracking="wandb")``."""

    def run(name: str, after: tuple[int, Callable[[], None]] | None = None, **overrides: Any) -> Path:
        path = tmp_path / name
        flat = TINY | {"state-dir": str(tmp_path / "states"), "checkpoint-every": 2} | overrides
        if "resume" not in overrides:
            flat["output-dir"] = str(path)
        grid = LocalGrid(apps[1], RunConfig.from_flat(flat).to_flat(), 2)
        with federation(flat) as strategy:
            if after is not None:
                strategy.observers.append(After(*after))
            strategy.start(grid)
        return path

    return run


def expected(path: Path) -> Numbers:
    """What a tracker must have been told of each round, from rounds.jsonl alone."""
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert {line["samples"] for line in lines} == {20}  # so that an average over samples is one over rounds
    numbers: Numbers = {}
    for count, line in enumerate(lines, start=1):
        found = {"clients/mixed": line["clients"], "clients/screened": len(line["screened"]), "samples": 20}
        found["predictions/confidence"] = line["predictions"]["confidence"]
        found["predictions/collapsed"] = len(line["predictions"]["collapsed"])
        for part in ("accuracy", "bytes", "seconds", "collaboration"):
            found |= {f"{part}/{key}": value for key, value in line[part].items() if value is not None}
        for score in line["accuracy"]:
            found[f"accuracy-so-far/{score}"] = sum(one["accuracy"][score] for one in lines[:count]) / count
        numbers[line["round"]] = found
    assert {"accuracy/post", "accuracy-so-far/post", "seconds/transport", "bytes/down"} <= numbers[1].keys()
    return numbers


def accuracies(path: Path) -> dict[str, float]:
    """The accuracies that a tracker must have been told at the end, from summary.json alone."""
    found = {}
    for score, accuracy in json.loads((path / "summary.json").read_text())["accuracy"].items():
        for key in ("micro", "macro", "macro_all_classes", "mean_clients"):
            found[f"summary/accuracy/{score}/{key}"] = accuracy[key]
        for corruption in ("contrast", "pixelate"):
            found[f"summary/accuracy/{score}/per_corruption/{corruption}"] = accuracy["per_corruption"][corruption]
    assert len(found) == 5 * (4 + 2)
    return found


def without_seconds(numbers: Mapping[int, Mapping[str, float]]) -> Numbers:
    """What two runs of the same config have in common."""
    return {step: {k: v for k, v in found.items() if "seconds" not in k} for step, found in numbers.items()}
