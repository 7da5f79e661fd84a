"""What a device can find out about a server before it joins: does it answer, is it the right one, does it know the key.

Flower itself retries for ever, without a reason, when a certificate is for another host, and gives one error for a key
that nobody registered, and for a device that is still counted as online.
"""

import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtta_flwr.credentials import load_ca, not_valid_now
from fedtta_flwr.deploy import Address
from fedtta_flwr.errors import FederationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CONNECT_SECONDS = 10.0
NOT_YET_VALID, EXPIRED, OTHER_HOST = (9,), (10,), (62, 64)  # OpenSSL's X509_V_ERR_*: certificate, host name, IP
#: a request may be as much older or younger than the server's clock, in seconds (Flower: 5 s ahead, 305 s behind)
AHEAD, BEHIND = 5, 305
FURTHEST = 24 * 3600  # seconds by which a clock may be off for us to still measure by how much
#: gRPC's words for a server that is absent, busy, or fails (its disk is full, say): not for one that refuses
PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL", "CANCELLED", "RESOURCE_EXHAUSTED")


class NotYet(FederationError):  # noqa: N818 - no error: time may heal it
    """Something that time may heal: the server is absent, or a clock is off."""


@dataclass(frozen=True)
class Certificate:
    """What the server showed.

    Attributes
    ----------
    names : tuple of str
        For which hosts and addresses it is.
    until : datetime
        Its last moment.
    """

    names: tuple[str, ...]
    until: datetime


def reach(server: Address) -> None:
    """Connect and hang up.

    Raises
    ------
    NotYet
        Nobody answers.
    """
    with _connect(server):
        pass


def check_plain(server: Address) -> None:
    """Connect to a server as a device without TLS will.

    Raises
    ------
    NotYet
        Nobody answers.
    FederationError
        Who answers speaks TLS.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is believed, and nothing said
    with _connect(server) as plain:
        try:
            context.wrap_socket(plain, server_hostname=server.host).close()
        except OSError:
            return
    raise FederationError(f"{server} speaks TLS: join it with --ca and --key, not with --insecure")


def check_tls(server: Address, ca: Path) -> Certificate:
    """Shake hands with a server as its devices will; return what its certificate says.

    Raises
    ------
    NotYet
        Nobody answers, who does hangs up, or the certificate is not valid yet.
    FederationError
        It is not the server that it should be; one line that says why.
    """
    load_ca(ca)
    try:
        return _handshake(server, ca)
    except ssl.SSLCertVerificationError as error:
        raise _explain(server, ca, error) from None
    except OSError as error:
        # Who says something else speaks no TLS; who says nothing may be a proxy or a tunnel whose server is away.
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            raise FederationError(
                f"{server} answers, but not with TLS ({error.reason}): the server runs with --insecure, or this is the "
                f"port of something else"
            ) from None
        raise NotYet(
            f"{server} hung up during the TLS handshake ({error.strerror or error}): is the server running behind that "
            f"port, and with TLS?"
        ) from None


def is_registered(server: Address, ca: Path, key: "EllipticCurvePrivateKey") -> bool:
    """Ask whether a server knows a key.

    Raises
    ------
    NotYet
        The server does not answer or fails to, or the clocks differ by too much for it to listen.
    FederationError
        It answers something else.
    """
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    # A heartbeat of no seconds is refused, but only after the key has been looked up: nothing changes at the server.
    request = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=0.0)
    with _Fleet(server, ca, key) as fleet:
        answer = fleet.ask("ActivateNode", request)
    if answer == "Invalid timestamp":
        raise NotYet(clock_fault(clock_error(server, ca, key)))
    error = FlowerError.from_json(answer)
    if error is not None and error.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
        return True
    if error is not None and error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        return False
    raise FederationError(f"{server}: unexpected answer {answer!r}; is it a SuperLink of Flower 1.39?")


def clock_error(server: Address, ca: Path, key: "EllipticCurvePrivateKey") -> float | None:
    """Measure by how many seconds this clock is ahead of the server's (behind: negative), to the second.

    The server refuses what is dated more than 5 s after or 305 s before its own time; the edge of that window tells
    its clock. None if it is further off than a day.
    """
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

    with _Fleet(server, ca, key) as fleet:

        def accepted(shift: float) -> bool:
            return fleet.ask("SendNodeHeartbeat", SendNodeHeartbeatRequest(), shift) != "Invalid timestamp"

        step = AHEAD + BEHIND - 10
        shifts = (sign * step * i for i in range(FURTHEST // step + 1) for sign in (1, -1))
        low = next((float(shift) for shift in shifts if accepted(shift)), None)
        if low is None:
            return None
        high = low + AHEAD + BEHIND
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (middle, high) if accepted(middle) else (low, middle)
        return AHEAD - low


class _Fleet:
    """A connection to the Fleet API on which every request may be dated as one likes."""

    def __init__(self, server: Address, ca: Path, key: "EllipticCurvePrivateKey") -> None:
        from flwr.proto.fleet_pb2_grpc import FleetStub
        from flwr.supercore.grpc import create_channel
        from flwr.supercore.interceptors import RuntimeVersionClientInterceptor

        self._server, self._key = server, key
        interceptors = [RuntimeVersionClientInterceptor(component_name="SuperNode")]
        self._channel = create_channel(
            server_address=str(server), insecure=False, root_certificates=ca.read_bytes(), interceptors=interceptors
        )
        self._stub = FleetStub(self._channel)

    def __enter__(self) -> "_Fleet":
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()

    def ask(self, method: str, request: Any, shift: float = 0.0) -> str:
        """Send a request dated `shift` seconds from now; return the error's text, or nothing."""
        import grpc
        from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

        stamp = (datetime.now(UTC) + timedelta(seconds=shift)).isoformat()
        signature = sign_message(self._key, stamp.encode("ascii"))
        headers = (
            (PUBLIC_KEY_HEADER, public_key_to_bytes(self._key.public_key())),
            (TIMESTAMP_HEADER, stamp),
            (SIGNATURE_HEADER, signature),
        )
        try:
            getattr(self._stub, method)(request, timeout=CONNECT_SECONDS, metadata=headers)
        except grpc.RpcError as error:
            if (status := error.code().name) in PASSING:
                why = " ".join(str(error.details()).split())
                raise NotYet(f"{self._server}: {status} ({why}); if that lasts, see the server's log") from None
            return str(error.details())
        return ""


