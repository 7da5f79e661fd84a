"""The two files that a device has: the CA's certificate, and its own private key."""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedtta_flwr.errors import ConfigError

if TYPE_CHECKING:
    import ssl

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


def load_ca(path: Path) -> "list[x509.Certificate]":
    """Read the certificates that servers' certificates are checked against: one, or two while one follows another.

    Raises
    ------
    ConfigError
        There is none, or it is none.
    """
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--ca {path}: {error.strerror}; copy ca.crt of this federation here (docker/keys.sh makes it)"
        ) from None
    except ValueError:
        raise ConfigError(f"--ca {path}: no PEM certificate; copy ca.crt of this federation here once more") from None


def load_key(path: Path) -> "EllipticCurvePrivateKey":
    """Read a device's private key.

    Raises
    ------
    ConfigError
        It is absent, protected by a passphrase, or not what Flower takes.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    wanted = (
        "allowed: an EC key in OpenSSH's format without a passphrase (docker/keys.sh client, or ssh-keygen -t ecdsa)"
    )
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"--key {path}: {error.strerror}; {wanted}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason = "protected by a passphrase" if isinstance(error, TypeError) else "no private key"
        raise ConfigError(f"--key {path}: {reason}; {wanted}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"--key {path}: {type(key).__name__.lstrip('_')}; {wanted}")
    return key


def load_public_key(path: Path) -> bytes:
    """Read a device's public key; return it as Flower sends it.

    Raises
    ------
    ConfigError
        It is absent, or not what Flower takes.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    wanted = "copy the device's KEY.pub here, an EC key in OpenSSH's format (docker/keys.sh client makes it)"
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {wanted}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: no public key; {wanted}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path}: {type(key).__name__.lstrip('_')}; {wanted}")
    return public_key_to_bytes(key)


def check_certificate(certificate: Path, key: Path, ca: Path) -> None:
    """Find out whether a server's certificate and private key belong together, are valid now, and follow from its CA.

    Raises
    ------
    ConfigError
        If not.
    """
    import ssl

    from cryptography import x509

    again = "make a new one (docker/keys.sh server)"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
        read = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise ConfigError(f"{certificate}: cannot be used with {key.name} ({why}); {again}") from None
    if fault := not_valid_now(read):
        raise ConfigError(f"{certificate}: {fault}, or {again}")
    try:
        _shake_hands(context, ca)
    except OSError as error:
        why = getattr(error, "verify_message", None) or getattr(error, "reason", None) or error
        raise ConfigError(
            f"{certificate}: cannot be verified by {ca.name} ({why}), so nobody could connect; put the ca.crt there "
            f"that signed it, or {again}"
        ) from None


def _shake_hands(server: "ssl.SSLContext", ca: Path) -> None:
    """Do in memory what will be done with each client; who judges is TLS itself: of chains, and of several CAs."""
    import ssl

    client = ssl.create_default_context(cafile=ca)
    client.check_hostname = False  # by which names it will be reached is not known here
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking, answering = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for end in (asking, answering, asking):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


def not_valid_now(certificate: "x509.Certificate") -> str:
    """Say when a certificate is valid and what to do, where that is not now; nothing where it is."""
    begin, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    if begin <= now <= end:
        return ""
    return (
        f"valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}, this clock says {now:%Y-%m-%d %H:%M} UTC: set the clock (NTP)"
    )
