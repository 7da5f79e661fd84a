"""Flower's own command line, on the SuperLink that a home of ours names: start a run, follow it, learn how it ended."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtta_flwr.errors import ConfigError, FederationError
from fedtta_flwr.processes import end_with_parent

if TYPE_CHECKING:
    from fedtta_flwr.config import Scalar

OWN = "own"  # the connection's name in the home's config.toml; also its default
START_SECONDS = 60.0
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
}
_FLWR = [
    sys.executable,
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


def start_run(env: Mapping[str, str], root: Path, overrides: "Mapping[str, Scalar]", *options: str) -> str:
    """Start a run of the app in `root` and return its id.

    Raises
    ------
    FederationError
        The SuperLink cannot be reached or takes no such run.
    """
    arguments = ["run", str(root), OWN, "--format", "json", *options]
    if overrides:
        arguments += ["--run-config", pairs(overrides)]
    started = flwr(env, *arguments)
    if not started.get("success"):
        raise FederationError(f"flwr run: {one_line(started.get('error-message', started))}")
    return str(started["run-id"])


def await_start(env: Mapping[str, str], run_id: str) -> None:
    """Wait until a run is taken up.

    Raises
    ------
    FederationError
        Nothing does so within a minute.
    """
    deadline = time.monotonic() + START_SECONDS
    while run_status(env, run_id)[0] == "pending":
        if time.monotonic() > deadline:
            raise FederationError(
                f"run {run_id} has been pending for {START_SECONDS:g} s, nothing starts its ServerApp: with "
                f"--isolation process a flower-superexec must be connected to the SuperLink"
            )
        time.sleep(0.2)


def follow(env: Mapping[str, str], run_id: str) -> None:
    """Show a run's log until its end.

    Raises
    ------
    FederationError
        It does not complete (``flwr run`` itself would exit with 0).
    """
    # Who is killed must not leave it behind: a SuperLink ends only when nobody listens any more.
    subprocess.run([*_FLWR, "log", run_id, OWN, "--stream"], env=env, check=False, preexec_fn=end_with_parent)
    while not (status := run_status(env, run_id))[0].startswith("finished"):
        time.sleep(0.5)
    if status[0] != "finished:completed":
        raise FederationError(f"run {run_id} ended as {status[0]}: {status[1]}")


def run_status(env: Mapping[str, str], run_id: str) -> tuple[str, str]:
    """Return a run's status, such as ``"running"`` or ``"finished:failed"``, and its details."""
    runs = flwr(env, "list", OWN, "--run-id", run_id, "--format", "json").get("runs", [])
    if not runs:
        raise FederationError(f"the SuperLink knows no run {run_id}")
    return str(runs[0]["status"]), str(runs[0].get("status-details", ""))


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
