"""A federation of separate processes that speak gRPC over TLS with a key for each device, and who is kept out."""

import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.control_pb2_grpc import ControlStub
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedtta_flwr import fleet, nodes
from fedtta_flwr.credentials import load_key
from fedtta_flwr.deploy import Address
from fedtta_flwr.doctor import examine
from fedtta_flwr.launch import run_local
from fedtta_flwr.run_config import read_overrides
from fedtta_flwr.superlink import LARGEST_REQUEST
from tests.docker.conftest import load_yaml

ROOT = Path(__file__).parents[2]
CLIENTS = ("cam-07", "cam-12", "gate")
RUN = (
    "clients='gate,cam-12,cam-07' num-clients=3 rounds=2 slots-per-corruption=2 shift-length=1 batch-size=5 "
    "spatial-heterogeneity=0.7 corruptions='brightness,contrast'"
)
SLOW = 900.0  # seconds that anything may take on a busy machine


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now; held together, so that they differ."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SLOW
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@dataclass
class Federation:
    """A server, and how to start more processes beside it; all of them end with it."""

    folder: Path
    env: dict[str, str]
    fleet: Address
    control: Address
    processes: list[subprocess.Popen[str]]

    @property
    def ca(self) -> Path:
        return self.folder / "keys" / "ca.crt"

    def key(self, name: str) -> Path:
        return self.folder / "keys" / "clients" / name

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def start(self, name: str, *command: str) -> subprocess.Popen[str]:
        """Start a process whose output goes into NAME.log."""
        with (self.folder / f"{name}.log").open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.env, stdout=output, stderr=subprocess.STDOUT, text=True
            )
        self.processes.append(process)
        return process

    def join(self, name: str, key: str = "", host: str = "127.0.0.1", ca: Path | None = None) -> subprocess.Popen[str]:
        """Start a device, by default with the key of its name."""
        command = ["fedtta", "join", f"{host}:{self.fleet.port}", "--client", name, "--ca", str(ca or self.ca)]
        command += ["--key", str(self.key(key or name)), "--state-dir", str(self.folder / f"state-{name}")]
        return self.start(name, *command)

    def fedtta(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, here."""
        return subprocess.run(
            ["fedtta", *arguments], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=SLOW
        )

    def run(self, output: Path, more: str = "") -> subprocess.CompletedProcess[str]:
        """Start a run on the devices and wait for its end."""
        where = ["--control", str(self.control), "--ca", str(self.ca)]
        what = ["--run-config", f"{RUN} {more}", "--output", str(output)]
        return self.fedtta("run", "--engine", "deployment", *where, *what)

    def online(self) -> list[str]:
        return [node.name for node in nodes.list_nodes(str(self.control), self.ca) if node.status == "online"]


def make_keys(folder: Path, *arguments: str) -> None:
    subprocess.run([str(ROOT / "docker" / "keys.sh"), *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def federation(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A server and three devices; the first of them was there before the server."""
    folder = tmp_path_factory.mktemp("federation")
    make_keys(folder, "server", "keys", "fed.example.org")
    make_keys(folder, "server", "other", "elsewhere.example.org")
    make_keys(folder, "client", "keys", *CLIENTS, "stranger")
    fleet_port, control_port = free_ports(2)
    env = environment | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1"}
    made = Federation(folder, env, Address("127.0.0.1", fleet_port), Address("127.0.0.1", control_port), [])
    try:
        made.join(CLIENTS[0])
        until(lambda: "next try" in made.log(CLIENTS[0]), "the first device does not look for the server")
        server = ["serve", "--certificates", "keys", "--host", "0.0.0.0", "--fleet-port", str(fleet_port)]
        made.start("server", "fedtta", *server, "--control", str(made.control), "--state-dir", str(folder / "server"))
        until(lambda: "Application startup complete" in made.log("server"), "the server does not start")
        for name in CLIENTS:
            public_key = made.key(name).with_suffix(".pub")
            nodes.register(str(made.control), made.ca, public_key, name)
        for name in CLIENTS[1:]:
            made.join(name)
        until(lambda: sorted(made.online()) == sorted(CLIENTS), "not all devices have joined")
        yield made
    finally:
        for process in reversed(made.processes):  # the devices before the server
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(made.processes):
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_a_run_equals_the_one_in_a_single_process(federation: Federation) -> None:
    output = federation.folder / "deployed"
    began = time.monotonic()
    done = federation.run(output)
    took = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr + federation.log("server") + federation.log("gate")
    assert "accuracy in %" in done.stdout  # the log was streamed
    polls = federation.log("server").count("POST /v1/runtime/pull-messages")  # each is a line in the server's log
    assert polls < 3 * took

    alone = federation.folder / "alone"
    run_local(read_overrides([RUN]) | {"output-dir": str(alone)}, nodes=3)
    found, expected = (json.loads((path / "summary.json").read_text()) for path in (output, alone))
    assert found["finished"]
    assert found["rounds"] == 2
    assert found["accuracy"] == expected["accuracy"]
    assert sorted(found["accuracy"]["post"]["per_client"]) == sorted(CLIENTS)
    assert found["accuracy"]["post"]["micro"] > found["accuracy"]["source"]["micro"]
    with np.load(output / "collaboration.npz") as mine, np.load(alone / "collaboration.npz") as theirs:
        assert mine["clients"].tolist() == theirs["clients"].tolist() == sorted(CLIENTS)
        assert mine["weights"].tobytes() == theirs["weights"].tobytes()

    # A run that fails (the place is taken) says so, though `flwr run` would not.
    failed = federation.run(output)
    assert failed.returncode == 2
    assert failed.stderr.strip().splitlines()[-1].startswith("error: run ")
    assert "finished:failed" in failed.stderr
    assert "holds files already" in failed.stdout + failed.stderr


def test_who_does_not_belong_is_kept_out_and_told_why(federation: Federation) -> None:
    refusals = {
        "stranger": (federation.join("stranger"), "does not know this device's key"),
        "wrong-ca": (
            federation.join("wrong-ca", "gate", ca=federation.folder / "other" / "ca.crt"),
            "was not signed by",
        ),
        "wrong-host": (federation.join("wrong-host", "gate", host="127.0.0.2"), "is not for 127.0.0.2 but for"),
    }
    for name, (process, reason) in refusals.items():
        assert process.wait(timeout=SLOW) == 2, federation.log(name)
        (line,) = federation.log(name).splitlines()
        assert line.startswith("error: ")
        assert reason in line
    assert "No SuperNode found with the given public key" in federation.log("server")
    assert "stranger" not in federation.online()


def test_flower_itself_refuses_them(federation: Federation) -> None:
    """The checks of `fedtta join` are for people; the server does not rely on them."""
    address = f":{federation.fleet.port}"
    keyed = ["--auth-supernode-private-key", str(federation.key("stranger"))]
    trusting = ["--root-certificates", str(federation.ca)]
    cases = {
        "raw-no-key": (["--superlink", f"127.0.0.1{address}", *trusting], "SuperNode authentication is enabled"),
        "raw-wrong-ca": (
            ["--superlink", f"127.0.0.1{address}", "--root-certificates", "other/ca.crt", *keyed],
            "CERTIFICATE_VERIFY_FAILED",
        ),
        "raw-wrong-host": (
            ["--superlink", f"127.0.0.2{address}", *trusting, *keyed],
            "Hostname Verification Check failed",
        ),
        "raw-no-tls": (["--superlink", f"127.0.0.1{address}", "--insecure"], "failed to connect"),
    }
    started = {}
    for (name, (arguments, _)), port in zip(cases.items(), free_ports(len(cases)), strict=True):
        federation.env["FLWR_HOME"] = str(federation.folder / name)
        command = ["flower-supernode", *arguments, "--port", str(port), "--max-retries", "0"]
        started[name] = federation.start(name, *command)
    del federation.env["FLWR_HOME"]
    for name, process in started.items():
        assert process.wait(timeout=SLOW) != 0, federation.log(name)
        assert cases[name][1].lower() in federation.log(name).lower()
    assert "ApiError:2001" in federation.log("server")


def test_a_device_is_online_by_its_own_key_alone(federation: Federation) -> None:
    """A key of anybody's is enough to sign; the node that it makes online must be its own."""
    public = public_key_to_bytes(load_key(federation.key("cam-07")).public_key())
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=100)
    with fleet._Fleet(federation.fleet, federation.ca, load_key(federation.key("stranger"))) as stranger:
        assert "signed by another key" in stranger.ask("ActivateNode", request)


