"""A federation in containers for real: images, TLS, keys, three clients, a cut in the network."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docker.base_image import SITE, site_packages, write
from tests.docker.conftest import CLIENTS, ROOT, USER
from tests.docker.engine import Completed, Engine, call, running_engine

pytestmark = pytest.mark.skipif(
    os.environ.get("FEDTTA_DOCKER_TESTS") != "1",
    reason="builds images and runs a federation in containers, minutes of both cores; FEDTTA_DOCKER_TESTS=1 runs it",
)

CUT = CLIENTS[2]
#: two rounds of three clients, and time enough for a busy machine
RUN: dict[str, Any] = {
    "num-clients": 3,
    "spatial-heterogeneity": 0.34,
    "batch-size": 5,
    "corruptions": "brightness,contrast",
    "slots-per-corruption": 1,
    "shift-length": 1,
    "fedctta.noise-samples": 4,
    "device": "cpu",
    "round-timeout": 900.0,
    "join-timeout": 900.0,
}
CUT_SECONDS = 15
SUBNET = "10.77.43.0/24"
MINUTES = 60.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 15 * MINUTES) -> Any:
    """Return the first true value of a condition."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(1)
    return value


@dataclass(frozen=True)
class Federation:
    """compose.local.yml under a name of its own, on an engine."""

    engine: Engine
    command: tuple[str, ...]
    name: str

    def compose(self, *arguments: str, check: bool = True) -> Completed:
        return call(*self.command, *arguments, env=self.engine.env, check=check)

    def container(self, service: str) -> str:
        return f"{self.name}-{service}-1"

    def log(self, service: str) -> str:
        done = self.engine.docker("logs", self.container(service))
        return done.stdout + done.stderr

    def python(self, service: str, code: str) -> Completed:
        return self.compose("exec", "-T", service, "python", "-c", code, check=False)

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """What the operator's command says."""
        printed = self.compose("run", "--rm", "-T", "flwr", *arguments, "--format", "json").stdout
        return json.loads(printed[printed.index("{") :])

    def status(self, run_id: str) -> str:
        """How a run ended; empty while it goes on."""
        (run,) = self.flwr("list", "--run-id", run_id)["runs"]
        return run["status"] if run["status"].startswith("finished") else ""

    def read(self, path: str) -> str:
        return self.compose("exec", "-T", "serverapp", "cat", path, check=False).stdout

    def address(self, service: str) -> str:
        """Its address on the network of the devices."""
        path = f'{{{{(index .NetworkSettings.Networks "{self.name}_fleet").IPAddress}}}}'
        return self.engine.docker("inspect", "-f", path, self.container(service)).stdout.strip()

    def summary(self) -> dict[str, Any]:
        return json.loads(self.read("/results/run/summary.json") or "{}")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(pytest.skip) as found:
        yield found


@pytest.fixture(scope="module")
def federation(
    engine: Engine, compose: str, keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Federation]:
    """The images, built, and the whole of compose.local.yml, up; all of it is removed at the end."""
    name = f"fedtta-test-{secrets.token_hex(4)}"
    images = {f"FEDTTA_{part.upper()}_IMAGE": f"{name}/{part}" for part in ("server", "client")}
    base = f"{name}/python"
    user = USER if os.geteuid() == 0 else os.geteuid()
    settings = {"FEDTTA_KEYS": str(keys), "FEDTTA_USER": f"{user}:{user}", "FEDTTA_PYTHON_IMAGE": base}
    # What a test needs alone is overridden: builds use the machine's network, packages are mounted, addresses stay.
    services = ("superlink", "serverapp", "flwr", "register", *CLIENTS)
    mount = {"type": "bind", "source": str(site_packages()), "target": SITE, "read_only": True}
    override: dict[str, Any] = {service: {"volumes": [mount]} for service in services}
    for service in ("superlink", *CLIENTS):
        override[service]["build"] = {"network": "host"}
    path = tmp_path_factory.mktemp("compose") / "override.json"
    networks = {"fleet": {"ipam": {"config": [{"subnet": SUBNET}]}}}
    path.write_text(json.dumps({"services": override, "networks": networks}))
    files = ("-f", str(ROOT / "docker" / "compose.local.yml"), "-f", str(path))
    engine = Engine(engine.env | settings | images | {"DOCKER_BUILDKIT": "0"})
    federation = Federation(engine, (compose, *files, "-p", name), name)
    archive = path.with_name("base.tar")
    try:
        with archive.open("wb") as file:
            write(file)
        engine.docker("import", str(archive), base)
        federation.compose("build", "superlink", CLIENTS[0])
        federation.compose("up", "-d", "--no-build")
        yield federation
    finally:
        federation.compose("--profile", "*", "down", "-v", "-t", "5", "--remove-orphans", check=False)
        engine.docker("image", "rm", "-f", *images.values(), check=False)
        engine.remove_image(base)
        left = [
            engine.docker(*words, "--filter", f"label=com.docker.compose.project={name}").stdout
            for words in (("ps", "-aq"), ("volume", "ls", "-q"), ("network", "ls", "-q"))
        ]
        assert left == ["", "", ""]


