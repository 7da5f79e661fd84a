"""The commands and settings by which a federation is deployed: pure functions, which start nothing.

A SuperLink has two doors. Devices come in by the *Fleet API*: gRPC, with TLS and a key for each device. Runs are
started through the *Control API*: HTTP, with TLS but without a login, so whoever reaches it can have any code run on
every device. Hence the two are never opened on the same address unless asked for.
"""

import ipaddress
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from fedtta_flwr.control import pairs
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.paths import expanded, in_home
from fedtta_flwr.resolve import names_in

FLEET_PORT, CONTROL_PORT = 9092, 8000
#: what `docker/keys.sh server DIR` makes and the server needs
CA, CERTIFICATE, KEY = "ca.crt", "server.crt", "server.key"


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return ``HOST:PORT``, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # of names only one is sure to stay at home
            return self.host == "localhost"


def parse_address(option: str, text: str, default_port: int) -> Address:
    """Read ``HOST``, ``HOST:PORT``, ``[IPV6]:PORT`` or a bare IPv6 address.

    Raises
    ------
    ConfigError
        One line that names the option.
    """
    fault = ConfigError(f"{option} {text!r}: allowed: HOST or HOST:PORT, e.g. fed.example.org:{default_port}")
    if any(c in text for c in "/@?# ") or not text:
        raise fault
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        pass
    else:
        return Address(text, default_port)
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise fault from None
    if not host or port == 0 or text.endswith(":") or not _can_be_looked_up(host):
        raise fault
    return Address(host, port or default_port)


def _can_be_looked_up(host: str) -> bool:
    try:
        host.encode("idna")
    except UnicodeError:  # of a part that is empty or too long Python says so without naming the host
        return False
    return True


def state_dir(name: str) -> Path:
    """Return where a server or device keeps what must outlive it: in $XDG_STATE_HOME/fedtta, or ~/.local/state."""
    return Path(os.environ.get("XDG_STATE_HOME") or in_home(".local", "state")) / "fedtta" / name


def check_control(control: Address, *, without_login: bool) -> None:
    """Refuse to open the Control API to others unless the risk has been named.

    Raises
    ------
    ConfigError
        The address is not of this machine alone.
    """
    if not control.is_loopback and not without_login:
        raise ConfigError(
            f"--control {control}: the Control API has no login, whoever reaches it runs code on every device; keep it "
            f"on 127.0.0.1 (and reach it by ssh -L), or add --control-without-login where a firewall guards it"
        )


def superlink_command(
    *,
    fleet: Address,
    control: Address,
    database: Path,
    certificates: Path | None,
    isolation: str = "subprocess",
    superexec_secret: Path | None = None,
) -> list[str]:
    """Return the command that starts the server.

    Parameters
    ----------
    fleet, control : Address
        What devices connect to, and what runs are started through.
    database : Path
        Where the SuperLink remembers nodes and runs.
    certificates : Path or None
        Folder with ``ca.crt``, ``server.crt`` and ``server.key``; None: neither TLS nor authentication.
    isolation : str
        ``subprocess``, or ``process``: the ServerApp runs where a ``flower-superexec`` is started.
    superexec_secret : Path, optional
        With ``process``: the file with the secret that such a process must know.
    """
    command = [sys.executable, "-P", "-m", "fedtta_flwr.superlink"]
    command += ["--fleet-api-type", "grpc-rere", "--fleet-api-address", str(fleet)]
    command += ["--host", control.host, "--port", str(control.port), "--isolation", isolation]
    command += ["--database", str(database), "--disable-runtime-dependency-installation"]
    if superexec_secret is not None:
        command += ["--superexec-auth-secret-file", str(superexec_secret)]
    if certificates is None:
        return [*command, "--insecure"]
    command += ["--ssl-ca-certfile", str(certificates / CA), "--ssl-certfile", str(certificates / CERTIFICATE)]
    return [*command, "--ssl-keyfile", str(certificates / KEY), "--enable-supernode-auth"]


def supernode_command(
    *,
    server: Address,
    ca: Path | None,
    key: Path | None,
    node_config: Mapping[str, str],
    runtime_port: int,
) -> list[str]:
    """Return the command that starts a device.

    Parameters
    ----------
    server : Address
        The SuperLink's Fleet API.
    ca, key : Path or None
        The certificate that the server's is checked against, and the device's private key; None for no TLS and no
        authentication.
    node_config : mapping
        See `node_config`.
    runtime_port : int
        A free port on 127.0.0.1, by which the device's own processes talk to each other.

    Raises
    ------
    ConfigError
        Flower's syntax cannot express one of the settings.
    """
    for name, value in node_config.items():
        if '"' in value:
            raise ConfigError(f"{name} = {value!r}: Flower's syntax has no quotation marks; rename it")
    command = [sys.executable, "-P", "-m", "fedtta_flwr.supernode", "--superlink", str(server)]
    command += ["--node-config", pairs(node_config)]
    command += ["--host", "127.0.0.1", "--port", str(runtime_port)]
    command += ["--insecure"] if ca is None else ["--root-certificates", str(ca)]
    return command if key is None else [*command, "--auth-supernode-private-key", str(key)]


def node_config(
    *,
    clients: str,
    data_dir: Path | None = None,
    stream: str = "",
    device: str = "",
    checkpoint: Path | None = None,
    predictions_dir: Path | None = None,
    state_dir: Path | None = None,
    give_up_after: float = 0.0,
) -> dict[str, str]:
    """Return what a device says of itself: whom it hosts, where its data, processor, source model and states are.

    And after how many seconds its visits are given up, where that is not left to the run.

    Raises
    ------
    ConfigError
        If there is no client, or that is no number of seconds.
    """
    if not give_up_after >= 0:
        raise ConfigError(f"--give-up-after {give_up_after}: allowed: seconds, or 0 to leave it to the run")
    paths = {"data-dir": data_dir, "checkpoint": checkpoint, "predictions-dir": predictions_dir, "state-dir": state_dir}
    settings = {
        "clients": ",".join(names_in(clients)),
        "stream": stream,
        "device": device,
        "give-up-after": str(give_up_after) if give_up_after else "",
    }
    settings |= {key: str(expanded(f"--{key}", path).absolute()) for key, path in paths.items() if path is not None}
    if not settings["clients"]:
        raise ConfigError(f"--client {clients!r}: allowed: one or more names, separated by commas")
    return {key: value for key, value in settings.items() if value}
