"""Real processes: checkouts, SuperLinks and runs, each ended by the test that started it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedtta_flwr.processes import await_end, marked

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker("e2e")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture(scope="session")
def small() -> str:
    """Overrides for a run of four rounds."""
    return (
        "num-clients=4 slots-per-corruption=2 shift-length=2 batch-size=5 spatial-heterogeneity=0.5 "
        "corruptions='brightness,contrast'"
    )


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user's environment: this Python's commands first, quiet, no runtime installation."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
    }


@pytest.fixture
def checkout(tmp_path: Path):
    """Make copies of the project, as a second clone would be."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        target.mkdir()
        for entry in ("pyproject.toml", "README.md", "server_app.py", "client_app.py"):
            shutil.copy(ROOT / entry, target)
        shutil.copytree(ROOT / "fedtta_flwr", target / "fedtta_flwr", ignore=shutil.ignore_patterns("__pycache__"))
        return target

    return copy


@pytest.fixture
def flower(tmp_path: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """An environment whose `flwr` uses a home and a local SuperLink of its own, stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    home = tmp_path / "flwr"
    yield environment | {"FLWR_HOME": str(home), "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port}
    for process in marked("FLWR_HOME", home):
        os.kill(process, signal.SIGTERM)
    await_end("FLWR_HOME", home, 20)


@pytest.fixture
def flwr_run(flower: dict[str, str], tmp_path: Path):
    """Run `flwr run . --stream` in a checkout; return what it printed and the summary, None if there is none."""

    def run(root: Path, run_config: str, output: str) -> tuple[str, dict | None]:
        directory = tmp_path / output
        command = ["flwr", "run", ".", "--stream", "--run-config", f'{run_config} output-dir="{directory}"']
        done = subprocess.run(command, cwd=root, env=flower, capture_output=True, text=True, timeout=300)
        summary = directory / "summary.json"
        return done.stdout + done.stderr, json.loads(summary.read_text()) if summary.exists() else None

    return run


@pytest.fixture
def fedtta(environment: dict[str, str], tmp_path: Path):
    """Run the `fedtta` command from an empty folder."""
    (tmp_path / "cwd").mkdir()

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["fedtta", *arguments],
            cwd=tmp_path / "cwd",
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
