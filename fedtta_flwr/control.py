"""A SuperLink's Control API: spoken with, or through Flower's own command line, by a home that names it."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtta_flwr.credentials import load_ca
from fedtta_flwr.errors import ConfigError, FederationError

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

    from fedtta_flwr.config import Scalar

OWN = "own"  # the connection's name in the home's config.toml; also its default
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
}
_FLWR = [
    sys.executable,
    "-P",  # what lies in the working directory is not imported: it may be somebody else's
    "-c",
    "import sys; from flwr.cli.app import app; sys.argv[0] = 'flwr'; app()",
]


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a Flower process that keeps what it keeps in `home`."""
    env = os.environ | QUIET | {"FLWR_HOME": str(home)}
    # Flower starts its helpers by name: they must be those of this Python.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    return env


def connect(home: Path, address: str, ca: Path | None) -> dict[str, str]:
    """Write down in `home` which SuperLink ``flwr`` talks to; return the environment in which it does.

    Parameters
    ----------
    home : Path
        An existing folder.
    address : str
        ``HOST:PORT`` of the SuperLink's Control API.
    ca : Path or None
        The certificate that its own is checked against; None: no TLS.

    Raises
    ------
    ConfigError
        There is no such certificate.
    """
    if ca is not None and not ca.is_file():
        raise ConfigError(f"--ca {ca}: no such file; copy ca.crt of this federation (docker/keys.sh makes it)")
    trust = "insecure = true" if ca is None else f"root-certificates = {json.dumps(str(ca.absolute()))}"
    text = f'[superlink]\ndefault = "{OWN}"\n\n[superlink.{OWN}]\naddress = {json.dumps(address)}\n{trust}\n'
    (home / "config.toml").write_text(text)
    return environment(home)


def start_run(env: Mapping[str, str], root: Path, overrides: "Mapping[str, Scalar]", *options: str) -> int:
    """Start a run of the app in `root` and return its id.

    Raises
    ------
    FederationError
        The SuperLink cannot be reached or takes no such run.
    """
    arguments = ["run", str(root), OWN, "--format", "json", *options]
    if overrides:
        file = Path(env["FLWR_HOME"]) / "run-config.toml"  # an argument has room for some thousand clients' names only
        file.write_text("".join(f"{pairs({key: value})}\n" for key, value in overrides.items()))
        arguments += ["--run-config", str(file)]
    started = flwr(env, *arguments)
    if not started.get("success"):
        raise FederationError(f"flwr run: {one_line(started.get('error-message', started))}")
    return int(started["run-id"])


def words(control: str, ca: Path | None) -> str:
    """Return the options by which a command of ours reaches a SuperLink, for a shell."""
    return shlex.join(["--control", control, *(["--insecure"] if ca is None else ["--ca", str(ca)])])


@contextmanager
def control_api(control: str, ca: Path | None) -> Iterator["ControlHttpClient"]:
    """Speak with a SuperLink, without a process of Flower's for each word.

    Parameters
    ----------
    control : str
        ``HOST:PORT`` of its Control API.
    ca : Path or None
        The certificate that its own is checked against; None: no TLS.

    Raises
    ------
    ConfigError
        The CA file cannot be used.
    FederationError
        The SuperLink cannot be reached, or refuses.
    """
    import httpx
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.error import FlowerError
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    if ca is not None:
        load_ca(ca)
    client = ControlHttpClient.from_server_address(
        server_address=control,
        insecure=ca is None,
        root_certificates=None if ca is None else ca.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        refusal = FlowerError.from_json(error.response.text)
        raise FederationError(f"--control {control}: {one_line(refusal or error)}") from None
    except httpx.HTTPError as error:
        text = one_line(error)
        raise FederationError(f"--control {control}: {text}; is the server running, and the CA its own?") from None
    finally:
        client.close()


def flwr(env: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    """Run a command of Flower's and return what it prints as JSON.

    Raises
    ------
    FederationError
        It prints none; what it did print, in one line.
    """
    result = subprocess.run([*_FLWR, *arguments], env=env, capture_output=True, text=True, check=False)
    start = result.stdout.find("{")
    try:
        parsed = json.loads(result.stdout[start:]) if start >= 0 else None
    except json.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        text = one_line(result.stderr or result.stdout) or f"exit status {result.returncode}"
        raise FederationError(f"flwr {arguments[0]}: {text}")
    return parsed


def pairs(values: "Mapping[str, Scalar]") -> str:
    """Return settings in Flower's ``key=value`` syntax."""
    return " ".join(
        f"{key}={json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)}"
        for key, value in values.items()
    )


def one_line(text: object) -> str:
    """Return a message of Flower's without colours and line breaks, and without what is not about the matter."""
    lines = [line.strip() for line in COLOURS.sub("", str(text)).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Using SuperLink", "For more information")))


def moment(text: str) -> str:
    """Return a time of Flower's, to the second."""
    return text[:19].replace("T", " ")