def _connect(server: Address) -> socket.socket:
    try:
        return socket.create_connection(server, timeout=CONNECT_SECONDS)
    except socket.gaierror:
        raise NotYet(f"{server.host}: no such host name; check it, and this machine's DNS") from None
    except OSError as error:
        text = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise NotYet(
            f"{server} cannot be reached ({text}): is the server running, and does a firewall let TCP port "
            f"{server.port} through?"
        ) from None


def _handshake(server: Address, ca: Path, *, check_hostname: bool = True) -> Certificate:
    from cryptography import x509

    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = check_hostname
    context.set_alpn_protocols(["h2"])
    with _connect(server) as plain, context.wrap_socket(plain, server_hostname=server.host) as secure:
        if secure.selected_alpn_protocol() != "h2":
            raise FederationError(
                f"{server} speaks TLS but not gRPC: devices connect to the Fleet port (9092), not to the Control API"
            )
        certificate = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
    hosts: list[str] = []
    with suppress(x509.ExtensionNotFound):  # an old certificate with a common name only, which is for nobody
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = names.get_values_for_type(x509.DNSName) + [str(ip) for ip in names.get_values_for_type(x509.IPAddress)]
    return Certificate(tuple(hosts), certificate.not_valid_after_utc)


def _explain(server: Address, ca: Path, error: ssl.SSLCertVerificationError) -> FederationError:
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if error.verify_code in NOT_YET_VALID:
        return NotYet(f"{server}: its certificate is not valid yet; this clock says {now}: set it (NTP)")
    if error.verify_code in EXPIRED and all(map(not_valid_now, load_ca(ca))):
        return FederationError(
            f"{server}: {ca} itself has expired; this clock says {now}: if that is right, make a new CA "
            f"(docs/deploy.md), whose ca.crt every device needs"
        )
    if error.verify_code in EXPIRED:
        return FederationError(
            f"{server}: its certificate has expired; this clock says {now}: if that is right, renew the certificate "
            f"(docker/keys.sh server) and restart the server"
        )
    if error.verify_code in OTHER_HOST:
        try:
            names = ", ".join(_handshake(server, ca, check_hostname=False).names) or "no host at all"
        except OSError:  # it went away in between
            names = "other hosts"
        return FederationError(
            f"{server}: its certificate is not for {server.host} but for {names}: join by one of these names, or make "
            f"a certificate for {server.host} (docker/keys.sh server)"
        )
    return FederationError(
        f"{server}: its certificate was not signed by {ca} ({error.verify_message}): this is another server, or the "
        f"CA of another federation; copy this server's ca.crt here"
    )


def clock_fault(ahead: float | None) -> str:
    """Say by how much a clock is off, and what to do."""
    off = "more than a day off" if ahead is None else f"{abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
    return f"this clock is {off}, the server allows {AHEAD} s ahead and {BEHIND} s behind: set it (NTP)"
