"""MLflow, in a database of its own, and without its server."""

import json
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr.config import RunConfig
from fedtta_flwr.ports import free_port
from fedtta_flwr.tracking.mlflow import MLflow
from tests.tracking.conftest import Broken, Numbers, accuracies, breaks, expected, without_seconds

mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without runs: MLflow takes seconds to make one."""
    file = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow.MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def store(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The database that the user's environment names."""
    file = tmp_path / "store.db"
    shutil.copy(empty, file)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
    return file


def run_of(file: Path, name: str) -> Any:
    """A run of a database, by its name, which must be there once."""
    client = mlflow.MlflowClient(f"sqlite:///{file}")
    experiment = client.get_experiment_by_name("fedtta")
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    return run


def metrics(file: Path, name: str) -> Numbers:
    """What MLflow has of each round of a run; every step must be there once."""
    run, found = run_of(file, name), Numbers()
    for key in sorted(run.data.metrics):
        if not key.startswith("summary"):
            history = mlflow.MlflowClient(f"sqlite:///{file}").get_metric_history(run.info.run_id, key)
            assert len({metric.step for metric in history}) == len(history)
            for metric in history:
                found.setdefault(metric.step, {})[key] = metric.value
    return found


def test_a_run(start: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = start("run", tracking="mlflow")
    own = path / "mlruns" / "mlflow.db"
    assert metrics(own, "run") == {step: pytest.approx(found) for step, found in expected(path).items()}
    run = run_of(own, "run")
    assert run.info.status == "FINISHED"
    summary = {key: value for key, value in run.data.metrics.items() if key.startswith("summary/accuracy")}
    assert summary == pytest.approx(accuracies(path))
    config = json.loads((path / "config.json").read_text())["config"]
    assert run.data.params == {key: str(value) for key, value in config.items()}
    assert run.data.params.keys() == RunConfig().to_flat().keys()
    assert run.info.artifact_uri.startswith((path / "mlruns").as_uri())
    assert list(Path.cwd().iterdir()) == []  # MLflow's own default is ./mlruns


def test_a_run_that_is_broken_off_and_resumed_is_one_run(start: Callable[..., Path], store: Path) -> None:
    whole = start("whole", tracking="mlflow")
    with pytest.raises(Broken):
        start("broken", (4, breaks), tracking="mlflow")
    assert list(metrics(store, "broken")) == [1, 2, 3]
    assert run_of(store, "broken").info.status == "FAILED"
    start("broken", tracking="mlflow", resume=str(whole.with_name("broken")))
    assert run_of(store, "broken").info.status == "FINISHED"
    assert without_seconds(metrics(store, "broken")) == without_seconds(metrics(store, "whole"))
    assert not (whole / "mlruns").exists()


def test_a_run_tracked_only_from_its_resumption_on(start: Callable[..., Path], store: Path, tmp_path: Path) -> None:
    with pytest.raises(Broken):
        start("broken", (4, breaks))
    start("broken", tracking="mlflow", resume=str(tmp_path / "broken"))
    assert list(metrics(store, "broken")) == [2, 3, 4]


def test_corruptions_of_an_own_stream_may_have_any_name_and_number(store: Path, tmp_path: Path) -> None:
    tracker = MLflow(tmp_path)
    tracker.begin(RunConfig())
    names = [r"a/100%_$&#{}~^\\", "a/../b", "a//c", "a/nächtlich 3:00", *(f"a/{i}" for i in range(1500))]
    tracker.finish(4, dict.fromkeys(names, 1.0), finished=True)
    run = run_of(store, tmp_path.name)
    assert run.info.status == "FINISHED"
    assert len(run.data.metrics) == len(names)
    assert {"a/_/b", "a/_/c", "a/nächtlich 3:00", "a/1499"} < run.data.metrics.keys()


def test_a_summary_that_is_not_taken_leaves_no_run_running(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = MLflow(tmp_path)
    tracker.begin(RunConfig())
    monkeypatch.setattr("fedtta_flwr.tracking.mlflow._allowed", lambda key: "%")
    with pytest.raises(mlflow.MlflowException):
        tracker.finish(4, {"a": 1.0}, finished=True)
    assert run_of(store, tmp_path.name).info.status == "FINISHED"


def test_a_damaged_store_ends_the_tracking_not_the_run(
    start: Callable[..., Path], store: Path, warned: list[str]
) -> None:
    def damage() -> None:
        with sqlite3.connect(store) as database:
            database.execute("DROP TABLE metrics")

    path = start("run", (2, damage), tracking="mlflow")
    assert list(expected(path)) == [1, 2, 3, 4]
    (line,) = (line for line in warned if "tracking" in line)
    assert line.startswith("tracking by mlflow ends here, the run goes on: ")
    assert "metrics" in line
    assert "\n" not in line


def test_without_its_server_a_run_goes_on_after_seconds(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    path = start("run", tracking="mlflow")
    assert time.monotonic() - began < 30
    assert list(expected(path)) == [1, 2, 3, 4]
    assert len([line for line in warned if line.startswith("tracking by mlflow ends here")]) == 1