def test_nobody_fills_the_servers_memory_before_it_is_known_who_asks(federation: Federation) -> None:
    request = PushObjectRequest(object_id="x", object_content=bytes(LARGEST_REQUEST))
    with (
        fleet._Fleet(federation.fleet, federation.ca, load_key(federation.key("stranger"))) as stranger,
        pytest.raises(fleet.NotYet, match="RESOURCE_EXHAUSTED"),
    ):
        stranger.ask("PushObject", request)


def test_the_control_api_stays_at_home(federation: Federation) -> None:
    elsewhere = "127.0.0.2"  # as another machine would: not the address that it is bound to
    socket.create_connection((elsewhere, federation.fleet.port), timeout=10).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((elsewhere, federation.control.port), timeout=10)

    # Nor is it behind the devices' port, in neither of its forms.
    credentials = grpc.ssl_channel_credentials(federation.ca.read_bytes())
    with grpc.secure_channel(str(federation.fleet), credentials) as channel, pytest.raises(grpc.RpcError) as caught:
        ControlStub(channel).ListNodes(ListNodesRequest(), timeout=30)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert http_answer(federation.control, federation.ca).startswith(b"HTTP/1.1 ")
    assert not http_answer(federation.fleet, federation.ca).startswith(b"HTTP/")


