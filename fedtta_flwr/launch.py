"""Starting a run: in this process, through ``flwr run`` on a SuperLink of its own, or on one that devices joined."""

import errno
import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fedtta_flwr.config import RunConfig, Scalar, describe_keys
from fedtta_flwr.control import connect, control_api, start_run, words
from fedtta_flwr.deploy import Address
from fedtta_flwr.errors import ConfigError, FederationError, RunError
from fedtta_flwr.processes import await_end, end_with_parent, stop
from fedtta_flwr.registry import ADAPTERS, HEADS, STRATEGIES
from fedtta_flwr.runs import START_SECONDS, await_start, follow

STOP_SECONDS = 20.0


def catalogue() -> dict[str, list[tuple[str, str]]]:
    """Return (name, explanation) of everything that a run config can name, by kind."""
    from fedtta_flwr.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS
    from fedtta_flwr.data.datasets import DATASETS
    from fedtta_flwr.models import MODELS

    return {
        "strategies": [(name, text) for name, (_, text) in STRATEGIES.items()],
        "adapters": [(name, method.text) for name, method in ADAPTERS.items()],
        "heads": [(name, text) for name, (_, text) in HEADS.items()],
        "datasets": list(DATASETS.items()),
        "corruptions": [
            ("none", "clean images"),
            *((name, "") for name in CORRUPTIONS),
            *((name, "beyond the papers' fifteen") for name in EXTRA_CORRUPTIONS),
        ],
        "models": [
            *MODELS.items(),
            ("robustbench:ID", "a network of the RobustBench zoo, e.g. robustbench:Standard"),
            ("MODULE:FUNCTION", "a network of your own package (docs/data.md)"),
        ],
        "configs": _files("configs"),
        "presets": _files("configs/presets"),
        "benchmarks": _files("configs/bench"),
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
        If the SuperLink does not start, or the run does not complete.
    """
    root, config = app_root(), RunConfig.from_flat(overrides)
    from fedtta_flwr.server import check_inputs  # imports torch: not before the config is known to be good

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


def free_port() -> int:
    """Return a port of this machine's that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_free(option: str, address: Address) -> None:
    """Refuse an address of this machine's on which a server cannot listen; `option` names another.

    Raises
    ------
    ConfigError
        Somebody else listens there, or it is no address of this machine's.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: one may just have ended
            probe.bind(place)
    except (OSError, UnicodeError) as error:  # no host name can have an empty part
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        in_use = f"port {address.port} is in use (by a server that is still ending? then wait)"
        fault = in_use if taken else f"it cannot be listened on ({getattr(error, 'strerror', error)})"
        raise ConfigError(f"{address}: {fault}; give another with {option}") from None


def check_apart(fleet: Address, control: Address) -> None:
    """Refuse a server's two addresses where one would keep it from listening on the other.

    Raises
    ------
    ConfigError
        They have one port, and not each an address of its own.
    """
    if fleet.port != control.port:
        return
    mine, theirs = ({place[0] for *_, place in socket.getaddrinfo(*both)} for both in (control, fleet))
    if mine & theirs or (mine | theirs) & {"0.0.0.0", "::"}:
        raise ConfigError(f"--control {control}: devices are awaited there, too ({fleet}); give another --fleet-port")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fedtta_flwr_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _files(folder: str) -> list[tuple[str, str]]:
    """Return the config files in a folder of the app, and what they say they are."""
    return [(str(path), _headline(path)) for path in sorted((app_root() / folder).glob("*.toml"))]


def _headline(path: Path) -> str:
    """Return what a config file's comment says after the command that runs it."""
    comments = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    return comments[1] if len(comments) > 1 else ""
