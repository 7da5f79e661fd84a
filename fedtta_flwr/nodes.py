"""Which devices a server lets in."""

from pathlib import Path
from typing import NamedTuple

from fedtta_flwr.control import control_api, moment
from fedtta_flwr.credentials import load_public_key
from fedtta_flwr.errors import FederationError

GONE = "unregistered"


class Node(NamedTuple):
    """A device, as the server knows it.

    Attributes
    ----------
    name : str
        As registered: of the clients that it may host, separated by commas.
    status : str
        registered (has not been here yet), online, offline, or unregistered (revoked).
    since : str
        When that began, UTC.
    node_id : int
        Flower's name for it.
    """

    name: str
    status: str
    since: str
    node_id: int


def register(control: str, ca: Path | None, public_key: Path, name: str) -> int:
    """Let the holder of a key in, as the host of the clients of these names; return its node id.

    Raises
    ------
    ConfigError
        The CA file or the key cannot be used.
    FederationError
        The server cannot be reached, or does not take the key.
    """
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.supercore.error import ApiErrorCode, FlowerError

    key, clients = load_public_key(public_key), set(name.split(","))
    for node in list_nodes(control, ca):
        if node.status != GONE and (taken := clients.intersection(node.name.split(","))):
            raise FederationError(
                f"--name {name!r}: node {node.node_id} has {min(taken)} already; revoke that one, or take another name"
            )
    with control_api(control, ca) as client:
        try:
            return int(client.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id)
        except httpx.HTTPStatusError as error:
            refusal = FlowerError.from_json(error.response.text)
            if refusal is None or refusal.code != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                raise
    raise FederationError(
        f"{public_key}: the server has this key already, or had it and revoked it; make a new pair (docker/keys.sh "
        f"client)"
    )


def revoke(control: str, ca: Path | None, name: str) -> list[int]:
    """Let nobody of this name, alone or with others, in any more; return the node ids.

    Raises
    ------
    ConfigError
        The CA file cannot be used.
    FederationError
        The server cannot be reached, or knows no such name.
    """
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    known = [node for node in list_nodes(control, ca) if node.status != GONE]
    found = [node.node_id for node in known if node.name == name or name in node.name.split(",")]
    if not found:
        names = ", ".join(sorted(node.name for node in known if node.name)) or "none"
        raise FederationError(f"revoke {name!r}: the server knows no such device; registered: {names}")
    with control_api(control, ca) as client:
        for node_id in found:
            client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
    return found


def list_nodes(control: str, ca: Path | None) -> list[Node]:
    """Return all devices that were ever registered, by name (``flwr supernode list`` does not show the names).

    Raises
    ------
    ConfigError
        The CA file cannot be used.
    FederationError
        The server cannot be reached.
    """
    from flwr.proto.control_pb2 import ListNodesRequest

    with control_api(control, ca) as client:
        found = client.ListNodes(ListNodesRequest()).nodes_info
    return sorted(Node(info.name, info.status, _since(info), info.node_id) for info in found)


def _since(info: object) -> str:
    moments = {
        "online": "last_activated_at",
        "offline": "last_deactivated_at",
        "registered": "registered_at",
        GONE: "unregistered_at",
    }
    return moment(str(getattr(info, moments.get(getattr(info, "status", ""), ""), "")))
