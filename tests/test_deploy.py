"""The commands by which a federation is deployed, as lists of arguments, and what is refused before any starts."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from flwr.supercore.control import ControlHttpClient

from fedtta_flwr import cli, deploy, runs
from fedtta_flwr.control import connect, control_api, environment, one_line, start_run
from fedtta_flwr.deploy import Address
from fedtta_flwr.errors import ConfigError, FederationError, RunError
from fedtta_flwr.ports import check_apart, check_free, free_port

FLEET, CONTROL = Address("0.0.0.0", 9092), Address("127.0.0.1", 8000)


def option(command: list[str], name: str) -> str:
    """The value that follows an option, which must stand there once."""
    assert command.count(name) == 1, command
    return command[command.index(name) + 1]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("fed.example.org", "fed.example.org", 9092),
        ("fed.example.org:443", "fed.example.org", 443),
        ("10.0.0.5:1", "10.0.0.5", 1),
        ("[fd00::5]:9000", "fd00::5", 9000),
        ("fd00::5", "fd00::5", 9092),
        ("[::]", "::", 9092),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_an_address(text: str, host: str, port: int) -> None:
    address = deploy.parse_address("SERVER", text, 9092)
    assert address == (host, port)
    assert deploy.parse_address("SERVER", str(address), 1) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":9092",
        "host:",
        "host:0",
        "host:65536",
        "host:port",
        "https://host",
        "a@b",
        "a b",
        "host:1/x",
        "[::1",
        "1::2::3",
        "a..b",
        f"{'a' * 64}.org",
    ],
)
def test_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="SERVER") as caught:
        deploy.parse_address("SERVER", text, 9092)
    assert repr(text) in str(caught.value)
    assert "HOST:PORT" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "at_home"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.5", False),
        ("localhost.example.org", False),
    ],
)
def test_the_control_api_is_opened_to_others_only_on_purpose(host: str, at_home: bool) -> None:
    address = Address(host, 8000)
    deploy.check_control(address, without_login=True)
    if at_home:
        deploy.check_control(address, without_login=False)
        return
    with pytest.raises(ConfigError, match="no login") as caught:
        deploy.check_control(address, without_login=False)
    assert "--control-without-login" in str(caught.value)


def test_a_server_with_tls_asks_every_device_for_its_key() -> None:
    command = deploy.superlink_command(
        fleet=FLEET, control=CONTROL, database=Path("/state/state.db"), certificates=Path("/keys")
    )
    assert option(command, "--fleet-api-type") == "grpc-rere"
    assert option(command, "--fleet-api-address") == "0.0.0.0:9092"
    assert (option(command, "--host"), option(command, "--port")) == ("127.0.0.1", "8000")
    assert option(command, "--database") == "/state/state.db"
    assert option(command, "--ssl-ca-certfile") == "/keys/ca.crt"
    assert option(command, "--ssl-certfile") == "/keys/server.crt"
    assert option(command, "--ssl-keyfile") == "/keys/server.key"
    assert option(command, "--isolation") == "subprocess"
    assert "--enable-supernode-auth" in command
    assert "--disable-runtime-dependency-installation" in command
    assert "--insecure" not in command


def test_a_server_without_tls() -> None:
    command = deploy.superlink_command(
        fleet=Address("::", 9092),
        control=CONTROL,
        database=Path("state.db"),
        certificates=None,
        isolation="process",
        superexec_secret=Path("/run/secrets/superexec"),
    )
    assert "--insecure" in command
    assert not [word for word in command if word.startswith("--ssl") or "auth" in word.removeprefix("--superexec-auth")]
    assert option(command, "--fleet-api-address") == "[::]:9092"
    assert option(command, "--isolation") == "process"
    assert option(command, "--superexec-auth-secret-file") == "/run/secrets/superexec"


def test_flower_takes_these_commands() -> None:
    """Its own parsers, so that a renamed flag is found here and not on a device."""
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    server = deploy.superlink_command(
        fleet=FLEET, control=CONTROL, database=Path("db"), certificates=Path("/k"), superexec_secret=Path("s")
    )
    parsed = _parse_args_run_superlink().parse_args(server[server.index("fedtta_flwr.superlink") + 1 :])
    assert (parsed.enable_supernode_auth, parsed.fleet_api_address, parsed.port) == (True, "0.0.0.0:9092", 8000)
    assert parsed.runtime_dependency_install is False
    device = deploy.supernode_command(
        server=Address("fed", 9092), ca=Path("/c"), key=Path("/k"), node_config={"clients": "a"}, runtime_port=9094
    )
    node = _parse_args_run_supernode().parse_args(device[device.index("fedtta_flwr.supernode") + 1 :])
    assert (node.superlink, node.root_certificates, node.auth_supernode_private_key) == ("fed:9092", "/c", "/k")
    assert (node.host, node.port, node.insecure, node.max_retries) == ("127.0.0.1", 9094, False, None)  # tries for ever


def test_a_run_of_many_clients_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linux takes no argument of more than 128 KiB: these are given to a command, and read as Flower reads them."""
    names = ",".join(f"camera-{i:06d}" for i in range(20_000))
    overrides = {"clients": names, "num-clients": 20_000, "output-dir": 'it\'s "here"', "fedctta.temperature": 1e-05}
    given: list[str] = []

    def flwr(env: dict[str, str], *arguments: str) -> dict[str, object]:
        subprocess.run(["true", *arguments], check=True)
        given.extend(arguments)
        return {"success": True, "run-id": 3}

    monkeypatch.setattr("fedtta_flwr.control.flwr", flwr)
    assert start_run(connect(tmp_path, "127.0.0.1:1", None), tmp_path, overrides) == 3
    assert parse_config_args([given[given.index("--run-config") + 1]]) == overrides


