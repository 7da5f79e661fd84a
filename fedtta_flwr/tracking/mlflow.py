"""MLflow: a database in the run directory, or the server that MLFLOW_TRACKING_URI names."""

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtta_flwr.config import RunConfig
from fedtta_flwr.files import write_json

EXPERIMENT = "fedtta"  # unless MLFLOW_EXPERIMENT_NAME says otherwise
MOST_PARAMETERS, MOST_METRICS = 100, 1000  # in one request
#: where the user has not set them: a server that is gone is given up within seconds, and nobody is told of the use
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class MLflow:
    """Logs to RUN/mlruns, or to a server.

    Parameters
    ----------
    folder : Path
        The run directory; its ``mlflow.json`` says which run of MLflow's it is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client: Any = None
        self._run = ""
        self._logged = 0

    def begin(self, config: RunConfig) -> None:
        """Start a run, or go on with the one that mlflow.json names."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        store = os.environ.get("MLFLOW_TRACKING_URI")
        if not store:
            (self._folder / "mlruns").mkdir(exist_ok=True)
            store = f"sqlite:///{self._folder / 'mlruns' / 'mlflow.db'}"
        self._client = MlflowClient(store)
        known = self._folder / "mlflow.json"
        if config.resume and known.exists():
            self._run = json.loads(known.read_text())["run"]
            self._client.update_run(self._run, status="RUNNING")
            # Every round has a time. What the store has already, it would keep twice.
            steps = [metric.step for metric in self._client.get_metric_history(self._run, "seconds/total")]
            self._logged = max(steps, default=0)
        else:
            self._start(config, own=store.startswith("sqlite:///"))
            write_json(known, {"run": self._run})

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log metrics, unless the run has that round already."""
        if step > self._logged:
            self._metrics(step, numbers)

    def finish(self, step: int, numbers: Mapping[str, float], *, finished: bool) -> None:
        """Log the summary, and set the status FINISHED or FAILED."""
        try:
            self._metrics(step, numbers)
        finally:
            self._client.set_terminated(self._run, "FINISHED" if finished else "FAILED")

    def _start(self, config: RunConfig, *, own: bool) -> None:
        from mlflow.entities import Param

        run = self._client.create_run(self._experiment(own=own), run_name=self._folder.name)
        self._run = run.info.run_id
        parameters = [Param(key, str(value)) for key, value in config.to_flat().items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[first : first + MOST_PARAMETERS])

    def _experiment(self, *, own: bool) -> str:
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        place = (self._folder / "mlruns" / "artifacts").as_uri() if own else None  # not the working directory
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=place))
            except MlflowException:  # another run, which began with this one, was faster
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return str(found.experiment_id)

    def _metrics(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [Metric(_allowed(key), value, now, step) for key, value in numbers.items()]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + MOST_METRICS])


def _allowed(key: str) -> str:
    """Return a name as MLflow takes it: corruptions of an own stream may have any."""
    return "/".join(re.sub(r"[^\w.\- :]", "_", part) if part.strip(".") else "_" for part in key.split("/"))
