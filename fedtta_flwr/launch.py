"""Starting a run: in this process, through ``flwr run`` on a SuperLink of its own, or on one that devices joined."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fedtta_flwr.config import RunConfig, Scalar
from fedtta_flwr.control import connect, control_api, start_run, words
from fedtta_flwr.errors import ConfigError, FederationError, RunError
from fedtta_flwr.ports import free_port
from fedtta_flwr.processes import await_end, end_with_parent, stop
from fedtta_flwr.runs import START_SECONDS, await_start, follow

STOP_SECONDS = 20.0
STATES = "states"  # in a run directory: what clients on this machine keep at home


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


def with_states(overrides: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return overrides in which clients on this machine keep their states beside the checkpoints that need them."""
    config = RunConfig.from_flat(overrides)
    if not config.checkpoint_every or config.state_dir or config.resume:
        return dict(overrides)
    from fedtta_flwr.reports.run_directory import run_path  # with torch: not before the config is known to be good

    path = run_path(config)
    return dict(overrides) | {"output-dir": str(path), "state-dir": str(path / STATES)}


def forget_states(overrides: Mapping[str, Scalar]) -> None:
    """Remove what `with_states` has had kept: a finished run is not resumed."""
    if overrides.get("output-dir") and overrides.get("state-dir") == str(Path(str(overrides["output-dir"])) / STATES):
        shutil.rmtree(str(overrides["state-dir"]), ignore_errors=True)


def run_local(overrides: Mapping[str, Scalar], nodes: int) -> None:
    """Run a federation in this process."""
    root = app_root()
    config = RunConfig.from_flat(overrides)
    server_app, client_app = _load(root / "server_app.py"), _load(root / "client_app.py")
    from fedtta_flwr.local_grid import LocalGrid
    from fedtta_flwr.workbench import choose_device

    choose_device(config.device)  # all nodes are this process: what is wrong with it is said once, not by each
    LocalGrid(client_app.app, config.to_flat(), nodes).run_server(server_app.app)


def run_flower(overrides: Mapping[str, Scalar], nodes: int, workers: int) -> None:
    """Run a federation as a Ray simulation on a SuperLink of its own, and wait for its end.

    Raises
    ------
    ConfigError
        Before anything is started, if the config is not usable.
    FederationError
        If the SuperLink does not start, or the run does not complete.
    """
    root, config = app_root(), RunConfig.from_flat(overrides)
    from fedtta_flwr.server import check_inputs  # imports torch: not before the config is known to be good
    from fedtta_flwr.strategies.checkpoint import resumable

    if config.resume:
        resumable(config.resume)
    check_inputs(config)
    with tempfile.TemporaryDirectory(prefix="fedtta-") as home, _superlink(root, Path(home)) as (env, address):
        # Ray starts a process for each of its CPUs, and a node is in one of them at a time.
        resources = f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus={min(workers, nodes)}"
        run_id = start_run(env, root, overrides, "--federation-config", resources)
        with control_api(address, None) as client:
            follow(client, run_id)


def run_deployment(overrides: Mapping[str, Scalar], control: str, ca: Path | None) -> None:
    """Run a federation on the devices that have joined a SuperLink (``fedtta serve``), and wait for its end.

    Raises
    ------
    ConfigError
        Before anything is started, if the config is not usable.
    FederationError
        If the SuperLink cannot be reached, or the run does not complete.
    """
    from fedtta_flwr.run_config import PLACES

    root = app_root()
    RunConfig.from_flat(overrides)
    places = dict.fromkeys(PLACES, "the server and on every device; allowed: absolute")
    for key, place in (places | {"output-dir": "the server; allowed: absolute, or '~/...'"}).items():
        path = str(overrides.get(key) or "~")
        if not (path.startswith("~") or Path(path).is_absolute()):
            raise ConfigError(f"{key} = {path!r}: names a place on {place}")
    with tempfile.TemporaryDirectory(prefix="fedtta-") as home:
        run_id = start_run(connect(Path(home), control, ca), root, overrides)
    print(f"run {run_id}", flush=True)
    try:
        with control_api(control, ca) as client:
            await_start(client, run_id)
            follow(client, run_id)
    except RunError:
        raise
    except BaseException:
        # It may have run for days: whoever only stops watching, or can watch no longer, must not end it.
        where = f"{run_id} {words(control, ca)}"
        print(f"run {run_id} goes on; `fedtta log {where}` shows it, `fedtta stop {where}` ends it", file=sys.stderr)
        raise


@contextmanager
def _superlink(root: Path, home: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Start a SuperLink in simulation mode; give the environment in which ``flwr`` finds it, and its address."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    env = connect(home, address, None)
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--database", str(home / "state.db")]
    with (home / "superlink.log").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for us, who end it
            preexec_fn=end_with_parent,
        )
        try:
            _wait_until_healthy(process, port, home / "superlink.log")
            yield env, address
        finally:
            # What it started is in sessions of its own. There everyone ends with its parent: SuperExec, with it the
            # simulation (`client_app.py` sees to that), and with this Ray, which takes some seconds.
            stop([process], STOP_SECONDS)
            await_end("FLWR_HOME", home, STOP_SECONDS)


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


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fedtta_flwr_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
