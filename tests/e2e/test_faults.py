"""What a real federation survives: a killed device, run or server, links that are cut, and whoever stops watching.

Devices, server and run are processes of their own on real sockets. A device can be held inside a visit, so that a fault
strikes at a known place. Each result is compared with a run in one process of those who took part.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedtta_flwr.config import RunConfig
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.run_config import read_overrides
from fedtta_flwr.server import federation
from tests.conftest import load_root
from tests.e2e.test_deployment import SLOW, free_ports, until

CLIENTS = ("client-00", "client-01", "client-02")
VICTIM = CLIENTS[1]
RUN = (
    "num-clients=3 classes=10 shift-length=3 batch-size=5 spatial-heterogeneity=0.7 "
    "corruptions='brightness,contrast' adapter='tent' checkpoint-every=1"
)
#: a stream that stops where a file says so, until the file is gone
STREAM = """
import os
import time
from pathlib import Path

from fedtta_flwr.data.build import build_stream, open_data


class Held:
    def __init__(self, stream, client):
        self._stream, self._client, self.domains = stream, client, stream.domains

    def __len__(self):
        return len(self._stream)

    def batch(self, slot):
        hold = Path(os.environ["HOLDS"], f"{self._client}-{slot}")
        while hold.exists():
            hold.with_suffix(".reached").touch()
            time.sleep(0.05)
        return self._stream.batch(slot)


def stream(config, client):
    config = config.model_copy(update={"stream": ""})
    return Held(build_stream(config, client, open_data(config)), client)