def http_answer(address: Address, ca: Path) -> bytes:
    context = ssl.create_default_context(cafile=str(ca))
    try:
        with (
            socket.create_connection(address, timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as secure,
        ):
            secure.sendall(b"POST /v1/control/list-nodes HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n")
            return secure.recv(100)
    except OSError:
        return b""


def test_the_doctor_finds_what_is_wrong(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def report(name: str) -> dict[str, str]:
        found = examine(server=federation.fleet, ca=federation.ca, key=federation.key(name), state=federation.folder)
        return {finding.text: finding.level for finding in found}

    good = report("gate")
    assert set(good.values()) == {"ok"}
    assert "the server knows this key" in good
    assert [level for text, level in report("stranger").items() if "does not know this key" in text] == ["FAIL"]

    key = load_key(federation.key("gate"))
    for seconds, level in ((60, "FAIL"), (3, "warn"), (-200, "warn"), (-7200, "FAIL")):

        class Clock(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Any:
                return datetime.now(tz) + timedelta(seconds=seconds)  # noqa: B023 - used within this turn only

        monkeypatch.setattr(fleet, "datetime", Clock)
        ahead = fleet.clock_error(federation.fleet, federation.ca, key)
        assert ahead == pytest.approx(seconds, abs=1.5)
        clock = [(text, found) for text, found in report("gate").items() if text.startswith("this clock is")]
        assert [found for _, found in clock] == [level], clock
        if level == "FAIL":
            with pytest.raises(fleet.NotYet, match="set it"):
                fleet.is_registered(federation.fleet, federation.ca, key)


def test_a_revoked_device_is_out(federation: Federation) -> None:
    where = ["--control", str(federation.control), "--ca", str(federation.ca)]
    process = next(p for p in federation.processes if "gate" in p.args and p.poll() is None)
    done = federation.fedtta("revoke", "gate", *where)
    assert done.returncode == 0, done.stderr
    assert process.wait(timeout=SLOW) == 2
    assert not fleet.is_registered(federation.fleet, federation.ca, load_key(federation.key("gate")))
    again = federation.fedtta("register", str(federation.key("gate").with_suffix(".pub")), "--name", "gate", *where)
    assert again.returncode == 2
    assert again.stderr.startswith(f"error: {federation.key('gate')}.pub: the server has this key already, or had it")
    listed = federation.fedtta("nodes", *where).stdout.splitlines()
    assert all(line[34:38].isdigit() for line in listed), listed  # the times stand in one column
    expected = {"cam-07": "online", "cam-12": "online", "gate": "unregistered"}
    assert {line.split()[0]: line.split()[1] for line in listed} == expected
    told = json.loads(federation.fedtta("nodes", *where, "--json").stdout)
    assert {node["name"]: node["status"] for node in told} == expected
    assert [[node["since"], node["node_id"]] for node in told] == [line[34:].rsplit(maxsplit=1) for line in listed]


def test_nobody_is_a_client_that_its_key_was_not_registered_for(federation: Federation) -> None:
    where = ["--control", str(federation.control), "--ca", str(federation.ca)]
    key = federation.key("stranger").with_suffix(".pub")
    taken = federation.fedtta("register", str(key), "--name", "spare,cam-07", *where)
    assert taken.returncode == 2
    assert "has cam-07 already" in taken.stderr
    assert federation.fedtta("register", str(key), "--name", "spare,other", *where).returncode == 0
    device = federation.join("gate", key="stranger")
    until(lambda: "spare,other" in federation.online(), "the stranger has not joined")
    done = federation.run(federation.folder / "claimed", "join-timeout=30")
    assert done.returncode == 2
    assert "says that it hosts gate, and is registered as spare,other: " in done.stdout
    assert "1 of 3 clients did not join" in done.stdout + done.stderr
    assert federation.fedtta("revoke", "other", *where).returncode == 0
    device.wait(timeout=SLOW)


def test_a_killed_device_takes_its_supernode_with_it(federation: Federation) -> None:
    """Or that one would stay online, and keep its successor out for ever."""
    process = next(p for p in federation.processes if "cam-12" in p.args and p.poll() is None)
    process.kill()
    until(lambda: federation.online() == ["cam-07"], "the SuperNode of the killed device lives on")
    assert os.path.exists(federation.folder / "state-cam-12")


def test_compose_registers_each_key_once_however_often_it_starts(federation: Federation) -> None:
    names = ("client-00", "client-01", "client-02")
    make_keys(federation.folder, "client", "keys", *names)
    (script,) = load_yaml(ROOT / "docker" / "compose.local.yml")["services"]["register"]["command"]
    for inside, outside in (
        ("/run/secrets/ca.crt", str(federation.ca)),
        ("/run/secrets", str(federation.key("client-00").parent)),
        ("superlink:8000", str(federation.control)),
        ("$$", "$"),
    ):
        script = script.replace(inside, outside)
    for registered in (names, ()):
        command = ["sh", "-ec", script]
        done = subprocess.run(command, env=federation.env, capture_output=True, text=True, timeout=SLOW)
        assert done.returncode == 0, done.stderr
        assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(registered)
    known = [node.name for node in nodes.list_nodes(str(federation.control), federation.ca)]
    assert sorted(known) == sorted((*names, *CLIENTS, "spare,other"))