@pytest.mark.parametrize(
    ("work", "status"),
    [
        ("threading.Thread(target=time.sleep, args=(600,)).start()", 1),  # it goes back to its caller
        ("threading.Thread(target=int, args=('x',)).start(); time.sleep(600)", -signal.SIGTERM),
    ],
)
def test_a_supernode_that_is_no_device_any_more_ends(work: str, status: int) -> None:
    code = "import threading, time; from fedtta_flwr import supernode\n"
    code += f"def node():\n    {work}\nsupernode.flower_supernode = node; supernode.main()"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == status


def test_a_device() -> None:
    settings = deploy.node_config(clients="cam-07", data_dir=Path("/data/my images"))
    command = deploy.supernode_command(
        server=Address("fd00::5", 9092),
        ca=Path("/k/ca.crt"),
        key=Path("/k/cam-07"),
        node_config=settings,
        runtime_port=1,
    )
    assert command[:4] == [sys.executable, "-P", "-m", "fedtta_flwr.supernode"]
    assert option(command, "--superlink") == "[fd00::5]:9092"
    assert option(command, "--root-certificates") == "/k/ca.crt"
    assert option(command, "--auth-supernode-private-key") == "/k/cam-07"
    assert option(command, "--host") == "127.0.0.1"
    assert "--insecure" not in command
    assert parse_config_args([option(command, "--node-config")]) == settings


def test_a_device_without_tls_has_no_key() -> None:
    command = deploy.supernode_command(
        server=Address("fed", 9092), ca=None, key=None, node_config={"clients": "a"}, runtime_port=1
    )
    assert "--insecure" in command
    assert not [word for word in command if "certificates" in word or "auth" in word]


def test_what_a_device_says_about_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert deploy.node_config(clients=" a, b,") == {"clients": "a,b"}
    full = deploy.node_config(
        clients="a",
        data_dir=Path("in"),
        stream="m:f",
        device="cuda:1",
        checkpoint=Path("m.safetensors"),
        predictions_dir=Path("~/out"),
        give_up_after=90.5,
    )
    assert full == {
        "clients": "a",
        "data-dir": str(tmp_path / "in"),
        "stream": "m:f",
        "device": "cuda:1",
        "checkpoint": str(tmp_path / "m.safetensors"),
        "predictions-dir": str(Path.home() / "out"),
        "give-up-after": "90.5",
    }
    with pytest.raises(ConfigError, match="--client"):
        deploy.node_config(clients=" ,")
    for seconds in (float("nan"), -1.0):
        with pytest.raises(ConfigError, match=f"--give-up-after {seconds}: allowed: seconds, or 0"):
            deploy.node_config(clients="a", give_up_after=seconds)


@pytest.mark.parametrize("place", ["/a b", "/a'b", "/a\\b", "/a=b c=d", "/ü/😀", "/a.toml"])
def test_places_survive_flowers_syntax(place: str) -> None:
    settings = {"clients": "a,b", "data-dir": place, "device": "cpu"}
    command = deploy.supernode_command(server=FLEET, ca=None, key=None, node_config=settings, runtime_port=1)
    assert parse_config_args([option(command, "--node-config")]) == settings


def test_what_flowers_syntax_cannot_say_is_refused() -> None:
    settings = {"clients": "a", "data-dir": '/a"b'}
    with pytest.raises(ConfigError, match="quotation marks"):
        deploy.supernode_command(server=FLEET, ca=None, key=None, node_config=settings, runtime_port=1)


def test_state_is_kept_where_the_system_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert deploy.state_dir("cam") == tmp_path / "fedtta" / "cam"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert deploy.state_dir("cam") == Path.home() / ".local" / "state" / "fedtta" / "cam"


