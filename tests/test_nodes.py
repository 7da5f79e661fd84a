"""Which devices a server lets in, by Flower's own Control API in this process."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedtta_flwr.errors import FederationError
from fedtta_flwr.nodes import list_nodes, register, revoke

Key = Callable[[], Path]


@pytest.fixture
def control() -> Iterator[str]:
    """The address of a server without devices."""
    from flwr.superlink.main import create_app

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(create_app(), log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def key(tmp_path: Path) -> Key:
    """Make a device's public key."""

    def make() -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pub"
        public = ec.generate_private_key(ec.SECP384R1()).public_key()
        path.write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
        return path

    return make


def statuses(control: str) -> dict[int, tuple[str, str]]:
    return {node.node_id: (node.name, node.status) for node in list_nodes(control, None)}


@pytest.mark.parametrize("name", ["cam-1", "cam-2", "cam-1,cam-2"])
def test_a_device_is_revoked_by_any_of_its_names(name: str, control: str, key: Key) -> None:
    device, other = (register(control, None, key(), names) for names in ("cam-1,cam-2", "cam-12"))
    assert statuses(control) == {device: ("cam-1,cam-2", "registered"), other: ("cam-12", "registered")}
    assert revoke(control, None, name) == [device]
    assert statuses(control) == {device: ("cam-1,cam-2", "unregistered"), other: ("cam-12", "registered")}


def test_a_name_that_no_device_has_revokes_nothing(control: str, key: Key) -> None:
    device = register(control, None, key(), "cam-1")
    with pytest.raises(FederationError, match=r"knows no such device; registered: cam-1$"):
        revoke(control, None, "cam")
    assert statuses(control) == {device: ("cam-1", "registered")}
    revoke(control, None, "cam-1")
    with pytest.raises(FederationError, match=r"knows no such device; registered: none$"):
        revoke(control, None, "cam-1")


def test_a_client_is_of_one_device_until_that_is_revoked(control: str, key: Key) -> None:
    first = register(control, None, key(), "cam-1,cam-2")
    with pytest.raises(FederationError, match=f"node {first} has cam-2 already"):
        register(control, None, key(), "cam-2,cam-3")
    assert statuses(control) == {first: ("cam-1,cam-2", "registered")}
    revoke(control, None, "cam-2")
    second = register(control, None, key(), "cam-2,cam-3")
    assert statuses(control)[second] == ("cam-2,cam-3", "registered")


def test_a_key_that_was_revoked_is_not_let_in_again(control: str, key: Key) -> None:
    used = key()
    register(control, None, used, "cam-1")
    revoke(control, None, "cam-1")
    with pytest.raises(FederationError, match="the server has this key already, or had it and revoked it"):
        register(control, None, used, "cam-1")
