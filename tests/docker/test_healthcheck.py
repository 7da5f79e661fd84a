"""What the containers are checked with, against real servers."""

import os
import shutil
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docker.conftest import ROOT
from tests.docker.engine import Completed, call


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Start a server on a free port of localhost, with TLS if there is a context; return the port."""
    servers = []

    def start(context: ssl.SSLContext | None = None) -> int:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server.server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def healthcheck(keys: Path) -> Callable[..., Completed]:
    """Run the check with the CA of the test's keys."""

    def run(*targets: str, ca: Path = keys / "ca.crt") -> Completed:
        script = str(ROOT / "docker" / "healthcheck.py")
        return call(sys.executable, script, *targets, check=False, env=os.environ | {"FEDTTA_CA": str(ca)})

    return run


@pytest.fixture
def context(keys: Path) -> ssl.SSLContext:
    """TLS with the certificate of the test's server, which is for localhost."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")
    return context


pytestmark = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="no openssl or no ssh-keygen to make keys with"
)


def test_what_answers_is_healthy(healthcheck, serve, context) -> None:
    plain, secure = serve(), serve(context)
    done = healthcheck(
        f"http://127.0.0.1:{plain}/health",
        f"https://127.0.0.1:{secure}/health",  # of the container itself: any certificate will do
        f"127.0.0.1:{plain}",
        f"tls://localhost:{secure}",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_that_does_not_answer_is_enough(healthcheck, serve) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{closed.getsockname()[1]}"
        done = healthcheck(f"http://127.0.0.1:{serve()}/health", target)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{target}: ")
    assert "refused" in done.stderr


def test_an_answer_other_than_200_is_none(healthcheck, serve) -> None:
    done = healthcheck(f"http://127.0.0.1:{serve()}/busy")
    assert done.returncode == 1
    assert "503" in done.stderr


def test_a_certificate_for_another_name_is_named(healthcheck, serve, context) -> None:
    done = healthcheck(f"tls://127.0.0.1:{serve(context)}")
    assert done.returncode == 1
    assert "IP address mismatch" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_certificate_of_another_ca_is_named(healthcheck, serve, context, tmp_path) -> None:
    other = tmp_path / "other.crt"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(tmp_path / "key"))
    call("openssl", "req", "-x509", *curve, "-out", str(other), "-days", "2", "-subj", "/CN=another CA")
    done = healthcheck(f"tls://localhost:{serve(context)}", ca=other)
    assert done.returncode == 1
    assert "certificate verify failed" in done.stderr
