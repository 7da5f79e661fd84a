"""Ports of this machine: which are free, and whether a server can listen on an address."""

import errno
import socket

from fedtta_flwr.deploy import Address
from fedtta_flwr.errors import ConfigError


def free_port() -> int:
    """Return a port of this machine's that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_free(option: str, address: Address) -> None:
    """Refuse an address of this machine's on which a server cannot listen; `option` names another.

    Raises
    ------
    ConfigError
        Somebody else listens there, or it is no address of this machine's.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: one may just have ended
            probe.bind(place)
    except (OSError, UnicodeError) as error:  # no host name can have an empty part
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        in_use = f"port {address.port} is in use (by a server that is still ending? then wait)"
        fault = in_use if taken else f"it cannot be listened on ({getattr(error, 'strerror', error)})"
        raise ConfigError(f"{address}: {fault}; give another with {option}") from None


def check_apart(fleet: Address, control: Address) -> None:
    """Refuse a server's two addresses where one would keep it from listening on the other.

    Raises
    ------
    ConfigError
        They have one port, and not each an address of its own.
    """
    if fleet.port != control.port:
        return
    mine, theirs = ({place[0] for *_, place in socket.getaddrinfo(*both)} for both in (control, fleet))
    if mine & theirs or (mine | theirs) & {"0.0.0.0", "::"}:
        raise ConfigError(f"--control {control}: devices are awaited there, too ({fleet}); give another --fleet-port")
