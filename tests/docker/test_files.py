"""The files that make the containers: valid, lint-clean, locked down, and without a secret in an image."""

import os
import re
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from tests.docker.conftest import ROOT, load_yaml
from tests.docker.engine import call

DOCKER = ROOT / "docker"
COMPOSE_FILES = sorted(DOCKER.glob("compose.*.yml"))
#: what is started together; compose.gpu.yml is an override of compose.client.yml
PROJECTS = [
    ("compose.server.yml",),
    ("compose.client.yml",),
    ("compose.local.yml",),
    ("compose.client.yml", "compose.gpu.yml"),
]
CONTROL_PORT = 8000
LOOPBACK = ("127.0.0.1", "::1", "[::1]")
SETTINGS = dict(
    line.split("=", 1) for line in (DOCKER / ".env.example").read_text().splitlines() if line and line[0] != "#"
)


def test_every_compose_file_is_of_a_project() -> None:
    assert {path.name for path in COMPOSE_FILES} == {name for names in PROJECTS for name in names}


@pytest.mark.parametrize("names", PROJECTS, ids="+".join)
@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["defaults", "example"])
def test_compose_accepts_the_files(compose: str, names: tuple[str, ...], settings: dict[str, str]) -> None:
    files = [word for name in names for word in ("-f", str(DOCKER / name))]
    done = call(compose, *files, "--profile", "*", "config", "-q", env=os.environ | settings)
    assert done.stdout + done.stderr == ""  # no warning about a variable either


@pytest.mark.parametrize("path", sorted(DOCKER.glob("*Dockerfile*")), ids=lambda path: path.name)
def test_hadolint_finds_nothing(hadolint: str, path: Path) -> None:
    assert call(hadolint, "--failure-threshold", "style", str(path)).stdout == ""


def test_every_setting_stands_in_the_example_with_its_default() -> None:
    text = "".join(path.read_text() for path in COMPOSE_FILES)
    defaults = dict(re.findall(r"\$\{(FEDTTA_\w+):?-([^${}]*)\}", text))
    assert set(SETTINGS) == set(re.findall(r"\$\{(FEDTTA_\w+)", text))
    named_by_the_user = {"FEDTTA_SUPERLINK", "FEDTTA_CLIENTS", "FEDTTA_KEY"}
    assert {k: v for k, v in SETTINGS.items() if k not in named_by_the_user} == {
        k: v for k, v in defaults.items() if k not in named_by_the_user
    }


# ------------------------------------------------------------------------------------------------------- the network


def published(service: dict) -> list[tuple[str, str]]:
    """(host address, container port) of everything that a service publishes; every port if it shares the host's net."""
    if service.get("network_mode") == "host":
        return [("0.0.0.0", str(CONTROL_PORT))]
    found = []
    for port in service.get("ports") or []:
        if isinstance(port, dict):
            found.append((str(port.get("host_ip") or "0.0.0.0"), str(port["target"])))
        else:
            host, _, target = re.sub(r"\$\{\w+:?-(.*?)\}", r"\1", str(port)).rpartition(":")
            address, colon, _ = host.rpartition(":")
            found.append((address if colon else "0.0.0.0", target))
    return found


def exposes_control(service: dict) -> bool:
    """Whether a service publishes the Control API (or ports that cannot be told) beyond loopback."""
    return any(
        address not in LOOPBACK and (not target.isdigit() or int(target) == CONTROL_PORT)
        for address, target in published(service)
    )


@pytest.mark.parametrize(
    ("service", "exposed"),
    [
        ({"ports": ["8000:8000"]}, True),
        ({"ports": ["8000"]}, True),
        ({"ports": ["${ADDRESS:-0.0.0.0}:9000:8000"]}, True),
        ({"ports": ["0.0.0.0:8000-8010:8000-8010"]}, True),
        ({"ports": [{"target": 8000, "published": "9000"}]}, True),
        ({"network_mode": "host"}, True),
        ({"ports": ["127.0.0.1:8000:8000"]}, False),
        ({"ports": ["[::1]:8000:8000"]}, False),
        ({"ports": [{"target": 8000, "host_ip": "127.0.0.1"}]}, False),
        ({"ports": ["9092:9092"]}, False),
        ({}, False),
    ],
)
def test_exposure_is_recognised(service: dict, exposed: bool) -> None:
    assert exposes_control(service) is exposed


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_no_file_publishes_the_control_api(path: Path) -> None:
    services = load_yaml(path)["services"]
    assert services
    assert [name for name, service in services.items() if exposes_control(service)] == []


@pytest.mark.parametrize("names", [("compose.server.yml",), ("compose.local.yml",)], ids="+".join)
def test_the_control_api_is_on_the_control_network_alone(rendered, names) -> None:
    project = rendered(*names)
    superlink = project["services"]["superlink"]
    assert "--host=control" in superlink["command"]
    assert f"--port={CONTROL_PORT}" in superlink["command"]
    assert superlink["networks"]["control"]["aliases"] == ["control"]
    assert "control" not in str(superlink["networks"]["fleet"])
    assert project["networks"]["control"]["internal"] is True
    inside = {name for name, service in project["services"].items() if "control" in service["networks"]}
    assert inside == {"superlink", "serverapp", "flwr"} | ({"register"} & set(project["services"]))
    assert [port["target"] for port in superlink.get("ports", [])] in ([9092], [])


# ------------------------------------------------------------------------------------------------------- locked down