@pytest.fixture(scope="module")
def finished(federation: Federation) -> dict[str, Any]:
    """Two rounds: in the first a client is cut off the network, in the second the SuperLink dies."""
    pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in (RUN | {"output-dir": "/results/run"}).items())
    run_id = str(federation.flwr("run", "/app", "--run-config", pairs)["run-id"])

    network, cut = f"{federation.name}_fleet", federation.container(CUT)
    wait_for(lambda: "Received" in federation.log(CUT).partition("ROUND 1")[2], "the first round")
    address = federation.address(CUT)
    federation.engine.docker("network", "disconnect", network, cut)
    time.sleep(CUT_SECONDS)
    cut_off = federation.python(CUT, "import socket; socket.create_connection(('superlink', 9092), timeout=5)")
    others = [federation.log(client) for client in CLIENTS]
    federation.engine.docker("network", "connect", "--ip", address, network, cut)

    wait_for(lambda: "ROUND 2" in federation.log(CUT), "the second round")
    # It is the child of the container's first process, which nothing can kill from inside.
    kill = "import os; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), 9)"
    assert federation.python("superlink", kill).returncode == 0
    wait_for(lambda: federation.summary().get("finished"), "the end of the run")
    status = wait_for(lambda: federation.status(run_id), "the run's status")
    inspected = json.loads(federation.engine.docker("inspect", federation.container("superlink")).stdout)[0]
    return {
        "status": status,
        "summary": federation.summary(),
        "cut off": cut_off.returncode != 0 and not any("ROUND 2" in log for log in others),
        "restarts": inspected["RestartCount"],
    }


def test_the_run_ends_well_in_spite_of_a_cut_and_a_crash(finished: dict[str, Any]) -> None:
    assert finished["cut off"]
    assert finished["restarts"] == 1
    assert finished["status"] == "finished:completed"
    assert finished["summary"]["rounds"] == 2
    assert finished["summary"]["screened"] == {}


def test_its_scores_are_those_of_a_run_in_one_process(
    finished: dict[str, Any], federation: Federation, run_local: Callable[..., Any]
) -> None:
    local = run_local(nodes=3, hosting=CLIENTS, **RUN)
    accuracy = finished["summary"]["accuracy"]
    assert set(accuracy["post"]["per_client"]) == set(CLIENTS)
    assert accuracy == local.summary["accuracy"]
    lines = [json.loads(line) for line in federation.read("/results/run/rounds.jsonl").splitlines()]
    kept = ("round", "clients", "samples", "accuracy", "self_weight", "bytes")
    assert [{k: line[k] for k in kept} for line in lines] == [{k: line[k] for k in kept} for line in local.lines()]


def test_a_device_reaches_the_fleet_api_and_nothing_else(federation: Federation) -> None:
    connect = "import socket; socket.create_connection(('superlink', {}), timeout=5)"
    assert federation.python(CLIENTS[0], connect.format(9092)).returncode == 0
    assert "refused" in federation.python(CLIENTS[0], connect.format(8000)).stderr
    assert federation.python("serverapp", connect.format(8000)).returncode == 0


def test_nothing_is_published(federation: Federation) -> None:
    ports = federation.engine.docker(
        "inspect", "-f", "{{json .NetworkSettings.Ports}}", federation.container("superlink")
    )
    assert not any(json.loads(ports.stdout).values())


@pytest.mark.parametrize("service", ["superlink", "serverapp", *CLIENTS])
def test_a_container_can_write_where_it_must_and_nowhere_else(federation: Federation, service: str) -> None:
    code = """
import os
assert os.getuid() != 0
for path in ("/state/x", "/tmp/x"):
    open(path, "w").close()
    os.remove(path)
for path in ("/app/x", "/etc/x", "/data/x", "/run/secrets/ca.crt"):
    try:
        open(path, "a").close()
    except OSError:
        continue
    raise SystemExit(f"{path}: can be written")
status = open("/proc/self/status").read()
assert "CapBnd:\\t0000000000000000" in status and "NoNewPrivs:\\t1" in status, status
(root,) = [line.split()[3] for line in open("/proc/mounts") if line.split()[1] == "/"]
assert "ro" in root.split(","), root
"""
    done = federation.python(service, code)
    assert done.returncode == 0, done.stderr


def test_what_runs_is_healthy(federation: Federation, finished: dict[str, Any]) -> None:
    def states() -> set[str]:
        listed = federation.compose("ps", "--format", "{{.Service}} {{.Health}}").stdout.split("\n")
        return {line for line in listed if line}

    expected = {f"{service} healthy" for service in ("superlink", "serverapp", *CLIENTS)}
    wait_for(lambda: states() == expected, "health", seconds=2 * MINUTES)


def test_no_secret_enters_the_build_context(engine: Engine, tmp_path: Path) -> None:
    planted = {"docker/keys/server.key", "docker/.env", "fedtta_flwr/models/server.key", ".git/config", "id_ed25519"}
    own = {"pyproject.toml", "fedtta_flwr/client.py", "fedtta_flwr/models/base.py", "docker/requirements.py"}
    for name in planted | own:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("content")
    (tmp_path / ".dockerignore").write_text((ROOT / ".dockerignore").read_text())
    (tmp_path / "Dockerfile").write_text('FROM scratch\nCOPY . /\nCMD ["none"]\n')
    tag = f"fedtta-test-{secrets.token_hex(4)}"
    env = engine.env | {"DOCKER_BUILDKIT": "0"}
    call("docker", "build", "-q", "-t", tag, "-f", "Dockerfile", ".", cwd=tmp_path, env=env)
    try:
        container = engine.docker("create", tag).stdout.strip()
        engine.docker("export", "-o", str(tmp_path / "sent.tar"), container)
        engine.docker("rm", container)
    finally:
        engine.docker("image", "rm", "-f", tag)
    listed = call("tar", "-tf", str(tmp_path / "sent.tar")).stdout.split()
    assert own <= set(listed)
    assert not planted & set(listed)