"""


class Fleet:
    """A server and three devices, without TLS, on this host or each on one of its own."""

    def __init__(self, folder: Path, env: Mapping[str, str], network: "Network | None" = None) -> None:
        self.folder = folder
        self.network = network
        self.address = network.address("server") if network else "127.0.0.1"
        self.ports = dict(zip(("fleet", "control"), free_ports(2), strict=True))
        (folder / "holds").mkdir()
        (folder / "held_streams.py").write_text(STREAM)
        self.env = dict(env) | {
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "OMP_NUM_THREADS": "1",
            "HOLDS": str(folder / "holds"),
            "PYTHONPATH": os.pathsep.join([str(folder), env.get("PYTHONPATH", "")]),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process, leader of a group of its own, whose output goes to NAME.log."""
        host = "server" if name == "run" else name
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [*(self.network.inside(host) if self.network else ()), *command],
                cwd=self.folder, env=self.env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
            )  # fmt: skip
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def serve(self) -> None:
        """Start the server, or start it again, and wait until it is there."""
        before = (
            self.log("server").count("Application startup complete") if (self.folder / "server.log").exists() else 0
        )
        command = ["fedtta", "serve", "--insecure", "--host", self.address, "--fleet-port", str(self.ports["fleet"])]
        command += ["--control", f"127.0.0.1:{self.ports['control']}", "--state-dir", str(self.folder / "server")]
        self.start("server", *command)
        until(lambda: self.log("server").count("Application startup complete") > before, "no server")

    def join(self, client: str, *more: str) -> None:
        """Start a device that hosts one client."""
        command = ["fedtta", "join", f"{self.address}:{self.ports['fleet']}", "--insecure", "--client", client]
        command += ["--stream", "held_streams:stream", "--state-dir", str(self.folder / f"state-{client}"), *more]
        self.start(client, *command)

    def run(self, *more: str, slots: int = 3, timeout: float = 40.0) -> None:
        """Start a run of two corruptions of so many slots; it goes on in the background."""
        command = ["fedtta", "run", "--engine", "deployment", "--insecure"]
        command += ["--control", f"127.0.0.1:{self.ports['control']}", *more]
        if "--resume" not in more:
            changed = f"{RUN} slots-per-corruption={slots} round-timeout={timeout}"
            command += ["--run-config", changed, "--output", str(self.folder / "run")]
        self.start("run", *command)

    def ended(self) -> int:
        """Wait for the run's end."""
        until(lambda: self.processes["run"].poll() is not None, "the run goes on and on: " + self.log("run")[-2000:])
        return int(self.processes["run"].returncode)

    def hold(self, client: str, slot: int) -> Callable[[], None]:
        """Hold a device inside its visit to a slot; return what lets it go on."""
        hold = self.folder / "holds" / f"{client}-{slot}"
        hold.touch()
        return hold.unlink

    def wait_inside(self, client: str, slot: int) -> None:
        reached = self.folder / "holds" / f"{client}-{slot}.reached"
        until(
            reached.exists, f"{client} does not reach slot {slot}: {self.log(client)[-2000:]} {self.log('run')[-2000:]}"
        )

    def kill(self, name: str) -> None:
        """Kill a process and all that it started, as a power cut would."""
        for pid in [self.processes[name].pid, *descendants(self.processes[name].pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.processes.pop(name).wait()

    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end(self) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name)


class Relay:
    """Passes connections on to a port of this machine's until it is cut, as a tunnel does."""

    def __init__(self, target: int, port: int = 0) -> None:
        self._target = target
        self._open = [socket.create_server(("127.0.0.1", port))]
        self.port = int(self._open[0].getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = self._open[0].accept()[0], socket.create_connection(("127.0.0.1", self._target))
                self._open += ends
                for source, target in (ends, ends[::-1]):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Network:
    """Hosts with a network stack of their own, each by a cable on one switch: network namespaces of Linux."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"fedtta{os.getpid()}"
        self._hosts = list(hosts)

    def plug(self) -> None:
        """Set all up."""
        ip("netns", "add", self._prefix)  # the switch
        self._on_switch("link", "add", "switch", "type", "bridge")
        self._on_switch("link", "set", "switch", "up")
        for i, host in enumerate(self._hosts):
            ip("netns", "add", self._namespace(host))
            ip("-n", self._prefix, "link", "add", f"port{i}", "type", "veth",
               "peer", "name", "cable", "netns", self._namespace(host))  # fmt: skip
            self._on_switch("link", "set", f"port{i}", "master", "switch", "up")
            ip("-n", self._namespace(host), "address", "add", f"{self.address(host)}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", self._namespace(host), "link", "set", device, "up")

    def unplug(self) -> None:
        for name in [self._prefix, *map(self._namespace, self._hosts)]:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def address(self, host: str) -> str:
        return f"10.77.0.{10 + self._hosts.index(host)}"

    def inside(self, host: str) -> list[str]:
        """What comes before a command that shall run on a host."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def cable(self, host: str, state: str) -> None:
        """Cut a host's cable (``down``), or mend it (``up``)."""
        self._on_switch("link", "set", f"port{self._hosts.index(host)}", state)

    def received(self, host: str) -> int:
        """Bytes that have come to a host."""
        command = [*self.inside(host), "cat", "/sys/class/net/cable/statistics/rx_bytes"]
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{self._hosts.index(host)}"

    def _on_switch(self, *arguments: str) -> None:
        ip("-n", self._prefix, *arguments)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def no_namespaces() -> str:
    """Why this machine cannot have hosts with a network of their own; empty if it can."""
    if shutil.which("ip") is None:
        return "needs the command ip (iproute2)"
    network = Network(["probe"])
    try:
        network.plug()
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces: {error.stderr.decode().strip()}"
    finally:
        network.unplug()
    return ""


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


class Lossy(LocalGrid):
    """In one process: in some rounds some clients are not reached, or their replies are lost.

    Parameters
    ----------
    unreached, lost : mapping of int to sequence of str
        Round -> clients.
    """

    def __init__(
        self,
        app: Any,
        config: RunConfig,
        unreached: Mapping[int, Sequence[str]] = {},
        lost: Mapping[int, Sequence[str]] = {},
    ) -> None:
        super().__init__(app, config.to_flat(), len(CLIENTS))
        self._unreached, self._lost = unreached, lost
        self.host(CLIENTS)

    def host(self, clients: Sequence[str]) -> None:
        for context, client in zip(self._contexts.values(), clients, strict=True):
            context.node_config = {"clients": client}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            info = message.content.config_records.get("visit", {})
            number, clients = int(info.get("round", 0)), list(info.get("clients", ()))  # type: ignore[call-overload]
            if set(clients) & set(self._unreached.get(number, ())):
                message.metadata.__dict__["_message_id"] = f"unreached-{number}-{clients[0]}"
                ids.append(message.metadata.message_id)
                continue
            (message_id,) = super().push_messages([message])
            ids.append(message_id)
            if set(clients) & set(self._lost.get(number, ())):
                list(self.pull_messages([message_id]))
        return ids


def alone(folder: Path, slots: int = 3, **losses: Mapping[int, Sequence[str]]) -> Path:
    """The same run in one process, with the same losses."""
    path = folder / "alone"
    flat = read_overrides([RUN]) | {"output-dir": str(path), "slots-per-corruption": slots, "round-timeout": 0.05}
    with federation(flat) as strategy:
        strategy.start(Lossy(load_root("client_app").app, RunConfig.from_flat(flat), **losses))
    return path


def same(mine: Path, theirs: Path) -> None:
    """Assert that two runs ended alike: accuracies, who took part, and every collaboration matrix, bit for bit."""
    found, expected = (json.loads((path / "summary.json").read_text()) for path in (mine, theirs))
    assert found["finished"]
    assert expected["finished"]
    lines = [[json.loads(line) for line in (p / "rounds.jsonl").read_text().splitlines()] for p in (mine, theirs)]
    for key in ("round", "clients", "samples", "accuracy", "forgot"):
        assert [line[key] for line in lines[0]] == [line[key] for line in lines[1]], key
    assert found["accuracy"] == expected["accuracy"]
    with np.load(mine / "collaboration.npz") as a, np.load(theirs / "collaboration.npz") as b:
        assert a["weights"].tobytes() == b["weights"].tobytes()


@pytest.fixture
def fleet(tmp_path: Path, environment: dict[str, str]) -> Iterator[Fleet]:
    made = Fleet(tmp_path, environment)
    try:
        made.serve()
        for client in CLIENTS:
            made.join(client)
        yield made
    finally:
        made.end()


def missed(fleet: Fleet) -> dict[int, list[str]]:
    """Round -> who was missing."""
    return {line["round"]: list(line["screened"]) for line in fleet.lines() if line["screened"]}


def test_a_killed_device_comes_back_as_another_node_and_finds_its_own_state(fleet: Fleet) -> None:
    let_go = fleet.hold(VICTIM, slot=1)
    fleet.run()
    fleet.wait_inside(VICTIM, slot=1)
    fleet.kill(VICTIM)
    let_go()
    fleet.join(VICTIM)
    assert fleet.ended() == 0, fleet.log("run")
    gone = missed(fleet)
    assert 2 in gone
    assert set(map(tuple, gone.values())) == {(VICTIM,)}
    assert len(gone) < 5, "it has not come back"
    assert all(line["forgot"] == [] for line in fleet.lines())
    same(fleet.folder / "run", alone(fleet.folder, unreached=gone))


def test_a_visit_that_is_ended_costs_its_round_alone(fleet: Fleet) -> None:
    """As where the device's memory runs out: the round does not wait for it, and the next one has it again."""
    let_go = fleet.hold(VICTIM, slot=1)
    fleet.run(timeout=SLOW)
    fleet.wait_inside(VICTIM, slot=1)
    (app,) = [pid for pid in descendants(fleet.processes[VICTIM].pid) if is_program(pid, "flwr-clientapp")]
    os.kill(app, signal.SIGTERM)
    let_go()
    assert fleet.ended() == 0, fleet.log("run")
    gone = missed(fleet)
    assert gone == {2: [VICTIM]}
    assert "ClientApp stopped responding" in fleet.log("run")
    same(fleet.folder / "run", alone(fleet.folder, unreached=gone))


def test_a_visit_that_hangs_is_given_up(fleet: Fleet) -> None:
    fleet.kill(VICTIM)
    fleet.join(VICTIM, "--give-up-after", "20")
    let_go = fleet.hold(VICTIM, slot=1)
    fleet.run(timeout=SLOW)
    until(lambda: "has taken 20 s and is given up" in fleet.log(VICTIM), "it hangs: " + fleet.log(VICTIM))
    let_go()
    assert fleet.ended() == 0, fleet.log("run")
    gone = missed(fleet)
    assert gone == {2: [VICTIM]}
    same(fleet.folder / "run", alone(fleet.folder, unreached=gone))


def test_who_cannot_start_an_app_any_more_ends_and_a_device_comes_back(fleet: Fleet) -> None:

    def starters(name: str) -> list[int]:
        return [pid for pid in descendants(fleet.processes[name].pid) if is_program(pid, "flower-superexec")]

    for name in (VICTIM, "server"):
        until(lambda name=name: starters(name), f"{name} starts none")
        os.kill(starters(name)[0], signal.SIGKILL)
    until(lambda: fleet.processes["server"].poll() is not None, "the server goes on, and starts no run")
    assert fleet.processes["server"].returncode != 0
    until(lambda: "flower-superexec has ended" in fleet.log(VICTIM), "the device goes on, and answers nothing")
    fleet.serve()
    fleet.run(slots=1)
    assert fleet.ended() == 0, fleet.log("run")
    assert missed(fleet) == {}


def test_a_killed_run_resumes_from_its_checkpoint(fleet: Fleet) -> None:
    let_go = fleet.hold(VICTIM, slot=1)
    fleet.run(slots=2, timeout=600.0)
    fleet.wait_inside(VICTIM, slot=1)
    (run_process,) = [pid for pid in descendants(fleet.processes["server"].pid) if is_program(pid, "flwr-serverapp")]
    os.kill(run_process, signal.SIGKILL)
    fleet.kill("run")
    let_go()
    assert not json.loads((fleet.folder / "run" / "summary.json").read_text())["finished"]
    fleet.run("--resume", str(fleet.folder / "run"))
    assert fleet.ended() == 0, fleet.log("run")
    same(fleet.folder / "run", alone(fleet.folder, slots=2))


def test_a_killed_server_comes_back_and_the_run_is_resumed(fleet: Fleet) -> None:
    let_go = fleet.hold(VICTIM, slot=1)
    fleet.run(slots=2, timeout=600.0)
    fleet.wait_inside(VICTIM, slot=1)
    fleet.kill("server")
    fleet.kill("run")
    let_go()
    assert not json.loads((fleet.folder / "run" / "summary.json").read_text())["finished"]
    fleet.serve()  # the devices come back by themselves
    fleet.run("--resume", str(fleet.folder / "run"))
    assert fleet.ended() == 0, fleet.log("run")
    same(fleet.folder / "run", alone(fleet.folder, slots=2))


@pytest.fixture
def server(tmp_path: Path, environment: dict[str, str]) -> Iterator[Fleet]:
    """A server without devices: a run waits for them."""
    made = Fleet(tmp_path, environment)
    try:
        made.serve()
        yield made
    finally:
        made.end()


def test_a_server_whose_database_is_busy_for_a_while_loses_neither_devices_nor_the_run(fleet: Fleet) -> None:
    let_go = fleet.hold(VICTIM, 1)
    fleet.run(timeout=90.0)
    fleet.wait_inside(VICTIM, 1)
    database = sqlite3.connect(fleet.folder / "server" / "state.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    let_go()
    until(lambda: "database is locked" in fleet.log("server"), "nobody has noticed")
    time.sleep(8)
    database.execute("ROLLBACK")
    database.close()
    assert fleet.ended() == 0, fleet.log("run")[-2000:]
    assert missed(fleet) == {}
    same(fleet.folder / "run", alone(fleet.folder))
    assert all("next try in" not in fleet.log(client) for client in CLIENTS)
    assert "Internal server error" not in "".join(map(fleet.log, CLIENTS)) + fleet.log("run")
    shutil.rmtree(fleet.folder / "run")
    fleet.run(slots=1)  # there is still who starts it, and who takes part
    assert fleet.ended() == 0, fleet.log("run")[-2000:]


def test_a_server_without_devices_says_so(server: Fleet) -> None:
    where = ["--control", f"127.0.0.1:{server.ports['control']}", "--insecure"]
    done = subprocess.run(["fedtta", "nodes", *where], env=server.env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"no devices registered; fedtta register KEY.pub --name NAME {shlex.join(where)}\n"


def test_whoever_watches_a_run_may_be_cut_off_for_a_while(server: Fleet) -> None:
    relay = Relay(server.ports["control"])
    server.run("--control", f"127.0.0.1:{relay.port}", "--run-config", "join-timeout=30")
    until(lambda: "flwr-serverapp" in server.log("run"), "the run does not begin: " + server.log("run"))
    before = server.log("run").splitlines()
    assert re.fullmatch(r"run \d+", before[0])
    relay.cut()
    time.sleep(5)
    assert server.processes["run"].poll() is None, server.log("run")
    assert "is out of reach" in server.log("run")
    Relay(server.ports["control"], relay.port)
    assert server.ended() == 2  # as the run itself says
    lines = server.log("run").splitlines()
    assert lines[: len(before)] == before
    assert not set(before) & set(lines[len(before) :])  # the log goes on where it was
    assert "did not join" in "\n".join(lines[len(before) : -1])
    assert lines[-1].startswith(f"error: {before[0]} ended as finished:failed")


def test_a_server_that_is_told_to_end_does_not_wait_for_whoever_watches(server: Fleet) -> None:
    server.run("--run-config", "join-timeout=600")
    until(lambda: "flwr-serverapp" in server.log("run"), "the run does not begin: " + server.log("run"))
    ended = server.processes.pop("server")
    ended.terminate()
    assert ended.wait(timeout=30) == -signal.SIGTERM
    server.serve()
    assert server.ended() == 2
    assert "the SuperLink is out of reach (" in server.log("run")
    (run, *_, last) = server.log("run").splitlines()
    assert last.startswith(f"error: {run} ended as finished:failed")


def test_whoever_stops_watching_can_watch_again_or_end_the_run(server: Fleet) -> None:
    runs = ["fedtta", "runs", "--insecure", "--control", f"127.0.0.1:{server.ports['control']}"]
    assert subprocess.check_output(runs, env=server.env, text=True).endswith("no runs so far\n")
    assert json.loads(subprocess.check_output([*runs, "--json"], env=server.env)) == []
    server.run()
    until(lambda: "flwr-serverapp" in server.log("run"), "the run does not begin: " + server.log("run"))
    server.processes["run"].send_signal(signal.SIGINT)
    assert server.ended() == 130
    (line,) = [line for line in server.log("run").splitlines() if "goes on" in line]
    watch, end = (shlex.split(command) for command in re.findall("`(.*?)`", line))
    assert (watch[:2], end[:2]) == (["fedtta", "log"], ["fedtta", "stop"])
    server.start("again", *watch)
    until(lambda: "flwr-serverapp" in server.log("again"), "no log: " + server.log("again"))
    assert watch[2] in subprocess.check_output(runs, env=server.env, text=True)
    assert "running" in subprocess.check_output(runs, env=server.env, text=True)
    (told,) = json.loads(subprocess.check_output([*runs, "--json"], env=server.env))
    assert (told["run_id"], told["status"], set(told)) == (
        watch[2],
        "running",
        {"run_id", "status", "since", "details"},
    )
    subprocess.run(end, env=server.env, check=True)
    assert server.processes["again"].wait(timeout=SLOW) == 2
    assert f"error: run {watch[2]} ended as finished:stopped" in server.log("again")
    assert "finished:stopped" in subprocess.check_output(runs, env=server.env, text=True)
    again = subprocess.run(end, env=server.env, capture_output=True, text=True)
    assert again.returncode == 2
    assert "already finished" in again.stderr


@pytest.fixture
def network() -> Iterator[Network]:
    if os.environ.get("FEDTTA_NETWORK_TESTS") != "1":
        # A round must end without the device while its TCP connection can still come back: the clock decides.
        pytest.skip("FEDTTA_NETWORK_TESTS=1 runs it; needs a machine with no other work")
    if why := no_namespaces():
        pytest.skip(why)
    made = Network(["server", *CLIENTS])
    made.plug()
    try:
        yield made
    finally:
        made.unplug()


def test_a_link_that_is_cut_in_mid_round_and_mended(tmp_path: Path, environment: dict[str, str], network) -> None:
    fleet = Fleet(tmp_path, environment, network)
    try:
        fleet.serve()
        for client in CLIENTS:
            fleet.join(client)
        let_go, others_go = fleet.hold(VICTIM, slot=1), fleet.hold(CLIENTS[0], slot=2)
        fleet.run()
        fleet.wait_inside(VICTIM, slot=1)
        network.cable(VICTIM, "down")
        let_go()  # the visit ends, its reply goes nowhere
        fleet.wait_inside(CLIENTS[0], slot=2)  # the others have gone on without it
        network.cable(VICTIM, "up")
        before = network.received(VICTIM)
        until(lambda: network.received(VICTIM) > before + 2000, "the device does not reach its server again")
        others_go()
        assert fleet.ended() == 0, fleet.log("run")
        gone = missed(fleet)
        assert 2 in gone
        assert set(map(tuple, gone.values())) == {(VICTIM,)}
        assert max(gone) <= 4, "it has not come back"
        assert all(line["forgot"] == [] for line in fleet.lines())
        absent = {number: clients for number, clients in gone.items() if number > 2}
        same(fleet.folder / "run", alone(fleet.folder, lost={2: [VICTIM]}, unreached=absent))
    finally:
        fleet.end()


def is_program(pid: int, name: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(Path(word.decode(errors="replace")).name == name for word in words[:3])
