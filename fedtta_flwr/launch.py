"""Starting a run: in this process, or through ``flwr run`` on a SuperLink of its own."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from fedtta_flwr.config import RunConfig, Scalar, describe_keys
from fedtta_flwr.errors import ConfigError, FederationError
from fedtta_flwr.registry import ADAPTERS, STRATEGIES

START_SECONDS = 60.0
QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
}


def catalogue() -> dict[str, list[tuple[str, str]]]:
    """Return (name, explanation) of everything that a run config can name, by kind."""
    from fedtta_flwr.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS
    from fedtta_flwr.data.datasets import DATASETS
    from fedtta_flwr.models import MODELS

    return {
        "strategies": [(name, text) for name, (_, text) in STRATEGIES.items()],
        "adapters": [(name, method.text) for name, method in ADAPTERS.items()],
        "datasets": list(DATASETS.items()),
        "corruptions": [
            ("none", "clean images"),
            *((name, "") for name in CORRUPTIONS),
            *((name, "beyond the papers' fifteen") for name in EXTRA_CORRUPTIONS),
        ],
        "models": [*MODELS.items(), ("robustbench:ID", "a network of the RobustBench zoo, e.g. robustbench:Standard")],
        "configs": [(str(path), _headline(path)) for path in sorted((app_root() / "configs").glob("*.toml"))],
        "keys": [(key, f"{text} [{json.dumps(default)}]") for key, default, text in describe_keys()],
    }


def describe_adapter(name: str) -> dict[str, str]:
    """Return what is to be known of an adapter: title -> text; the options as a run config would name them."""
    method, options = ADAPTERS[name], RunConfig().options(name).model_dump(by_alias=True)
    return {
        "paper": method.paper,
        "updates": method.updates,
        "uploads": method.uploads,
        "keeps": method.keeps,
        "predicts": method.predicts,
        "options": ", ".join(f"{name}.{key} = {json.dumps(default)}" for key, default in options.items()) or "none",
    }


def app_root() -> Path:
    """Return the folder with server_app.py, client_app.py and pyproject.toml that belongs to this package.

    Raises
    ------
    ConfigError
        If the working directory is another checkout than the one that is installed: the run would not be its code.
    """
    package = Path(__file__).resolve().parent
    root = package.parent if (package.parent / "server_app.py").is_file() else package / "app"
    here = Path.cwd()
    if here != root and (here / "server_app.py").is_file() and (here / "fedtta_flwr").is_dir():
        raise ConfigError(
            f"the installed fedtta_flwr belongs to {root}, but this is another checkout, {here}: install it here "
            f"(pip install -e .), or run from another folder"
        )
    return root


def run_local(overrides: Mapping[str, Scalar], nodes: int) -> None:
    """Run a federation in this process."""
    root = app_root()
    config = RunConfig.from_flat(overrides)
    server_app, client_app = _load(root / "server_app.py"), _load(root / "client_app.py")
    from fedtta_flwr.local_grid import LocalGrid

    LocalGrid(client_app.app, config.to_flat(), nodes).run_server(server_app.app)


def run_flower(overrides: Mapping[str, Scalar], nodes: int, workers: int) -> None:
    """Run a federation as a Ray simulation on a SuperLink of its own, and wait for its end.

    Raises
    ------
    ConfigError
        Before anything is started, if the config is not usable.
    FederationError
        If the SuperLink does not start, or the run does not complete (``flwr run`` itself would exit with 0).
    """
    root, config = app_root(), RunConfig.from_flat(overrides)
    from fedtta_flwr.server import check_inputs  # imports torch: not before the config is known to be good

    check_inputs(config)
    with tempfile.TemporaryDirectory(prefix="fedtta-") as home, _superlink(root, Path(home)) as env:
        arguments = ["run", str(root), "own", "--format", "json", "--federation-config"]
        arguments.append(f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus={workers}")
        if overrides:
            arguments += ["--run-config", _pairs(overrides)]
        started = _flwr(env, *arguments)
        if not started.get("success"):
            raise FederationError(f"flwr run: {started.get('error-message', started)}")
        run_id = str(started["run-id"])
        subprocess.run([*_FLWR, "log", run_id, "own", "--stream"], env=env, check=False)
        status, details = _wait_for_end(env, run_id)
        if status != "finished:completed":
            raise FederationError(f"run {run_id} ended as {status}: {details}")


_FLWR = [
    sys.executable,
    "-c",
    "import sys; from flwr.cli.app import app; sys.argv[0] = 'flwr'; app()",
]


@contextmanager
def _superlink(root: Path, home: Path) -> Iterator[dict[str, str]]:
    """Start a SuperLink in simulation mode and give the environment in which ``flwr`` finds it as ``own``."""
    port = _free_port()
    env = os.environ | QUIET | {"FLWR_HOME": str(home)}
    # The SuperLink starts its helpers by name: they must be those of this Python.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "own"\n\n[superlink.own]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--database", str(home / "state.db")]
    with (home / "superlink.log").open("wb") as output:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            _wait_until_healthy(process, port, home / "superlink.log")
            yield env
        finally:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    lines = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise FederationError(f"the SuperLink did not start on port {port}: {' / '.join(lines) or 'no output'}")


def _wait_for_end(env: Mapping[str, str], run_id: str) -> tuple[str, str]:
    while True:
        runs = _flwr(env, "list", "own", "--run-id", run_id, "--format", "json").get("runs", [])
        status = str(runs[0]["status"]) if runs else "unknown"
        if not runs or status.startswith("finished"):
            return status, str(runs[0].get("status-details", "")) if runs else "the SuperLink knows no such run"
        time.sleep(0.5)


def _flwr(env: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    result = subprocess.run([*_FLWR, *arguments], env=env, capture_output=True, text=True, check=False)
    start = result.stdout.find("{")
    try:
        parsed = json.loads(result.stdout[start:]) if start >= 0 else None
    except json.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        text = (result.stderr or result.stdout).strip().splitlines()
        raise FederationError(f"flwr {arguments[0]}: {text[-1] if text else f'exit status {result.returncode}'}")
    return parsed


def _pairs(overrides: Mapping[str, Scalar]) -> str:
    """Return overrides in Flower's ``key=value`` syntax."""
    return " ".join(
        f"{key}={json.dumps(value) if isinstance(value, str | bool) else repr(value)}"
        for key, value in overrides.items()
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fedtta_flwr_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _headline(path: Path) -> str:
    """Return what a config file's comment says after the command that runs it."""
    comments = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    return comments[1] if len(comments) > 1 else ""