def test_a_home_names_its_server(tmp_path: Path) -> None:
    import tomllib

    ca = tmp_path / "c a.crt"
    with pytest.raises(ConfigError, match="no such file"):
        connect(tmp_path, "fed:8000", ca)
    ca.touch()
    env = connect(tmp_path, "fed:8000", ca)
    written = tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]
    assert written[written["default"]] == {"address": "fed:8000", "root-certificates": str(ca)}
    assert env["FLWR_HOME"] == str(tmp_path)
    connect(tmp_path, "fed:8000", None)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]["own"]["insecure"] is True


def test_a_superlink_out_of_reach_is_asked_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "REACH_SECONDS", 2.0)
    began = time.monotonic()
    with (
        control_api(f"127.0.0.1:{free_port()}", None) as client,
        pytest.raises(FederationError, match=r"^the SuperLink has been out of reach for 2 s \(.*refused"),
    ):
        runs.find_run(client, 1)
    assert 2 < time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("details", "killed"),
    [
        ("Task failed with unknown error.", True),
        ("No heartbeat received from the task", True),
        ("ServerApp failed with exception: no", False),
        ("", False),
    ],
)
def test_a_run_that_was_killed_can_be_resumed(details: str, killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "find_run", lambda client, run_id: runs.Run(run_id, "finished:failed", "", details))
    monkeypatch.setattr(ControlHttpClient, "StreamLogs", lambda *_: ())
    with control_api("127.0.0.1:1", None) as client, pytest.raises(RunError) as caught:
        runs.follow(client, 7)
    assert str(caught.value).startswith(f"run 7 ended as finished:failed{details and ': '}{details}")
    assert ("`fedtta run --resume DIR`" in str(caught.value)) == killed
    assert ("checkpoint-every" in str(caught.value)) == killed


def test_a_process_of_flowers_is_quiet_and_installs_nothing(tmp_path: Path) -> None:
    env = environment(tmp_path)
    assert env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"


