"""Trackers are told of complete rounds, in order; what they raise ends nothing."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr import registry, server
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.reports.run_directory import RunDirectory
from fedtta_flwr.server import check_inputs, federation
from fedtta_flwr.strategies.rounds import Counts, Round
from fedtta_flwr.tracking.observer import Tracking
from tests.tracking.conftest import Broken, breaks, expected

SECONDS = {"client": 7.0, "server": 1.0, "transport": 2.0, "total": 10.0}


class Listener:
    """Keeps what it is told; may raise in one of the three calls."""

    def __init__(self, raises: str = "") -> None:
        self.heard: list[tuple[Any, ...]] = []
        self._raises = raises

    def begin(self, config: RunConfig) -> None:
        self._hear("begin", config)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._hear("log", step, dict(numbers))

    def finish(self, step: int, numbers: Mapping[str, float], *, finished: bool) -> None:
        self._hear("finish", step, dict(numbers), finished)

    def _hear(self, *what: Any) -> None:
        self.heard.append(what)
        if self._raises == what[0]:
            raise OSError("no space left\non device")

    def rounds(self) -> dict[int, dict[str, float]]:
        return {step: numbers for name, step, numbers in (h[:3] for h in self.heard if h[0] == "log")}


def counts(number: int, client: str, score: str, correct: int, seen: int) -> Counts:
    return Counts(number, client, "fog", score, np.array([seen - 1, 1]), np.array([correct, 0]))


def told(path: Path, rounds: list[Round], *listeners: Listener, finished: bool | None = True) -> Tracking:
    """Tell a run directory, then its trackers, as a run does."""
    directory = RunDirectory(path)
    tracking = Tracking(directory, {f"service-{i}": listener for i, listener in enumerate(listeners)})
    config = RunConfig.from_flat({"num-clients": 2, "spatial-heterogeneity": 1.0})
    for observer in (directory, tracking):
        observer.on_start(config, ("a", "b"), len(rounds))
    for round_ in rounds:
        round_.seconds = dict(SECONDS)
        for observer in (directory, tracking):
            observer.on_round(round_)
    if finished is not None:
        for observer in (directory, tracking):
            observer.close(finished=finished)
    return tracking


def made_rounds() -> list[Round]:
    """Two rounds and the closing one; b misses the second, so that its first `post` score comes with the last."""
    first = [counts(1, "a", "tta", 3, 6), counts(1, "b", "tta", 1, 10)]
    second = [counts(2, "a", "tta", 2, 8), counts(1, "a", "post", 4, 6)]
    last = [counts(2, "a", "post", 8, 9), counts(1, "b", "post", 5, 10)]
    return [
        Round(1, clients=("a", "b"), counts=first, samples=16, bytes_up=300),
        Round(2, clients=("a",), counts=second, samples=8, missing={"b": "gone"}),
        Round(3, closing=True, counts=last),
    ]


def test_each_round_is_told_once_with_its_own_post_score(tmp_path: Path) -> None:
    listener = Listener()
    told(tmp_path / "run", made_rounds(), listener)
    assert [(what[0], what[1] if what[0] == "log" else None) for what in listener.heard] == [
        ("begin", None),
        ("log", 1),
        ("log", 2),
        ("finish", None),
    ]
    first, second = listener.rounds()[1], listener.rounds()[2]
    assert (first["accuracy/tta"], second["accuracy/tta"]) == (100 * 4 / 16, 100 * 2 / 8)
    assert (first["accuracy/post"], second["accuracy/post"]) == (100 * 4 / 6, pytest.approx(100 * 8 / 9))
    assert (first["accuracy-so-far/tta"], second["accuracy-so-far/tta"]) == (100 * 4 / 16, 100 * 6 / 24)
    # b's score of round 1 was not there when round 1 was told
    assert (first["accuracy-so-far/post"], second["accuracy-so-far/post"]) == (100 * 4 / 6, 100 * 17 / 25)
    assert (first["clients/screened"], second["clients/screened"]) == (0, 1)
    assert (first["clients/mixed"], second["clients/mixed"]) == (2, 1)
    assert (first["bytes/up"], first["seconds/transport"], first["samples"]) == (300, 2.0, 16)
    assert not any(name.startswith("collaboration") for name in first)  # there was no W: absent, not 0
    _, step, summary, finished = listener.heard[-1]
    assert (step, finished) == (2, True)
    assert summary["summary/accuracy/post/per_corruption/fog"] == 100 * 17 / 25
    assert summary["summary/seconds/total"] == 30.0
    assert not any("per_client" in name for name in summary)


def test_a_run_that_is_broken_off_tells_only_complete_rounds(tmp_path: Path) -> None:
    listener = Listener()
    tracking = told(tmp_path / "run", made_rounds()[:2], listener, finished=False)
    assert list(listener.rounds()) == [1]
    assert listener.heard[-1][0] == "finish"
    assert listener.heard[-1][3] is False
    tracking.close(finished=True)
    assert [what[0] for what in listener.heard].count("finish") == 1


def test_a_run_that_never_began_tells_nothing(tmp_path: Path) -> None:
    listener = Listener()
    Tracking(RunDirectory(tmp_path / "run"), {"service": listener}).close(finished=False)
    assert listener.heard == []


@pytest.mark.parametrize("raises", ["begin", "log", "finish"])
def test_what_raises_is_named_once_and_told_nothing_more(tmp_path: Path, warned: list[str], raises: str) -> None:
    failing, listener = Listener(raises), Listener()
    told(tmp_path / "run", made_rounds(), failing, listener)
    assert [what[0] for what in listener.heard] == ["begin", "log", "log", "finish"]
    assert [what[0] for what in failing.heard].count(raises) == 1
    assert failing.heard[-1][0] == raises
    line = "tracking by service-0 ends here, the run goes on: OSError: no space left on device"
    assert warned == [line]


@pytest.mark.parametrize("broken_after", [3, 4])
def test_a_resumed_run_goes_on_with_what_was_seen_before(
    start: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_after: int
) -> None:
    before, after = Listener(), Listener()
    monkeypatch.setattr(server, "make_trackers", lambda config, folder: {"service": before})
    with pytest.raises(Broken):
        start("run", (broken_after, breaks))
    monkeypatch.setattr(server, "make_trackers", lambda config, folder: {"service": after})
    start("run", resume=str(tmp_path / "run"))
    assert list(before.rounds()) == list(range(1, broken_after))
    assert list(after.rounds()) == [2, 3, 4]  # the checkpoint is of round 2, which was not complete then
    numbers = expected(tmp_path / "run")
    for step, found in after.rounds().items():
        assert found == pytest.approx(numbers[step])


@pytest.mark.parametrize("missing", ["absent", "only a folder"])
def test_what_is_not_installed_is_one_line_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(registry.TRACKERS, "wandb", registry.Service("x:X", "no_such_service"))
    if missing != "absent":
        (tmp_path / "no_such_service").mkdir()  # as W&B leaves one named wandb
        monkeypatch.syspath_prepend(tmp_path)
    config = {"tracking": "tensorboard,wandb", "output-dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=r"wandb is not installed.*pip install -e '\.\[wandb\]'") as caught:
        check_inputs(RunConfig.from_flat(config))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError), federation(config):
        pytest.fail("the run began")
    assert not (tmp_path / "run").exists()


def test_nothing_is_imported_for_a_run_without_trackers() -> None:
    modules = ", ".join(f"fedtta_flwr.tracking.{name}" for name in registry.TRACKERS)
    code = f"import json, sys, {modules}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tensorboard", "mlflow", "wandb"} & set(json.loads(done.stdout))


def test_no_strategy_or_adapter_knows_of_trackers() -> None:
    root = Path(registry.__file__).parent
    files = [*root.glob("strategies/*.py"), *root.glob("adaptation/*.py")]
    assert len(files) > 40
    assert [file.name for file in files if "tracking" in file.read_text().lower().replace("backtracking", "")] == []
