"""`docker/keys.sh`: what it makes, whom it is for, and that it overwrites nothing."""

import ipaddress
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedtta_flwr.credentials import load_ca, load_key, load_public_key
from fedtta_flwr.errors import ConfigError

ROOT = Path(__file__).parents[1]
HOSTS = ["fed.example.org", "superlink", "10.0.0.5", "fd00::5"]


def keys(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = [str(ROOT / "docker" / "keys.sh"), *arguments]
    return subprocess.run(
        script, cwd=folder, env={"PATH": "/usr/local/bin:/usr/bin:/bin"} | variables, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for arguments in (["server", "k", *HOSTS], ["client", "k", "cam-07", "gate_2"]):
        done = keys(folder, *arguments)
        assert done.returncode == 0, done.stderr
    return folder / "k"


def test_private_files_are_private(made: Path) -> None:
    private = {"ca.key", "server.key", "clients/cam-07", "clients/gate_2"}
    public = {"ca.crt", "server.crt", "clients/cam-07.pub", "clients/gate_2.pub"}
    files = {str(path.relative_to(made)): path.stat().st_mode & 0o777 for path in made.rglob("*") if path.is_file()}
    assert files == dict.fromkeys(private, 0o600) | dict.fromkeys(public, 0o644)


def test_the_certificate_is_signed_and_for_these_hosts(made: Path) -> None:
    (ca,) = load_ca(made / "ca.crt")
    server = x509.load_pem_x509_certificate((made / "server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fed.example.org", "superlink"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(text) for text in ("127.0.0.1", "::1", "10.0.0.5", "fd00::5")
    ]
    constraints = {c: c.extensions.get_extension_for_class(x509.BasicConstraints) for c in (ca, server)}
    assert [constraints[c].value.ca for c in (ca, server)] == [True, False]
    assert all(c.critical for c in constraints.values())
    for certificate, days in ((ca, 3650), (server, 825)):
        assert abs(certificate.not_valid_after_utc - datetime.now(UTC) - timedelta(days=days)) < timedelta(days=1)


def test_a_host_is_in_the_certificate_once(tmp_path: Path) -> None:
    assert keys(tmp_path, "server", "k", "localhost", "fed", "*.fed", "127.0.0.1", "fed").returncode == 0
    server = x509.load_pem_x509_certificate((tmp_path / "k" / "server.crt").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fed", "*.fed"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]


def test_a_devices_key_is_one_that_flower_takes(made: Path) -> None:
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key = load_key(made / "clients" / "cam-07")
    assert isinstance(key.curve, ec.SECP384R1)
    assert try_load_public_key(made / "clients" / "cam-07.pub") == public_key_to_bytes(key.public_key())
    assert load_public_key(made / "clients" / "cam-07.pub") == public_key_to_bytes(key.public_key())
    other = load_ssh_public_key((made / "clients" / "gate_2.pub").read_bytes())
    assert other != key.public_key()


def test_a_public_key_that_flower_does_not_take_is_refused(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "cam.pub"
    for key in (ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048)):
        path.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
        with pytest.raises(ConfigError, match=r"cam\.pub: (Ed25519|RSA)PublicKey; copy"):
            load_public_key(path)
    with pytest.raises(ConfigError, match="cam-07: no public key; copy"):
        load_public_key(made / "clients" / "cam-07")  # which is to stay on the device
    with pytest.raises(ConfigError, match="No such file"):
        load_public_key(tmp_path / "absent.pub")


def test_nothing_is_overwritten(made: Path) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    for arguments in (["server", "k", "a"], ["client", "k", "new", "cam-07"]):
        done = keys(made.parent, *arguments)
        assert done.returncode == 2
        assert "there already" in done.stderr
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before  # and nothing is added


def test_a_name_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    done = keys(tmp_path, "client", "k", "a", "b", "a")
    assert (done.returncode, "given twice" in done.stderr) == (2, True)
    assert not (tmp_path / "k").exists()


def test_no_certificate_outlives_its_ca(tmp_path: Path) -> None:
    done = keys(tmp_path, "server", ".", "fed.example.org", CA_DAYS="5")
    assert done.returncode != 0
    assert "the CA ends before a certificate of 825 days: set DAYS to fewer" in done.stdout + done.stderr
    assert not (tmp_path / "ca.key").exists()


def test_a_certificate_is_renewed_by_the_same_ca(made: Path, tmp_path: Path) -> None:
    for name in ("ca.key", "ca.crt"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    assert keys(tmp_path, "server", ".", "new.example.org", DAYS="2").returncode == 0
    assert (tmp_path / "ca.crt").read_bytes() == (made / "ca.crt").read_bytes()
    renewed = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    renewed.verify_directly_issued_by(load_ca(made / "ca.crt")[0])
    assert renewed.not_valid_after_utc - datetime.now(UTC) < timedelta(days=2)


def test_a_ca_without_its_key_is_not_replaced(made: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_bytes((made / "ca.crt").read_bytes())
    done = keys(tmp_path, "server", ".", "a")
    assert done.returncode == 2
    assert "ca.key" in done.stderr


def test_it_says_what_goes_where(tmp_path: Path) -> None:
    told = keys(tmp_path, "server", "k", "fed").stdout + keys(tmp_path, "client", "k", "cam").stdout
    for words in (
        "k/ca.crt ",
        "every device",
        "k/ca.key ",
        "keep it safe",
        "fedtta register k/clients/cam.pub --name cam",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "HOST"),
        (["server", "k"], "HOST"),
        (["server", "k", "https://fed"], "https://fed"),
        (["server", "k", "fed:9092"], "fed:9092"),
        (["server", "k", "1:2:3"], "1:2:3"),
        (["server", "k", "256.1.1.1"], "256.1.1.1"),
        (["server", "k", "-x"], "-x"),
        (["client", "k", "../x"], "../x"),
        (["client", "k", "a.pub"], "a.pub"),
        (["client", "k", "a,b"], "a,b"),
    ],
)
def test_what_cannot_be_leaves_nothing_behind(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = keys(tmp_path, *arguments)
    assert done.returncode == 2
    assert words in done.stderr + done.stdout
    assert not list(tmp_path.iterdir())


def test_the_repository_takes_no_keys() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    for path in ("keys/ca.key", "docker/keys/clients/cam-07"):
        assert subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0
    assert subprocess.run(["git", "check-ignore", "-q", "docker/keys.sh"], cwd=ROOT).returncode == 1