def test_flowers_messages_in_one_line() -> None:
    text = "Using SuperLink: own (x)\n\n\x1b[91mERROR\x1b[0m: no\n key\nFor more information, visit: <x>\n"
    assert one_line(text) == "ERROR: no key"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], ["--certificates", "--insecure"]),
        (["serve", "--certificates", "EMPTY"], ["ca.crt", "docker/keys.sh"]),
        (["serve", "--certificates", "EMPTY", "--insecure"], ["--insecure", "--certificates"]),
        (["serve", "--insecure", "--control", "0.0.0.0:8000"], ["0.0.0.0:8000", "no login", "--control-without-login"]),
        (["serve", "--insecure", "--control", "10.1.2.3"], ["10.1.2.3:8000", "no login"]),
        (["serve", "--insecure", "--control", "127.0.0.1:FREE", "--fleet-port", "FREE"], ["FREE", "--fleet-port"]),
        (["serve", "--insecure", "--host", "a..b"], ["a..b:9092", "cannot be listened on", "--host"]),
        (["serve", "--insecure", "--isolation", "chroot"], ["chroot", "subprocess, process"]),
        (["join", "fed", "--client", "a"], ["--ca", "--key", "--insecure"]),
        (["join", "fed", "--client", "a", "--ca", "EMPTY/ca.crt"], ["--key"]),
        (["join", "fed", "--client", "a", "--ca", "x", "--insecure"], ["--insecure", "--ca"]),
        (["join", "fed", "--client", "a", "--ca", "EMPTY/ca.crt", "--key", "EMPTY/key"], ["EMPTY/key", "No such file"]),
        (["join", "fed", "--client", ",", "--insecure"], ["--client", "no name of a client"]),
        (["join", "fed", "--client", "../x", "--insecure"], ["--client", "'../x' is no name of a client"]),
        (["join", "fed", "--client", "a, a", "--insecure"], ["--client", "'a' stands there twice"]),
        (["register", "EMPTY/a.pub", "--name", "b,b", "--ca", "x"], ["--name", "'b' stands there twice"]),
        (["join", "https://fed", "--client", "a", "--insecure"], ["https://fed", "HOST:PORT"]),
        (["join", "fed", "--client", "a", "--insecure", "--data-dir", "EMPTY/none"], ["--data-dir", "no such folder"]),
        (["join", "fed", "--client", "a", "--insecure", "--checkpoint", "EMPTY/x"], ["--checkpoint", "no such file"]),
        (["join", "fed", "--client", "a", "--insecure", "--device", "gpu"], ["device = 'gpu'", "auto, cpu, cuda"]),
        (["join", "fed", "--client", "a", "--insecure", "--stream", "mine"], ["stream = 'mine'", "my_module:my_"]),
        (["register", "EMPTY/a.pub", "--name", "a", "--ca", "x"], ["a.pub", "No such file"]),
        (["register", "EMPTY/a.pub", "--name", "a, b", "--ca", "x"], ["--name", "' b'", "separated by commas"]),
        (["nodes"], ["--ca", "--insecure"]),
        (["nodes", "--ca", "EMPTY/ca.crt"], ["EMPTY/ca.crt", "No such file"]),
        (["runs"], ["--ca", "--insecure"]),
        (["log", "1", "--ca", "EMPTY/ca.crt"], ["EMPTY/ca.crt", "No such file"]),
        (["stop", "1", "--insecure", "--control", "a b"], ["a b", "HOST:PORT"]),
        (["run", "--engine", "deployment"], ["--ca", "--insecure"]),
        (["run", "--engine", "deployment", "--insecure", "--run-config", "data-dir='here'"], ["data-dir", "absolute"]),
        (["run", "--engine", "deployment", "--insecure", "--run-config", "batch-size=0"], ["batch-size", "0"]),
        (["run", "--engine", "deployment", "--insecure", "--output", "here"], ["output-dir", "on the server", "'~/"]),
        (["run", "--engine", "deployment", "--ca", "EMPTY/ca.crt"], ["EMPTY/ca.crt", "no such file"]),
        (["doctor", "--server", "a b"], ["--server", "a b"]),
        (["doctor", "--device", "gpu"], ["device = 'gpu'", "auto, cpu, cuda"]),
    ],
)
def test_what_cannot_be_is_one_line_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    words: list[str],
) -> None:
    port = str(free_port())

    def place(text: str) -> str:
        return text.replace("EMPTY", str(tmp_path)).replace("FREE", port)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("something was started"))
    monkeypatch.setattr("subprocess.Popen.__init__", lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setattr("sys.argv", ["fedtta", *map(place, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    lines = [
        line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("warning: --insecure")
    ]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert all(place(word) in lines[0] for word in words), lines


def test_serving_without_tls_is_said_and_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.execvpe", lambda _, command, env: started.append((command, env)))
    ports = ["--fleet-port", str(free_port()), "--control", f"127.0.0.1:{free_port()}"]

    def warnings(folder: Path) -> list[str]:
        monkeypatch.setattr("sys.argv", ["fedtta", "serve", "--insecure", "--state-dir", str(folder), *ports])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert not exit_.value.code
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]

    (warning,) = warnings(tmp_path / "s")
    assert "no TLS" in warning
    ((command, env),) = started
    assert "--insecure" in command
    assert env["FLWR_HOME"] == str(tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o750)
    _, warning = warnings(tmp_path / "open")
    assert f"--state-dir {tmp_path / 'open'}: others" in warning


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_port_in_use_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str
) -> None:
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("something was started"))
    command = ["fedtta", "serve", "--insecure", "--state-dir", str(tmp_path)]
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken, free = other.getsockname()[1], free_port()
        fleet = ["--host", host, "--fleet-port", taken, "--control", f"127.0.0.1:{free}"]
        control = ["--fleet-port", free, "--control", f"{host}:{taken}", "--control-without-login"]
        for where, option in ((fleet, "--fleet-port"), (control, "--control")):
            monkeypatch.setattr("sys.argv", [*command, *map(str, where)])
            with pytest.raises(SystemExit) as exit_:
                cli.main()
            assert exit_.value.code == 2
            (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            assert error.startswith(f"error: {host}:{taken}: port {taken} is in use (")
            assert "still ending" in error
            assert f"; give another with {option}" in error


@pytest.mark.parametrize(
    ("fleet", "control", "collide"),
    [
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.2", "0.0.0.0", True),
        ("127.0.0.2", "127.0.0.1", False),
    ],
)
def test_the_two_doors_do_not_share_a_port(fleet: str, control: str, collide: bool) -> None:
    check_apart(Address(fleet, 9092), Address(control, 8000))
    if not collide:
        check_apart(Address(fleet, 9092), Address(control, 9092))
        return
    with pytest.raises(ConfigError, match=r"^--control .*:9092: devices are awaited there, too \(.*--fleet-port$"):
        check_apart(Address(fleet, 9092), Address(control, 9092))


def test_a_server_can_follow_one_that_has_just_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ended:
        address = Address(*ended.getsockname())
        with socket.create_connection(address) as client, ended.accept()[0] as accepted:
            accepted.shutdown(socket.SHUT_WR)  # who hangs up first waits for what may still be on the way
            client.recv(1)
    check_free("--control", address)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_cannot_be_served(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{host}:9092: it cannot be listened on \(.+\); give another with --host$"):
        check_free("--host", Address(host, 9092))
