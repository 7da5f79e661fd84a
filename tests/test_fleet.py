"""What a device finds out about its server, on real sockets with real certificates; tests/e2e asks a real SuperLink."""

import os
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from flwr.proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server

from fedtta_flwr import fleet
from fedtta_flwr import join as joining
from fedtta_flwr.credentials import check_certificate, load_ca, load_key
from fedtta_flwr.deploy import Address
from fedtta_flwr.errors import ConfigError, FederationError
from fedtta_flwr.fleet import NotYet, check_plain, check_tls, is_registered, reach

ROOT = Path(__file__).parents[1]
Signed = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("k", "other"):
        script = [str(ROOT / "docker" / "keys.sh"), "server", name, "fed.example.org"]
        subprocess.run(script, cwd=folder, check=True, capture_output=True)
    return folder


@contextmanager
def server(
    certificates: Path | None,
    protocols: tuple[str, ...] = ("h2",),
    host: str = "127.0.0.1",
    words: bytes = b"220 another service\r\n" * 10,
) -> Iterator[Address]:
    """Something that shakes hands with whoever comes; without certificates it says a few words and hangs up."""
    context = None
    if certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        context.set_alpn_protocols(list(protocols))
    listening = socket.create_server((host, 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                try:
                    if context is None:
                        connection.sendall(words)
                        connection.recv(10_000)  # what was left unread would make the end a reset
                    else:
                        with context.wrap_socket(connection, server_side=True) as secure:
                            secure.recv(1)
                except OSError:  # the client may be appalled
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Address(host, listening.getsockname()[1])
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(timeout=10)


@contextmanager
def fleet_api(
    certificates: Path | None,
    status: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
    words: str = "database or disk is full",
) -> Iterator[Address]:
    """A gRPC server that answers whatever it is asked with an error."""

    class Failing(FleetServicer):  # type: ignore[misc]
        def ActivateNode(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802 - gRPC's name
            if status == grpc.StatusCode.UNKNOWN:
                raise OSError(f"{words}\n[SQL: ...]")
            context.abort(status, words)

        SendNodeHeartbeat = ActivateNode

    serving = grpc.server(ThreadPoolExecutor(1))
    add_FleetServicer_to_server(Failing(), serving)
    if certificates is None:
        port = serving.add_insecure_port("127.0.0.1:0")
    else:
        pair = ((certificates / "server.key").read_bytes(), (certificates / "server.crt").read_bytes())
        port = serving.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    serving.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        serving.stop(None).wait()


def dated(keys: Path, folder: Path, start: timedelta, end: timedelta) -> Path:
    """A certificate of the right CA whose time is another."""
    (ca,) = load_ca(keys / "k" / "ca.crt")
    ca_key = load_pem_private_key((keys / "k" / "ca.key").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + start)
        .not_valid_after(now + end)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    certificate = builder.sign(ca_key, hashes.SHA384())
    (folder / "server.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "server.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return folder


def test_the_right_server(keys: Path) -> None:
    with server(keys / "k") as address:
        reach(address)
        shown = check_tls(address, keys / "k" / "ca.crt")
        assert check_tls(Address("localhost", address.port), keys / "k" / "ca.crt") == shown
    assert set(shown.names) == {"localhost", "127.0.0.1", "::1", "fed.example.org"}
    assert timedelta(days=824) < shown.until - datetime.now(UTC) < timedelta(days=826)


def fault(address: Address, ca: Path, *words: str) -> FederationError:
    with pytest.raises(FederationError) as caught:
        check_tls(address, ca)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in (str(address), *words)), text
    return caught.value


def test_another_ca(keys: Path) -> None:
    with server(keys / "k") as address:
        error = fault(address, keys / "other" / "ca.crt", "not signed by", "other/ca.crt", "copy")
    assert not isinstance(error, NotYet)


def test_another_host(keys: Path) -> None:
    with server(keys / "k", host="127.0.0.2") as address:
        error = fault(address, keys / "k" / "ca.crt", "not for 127.0.0.2 but for localhost, fed.example.org")
    assert not isinstance(error, NotYet)


@pytest.mark.parametrize(
    ("start", "end", "words", "heals"),
    [
        (timedelta(days=1), timedelta(days=2), "not valid yet", True),
        (timedelta(days=-2), timedelta(days=-1), "expired", False),
    ],
)
def test_a_certificate_at_another_time(
    keys: Path, tmp_path: Path, start: timedelta, end: timedelta, words: str, heals: bool
) -> None:
    with server(dated(keys, tmp_path, start, end)) as address:
        error = fault(Address("localhost", address.port), keys / "k" / "ca.crt", words, f"{datetime.now(UTC):%Y-%m-%d}")
    assert isinstance(error, NotYet) == heals


def test_a_ca_that_has_expired_is_not_mistaken_for_the_servers_certificate(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = dated(keys, tmp_path, timedelta(days=-2), timedelta(days=-1))
    with server(old) as address:
        address = Address("localhost", address.port)
        fault(address, keys / "k" / "ca.crt", "its certificate has expired", "docker/keys.sh server")
        monkeypatch.setattr(fleet, "not_valid_now", lambda certificate: "valid from then to then")
        fault(address, keys / "k" / "ca.crt", "ca.crt itself has expired", "make a new CA")


def test_tls_of_something_else(keys: Path) -> None:
    with server(keys / "k", protocols=("http/1.1",)) as address:
        fault(address, keys / "k" / "ca.crt", "not gRPC", "Fleet port")


def test_no_tls(keys: Path) -> None:
    with server(None) as address:
        error = fault(address, keys / "k" / "ca.crt", "not with TLS", "--insecure")
    assert not isinstance(error, NotYet)


def test_a_superlink_without_tls(keys: Path) -> None:
    with fleet_api(None) as address:
        error = fault(address, keys / "k" / "ca.crt", "not with TLS", "--insecure")
    assert not isinstance(error, NotYet)


def test_who_hangs_up_may_soon_be_back(keys: Path) -> None:
    """As a proxy or a tunnel does while its server restarts."""
    with server(None, words=b"") as address:
        assert isinstance(fault(address, keys / "k" / "ca.crt", "hung up", "is the server running"), NotYet)


def test_who_cuts_the_connection_may_soon_be_back(keys: Path) -> None:
    """As a load balancer does that has no server behind it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def cut() -> None:
            connection, _ = listening.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # end by a reset
            connection.recv(1)
            connection.close()

        thread = threading.Thread(target=cut)
        thread.start()
        address = Address("127.0.0.1", listening.getsockname()[1])
        assert isinstance(fault(address, keys / "k" / "ca.crt", "hung up", "Connection reset"), NotYet)
        thread.join()


@pytest.mark.parametrize(
    ("name", "heals"),
    [(name, True) for name in ("UNKNOWN", "INTERNAL", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")]
    + [(name, False) for name in ("UNIMPLEMENTED", "PERMISSION_DENIED", "FAILED_PRECONDITION")],
)
def test_a_server_that_fails_is_not_one_that_refuses(keys: Path, name: str, heals: bool) -> None:
    with fleet_api(keys / "k", grpc.StatusCode[name]) as address, pytest.raises(FederationError) as caught:
        is_registered(address, keys / "k" / "ca.crt", ec.generate_private_key(ec.SECP384R1()))
    assert isinstance(caught.value, NotYet) == heals
    assert "disk is full" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_clock_that_is_off_by_years_is_off_by_more_than_a_day(keys: Path) -> None:
    with (
        fleet_api(keys / "k", grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp") as address,
        pytest.raises(NotYet, match="this clock is more than a day off, the server allows"),
    ):
        is_registered(address, keys / "k" / "ca.crt", ec.generate_private_key(ec.SECP384R1()))


def test_a_device_without_tls_does_not_wait_for_a_server_with_it(keys: Path) -> None:
    with server(keys / "k") as address, pytest.raises(FederationError, match="speaks TLS: join it with --ca and --key"):
        check_plain(address)
    with fleet_api(None) as address:
        check_plain(address)


def test_a_servers_own_certificate(keys: Path, tmp_path: Path) -> None:
    folder = keys / "k"
    ca = folder / "ca.crt"
    check_certificate(folder / "server.crt", folder / "server.key", ca)
    (tmp_path / "server.key").write_text("no key")
    (tmp_path / "other").mkdir()
    other = dated(keys, tmp_path / "other", timedelta(days=-2), timedelta(days=2))
    for certificate, key in (
        (folder / "server.crt", tmp_path / "server.key"),
        (folder / "server.crt", other / "server.key"),
        (tmp_path / "server.key", folder / "server.key"),
    ):
        with pytest.raises(ConfigError, match=r"cannot be used with server.key \(.*make a new one") as caught:
            check_certificate(certificate, key, ca)
        assert "\n" not in str(caught.value)
    (tmp_path / "old").mkdir()
    old = dated(keys, tmp_path / "old", timedelta(days=-2), timedelta(days=-1))
    with pytest.raises(ConfigError, match=r"server.crt: valid from .* to .*, this clock says"):
        check_certificate(old / "server.crt", old / "server.key", ca)


def issue(name: str, issuer: Signed | None = None, days: int = 2, *, is_ca: bool) -> Signed:
    """A certificate that another has signed, or it itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    above, signing = (subject, key) if issuer is None else (issuer[0].subject, issuer[1])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder(above, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=3))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    )
    if is_ca:
        # the sixth says that it may sign certificates
        builder = builder.add_extension(x509.KeyUsage(*(i == 5 for i in range(9))), critical=True)
    return builder.sign(signing, hashes.SHA256()), key


def written(path: Path, *certificates: Signed) -> Path:
    path.write_bytes(b"".join(certificate.public_bytes(Encoding.PEM) for certificate, _ in certificates))
    return path


def test_a_servers_certificate_must_follow_from_its_ca(keys: Path, tmp_path: Path) -> None:
    folder, key = keys / "k", tmp_path / "server.key"
    renewed = tmp_path / "ca.crt"  # the CA's new certificate before the old one, as a renewal asks of devices
    renewed.write_bytes((keys / "other" / "ca.crt").read_bytes() + (folder / "ca.crt").read_bytes())
    check_certificate(folder / "server.crt", folder / "server.key", renewed)

    root, old, lone = issue("root", is_ca=True), issue("old", days=-1, is_ca=True), issue("lone", is_ca=False)
    between = issue("between", root, is_ca=True)
    leaf, late = issue("leaf", between, is_ca=False), issue("late", old, is_ca=False)

    def check(chain: tuple[Signed, ...], authority: Path) -> None:
        key.write_bytes(chain[0][1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        check_certificate(written(tmp_path / "server.crt", *chain), key, authority)

    check((leaf, between), written(tmp_path / "root.crt", root))
    check((leaf,), written(tmp_path / "both.crt", root, between))
    check((lone,), written(tmp_path / "lone.crt", lone))
    for chain, authority, why in (
        ((leaf,), tmp_path / "root.crt", "unable to get local issuer certificate"),
        ((leaf, between), keys / "other" / "ca.crt", "unable to get"),
        ((lone,), tmp_path / "root.crt", "self.signed certificate"),
        ((late,), written(tmp_path / "old.crt", old), "certificate has expired"),
        ((leaf, between), folder / "ca.key", "NO_CERTIFICATE_OR_CRL_FOUND"),
    ):
        with pytest.raises(ConfigError, match=rf"cannot be verified by {authority.name} \({why}.*the ca.crt") as caught:
            check(chain, authority)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"server.crt: cannot be verified by ca.crt \("):
        check_certificate(folder / "server.crt", folder / "server.key", keys / "other" / "ca.crt")


def test_nobody_there(keys: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", probe.getsockname()[1])
        with pytest.raises(NotYet, match=r"cannot be reached .*refused"):
            reach(address)
        assert isinstance(fault(address, keys / "k" / "ca.crt", "cannot be reached"), NotYet)
    with pytest.raises(NotYet, match=r"nowhere\.invalid: no such host name"):
        reach(Address("nowhere.invalid", 9092))


def test_a_file_that_is_no_ca(keys: Path, tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "No such file"), (keys / "k" / "ca.key", "no PEM certificate")):
        with pytest.raises(ConfigError, match=words) as caught:
            load_ca(path)
        assert str(path) in str(caught.value)


def test_a_file_that_is_no_key(keys: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    good, edwards, locked = (tmp_path / name for name in ("good", "edwards", "locked"))
    key = ec.generate_private_key(ec.SECP256R1())
    good.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    assert load_key(good).private_numbers() == key.private_numbers()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "secret", "-f", str(locked)], check=True)
    other = ed25519.Ed25519PrivateKey.generate()
    edwards.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    for path, words in (
        (tmp_path / "none", "No such file"),
        (keys / "k" / "ca.crt", "no private key"),
        (keys / "k" / "server.key", "no private key"),  # EC, but not in OpenSSH's format
        (locked, "passphrase"),
        (edwards, "Ed25519"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            load_key(path)
        assert str(path) in str(caught.value)
        assert "EC key in OpenSSH's format" in str(caught.value)


def test_a_key_that_is_not_registered_is_named_as_the_server_has_it(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has the private half alone, in a folder of its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "cam-12").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    monkeypatch.setattr(joining, "check_tls", lambda *_: None)
    monkeypatch.setattr(joining, "_run", lambda *_: pytest.fail("a SuperNode was started"))
    monkeypatch.setattr(joining, "is_registered", lambda *_: False)
    with pytest.raises(FederationError, match="does not know this device's key: ") as caught:
        joining.join(
            Address("fed", 9092), ca=keys / "k" / "ca.crt", key=tmp_path / "cam-12", node_config={}, home=tmp_path
        )
    assert "public half on the server (fedtta register cam-12.pub --name CLIENT --ca ca.crt)" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_what_a_supernode_started_says_its_last_word_before_we_do(capfd: pytest.CaptureFixture[str]) -> None:
    env = dict(os.environ) | {joining.MARK: "this one"}
    other = subprocess.Popen(["sleep", "60"], env=env | {joining.MARK: "another"})
    try:
        assert joining._run(["sh", "-c", "(sleep 1; echo the last word) & exit 3"], env) == 3
        assert capfd.readouterr().out == "the last word\n"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