@pytest.mark.parametrize("names", PROJECTS, ids="+".join)
def test_every_service_is_locked_down(rendered, names) -> None:
    for name, service in rendered(*names)["services"].items():
        assert service["user"].split(":")[0] not in ("", "0", "root"), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "cap_add" not in service, name
        assert "privileged" not in service, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        limits = service["deploy"]["resources"]["limits"]
        assert float(limits["cpus"]) > 0, name
        assert int(limits["memory"]) > 0, name
        assert limits["pids"] > 0, name
        assert {"max-size", "max-file"} <= set(service["logging"]["options"]), name
        binds = [volume for volume in service.get("volumes", []) if volume["type"] == "bind"]
        assert all(volume["read_only"] for volume in binds), name
        if name not in ("flwr", "register"):
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"], name


def test_a_private_key_is_given_to_its_owner_alone(rendered) -> None:
    services = rendered("compose.local.yml")["services"]
    private = {"server.key", "client-00", "client-01", "client-02"}
    held = {name: {s["source"] for s in service["secrets"]} & private for name, service in services.items()}
    assert held == {
        "superlink": {"server.key"},
        **{name: set() for name in ("serverapp", "flwr", "register")},
        **{name: {name} for name in ("client-00", "client-01", "client-02")},
    }


def test_a_gpu_is_reserved_by_the_override_alone(rendered) -> None:
    plain = rendered("compose.client.yml")["services"]["supernode"]
    assert "reservations" not in plain["deploy"]["resources"]
    service = rendered("compose.client.yml", "compose.gpu.yml", FEDTTA_GPUS="all")["services"]["supernode"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
    assert service["build"]["args"]["TORCH_INDEX"] == ""
    assert "/cpu" in plain["build"]["args"]["TORCH_INDEX"]


# ------------------------------------------------------------------------------------------------------ what is run


def script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run_command(words: list[str], folder: Path, **variables: str) -> None:
    """Run a service's command, which Compose has rendered with $ doubled, with the programs of a folder first."""
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"} | variables
    call(*(word.replace("$$", "$") for word in words), env=env)


def test_a_device_names_its_clients_and_where_they_keep_their_states(rendered, tmp_path: Path) -> None:
    script(tmp_path, "python", f'printf "%s\\n" "$@" > {tmp_path}/arguments')
    command = rendered("compose.client.yml")["services"]["supernode"]["command"]
    more = 'live-dir="/data/live"'
    run_command(command, tmp_path, FEDTTA_SUPERLINK="a:1", FEDTTA_CLIENTS="x,y", FEDTTA_NODE_CONFIG=more)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    found = parse_config_args([arguments[arguments.index("--node-config") + 1]])
    assert found == {"clients": "x,y", "state-dir": "/state/clients", "live-dir": "/data/live"}


def test_keys_are_registered_that_are_not_or_no_more(rendered, tmp_path: Path) -> None:
    # client-00 was revoked and has a new key; client-01 is there; client-02 never was.
    nodes = "client-00  unregistered  2026  1\nclient-01  online  2026  2\nclient-022 online  2026  3"
    text = f'case $1 in nodes) printf "{nodes}\\n" ;; register) echo "$2" >> {tmp_path}/registered ;; esac'
    script(tmp_path, "fedtta", text)
    service = rendered("compose.local.yml")["services"]["register"]
    run_command([*service["entrypoint"], *service["command"]], tmp_path)
    registered = (tmp_path / "registered").read_text().split()
    assert registered == ["/run/secrets/client-00.pub", "/run/secrets/client-02.pub"]


# ------------------------------------------------------------------------------------------------- the build context


def is_sent(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore lets a file into the build context, by the rules of the older of Docker's two builders.

    The last pattern that matches it or a folder above it wins. A folder that is left out is not even entered, unless
    a pattern with ! begins with its name.
    """
    folders = [str(folder) for folder in Path(path).parents if folder != Path()]
    entered = all(
        _last_match(folder, patterns) or any(line.startswith(f"!{folder}/") for line in patterns) for folder in folders
    )
    return entered and _last_match(path, patterns)


def _last_match(path: str, patterns: list[str]) -> bool:
    candidates = [path, *(str(folder) for folder in Path(path).parents)]
    sent = True
    for line in patterns:
        negated, pattern = line.startswith("!"), line.lstrip("!")
        expression = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(expression, candidate) for candidate in candidates):
            sent = negated
    return sent


SECRETS = [
    *("keys/server.key", "docker/keys/ca.key", "docker/keys/server.key", "docker/keys/clients/client-00"),
    *(".env", "docker/.env", "docker/data/x.npy", ".flwr/config.toml", "id_ed25519", "server.pem", "a/b/c/token"),
    *("fedtta_flwr/server.key", "fedtta_flwr/models/.env", "configs/credentials.yaml", ".git/config", "runs/x.json"),
    *("fedtta_flwr/__pycache__/client.cpython-311.pyc", "docker/keys.sh", "docker/requirements.py.key"),
]


def ignore_patterns() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("path", SECRETS)
def test_nothing_secret_enters_the_build_context(path: str) -> None:
    assert not is_sent(path, ignore_patterns())


def test_what_the_image_is_made_of_enters_the_build_context() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "fedtta_flwr").rglob("*") if path.is_file()]
    package = [path for path in files if "__pycache__" not in path and "/." not in path]
    wanted = [*package, "pyproject.toml", "README.md", "LICENSE", "server_app.py", "client_app.py"]
    wanted += [str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.toml")]
    assert [path for path in wanted if not is_sent(path, ignore_patterns())] == []
