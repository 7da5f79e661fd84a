"""Why a device cannot join: one finding a line, and what to do about it."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from fedtta_flwr.credentials import load_ca, load_key, not_valid_now
from fedtta_flwr.deploy import Address
from fedtta_flwr.errors import FedTTAError
from fedtta_flwr.fleet import (
    AHEAD,
    BEHIND,
    check_tls,
    clock_error,
    clock_fault,
    is_registered,
    reach,
)

FLOWER = "1.39"
PYTHONS = ((3, 11), (3, 13))
EXPIRES_SOON = 30  # days
LITTLE_SPACE, NO_SPACE = 1e9, 1e8  # bytes


class Finding(NamedTuple):
    """One line of the report."""

    level: Literal["ok", "warn", "FAIL"]
    text: str

    def __str__(self) -> str:
        """Return the line."""
        return f"{self.level:<4}  {self.text}"


def examine(
    *,
    server: Address | None = None,
    ca: Path | None = None,
    key: Path | None = None,
    data_dir: Path | None = None,
    checkpoint: Path | None = None,
    state: Path,
    device: str = "auto",
) -> Iterator[Finding]:
    """Look at everything that a device needs in order to join; yield as it is found.

    Parameters
    ----------
    server : Address, optional
        Of the Fleet API; without it nothing is asked of the network.
    ca, key, data_dir, checkpoint : Path, optional
        As for ``fedtta join``.
    state : Path
        Where the device would keep its state.
    device : str
        ``auto``, ``cpu`` or ``cuda:N``.
    """
    yield from _software(device)
    yield from _folders(data_dir, state)
    if checkpoint is not None:
        yield _checkpoint(checkpoint)
    if ca is not None:
        yield from _authority(ca)
    if key is not None:
        yield from _private(key)
    if server is not None:
        yield from _contact(server, ca, key)


def _software(device: str) -> Iterator[Finding]:
    python = f"python {sys.version.split()[0]}"
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        yield Finding("ok", python)
    else:
        yield Finding("FAIL", f"{python}: allowed: 3.{PYTHONS[0][1]} to 3.{PYTHONS[1][1]}; install one of them")
    flower = _version("flwr")
    if flower.startswith(f"{FLOWER}."):
        yield Finding("ok", f"flwr {flower}, fedtta-flwr {_version('fedtta-flwr')}")
    else:
        yield Finding("FAIL", f"flwr {flower}: allowed: {FLOWER}; pip install 'flwr[simulation]~={FLOWER}.0'")
    if shutil.which("flower-supernode", path=str(Path(sys.executable).parent)) is None:
        yield Finding("FAIL", f"flower-supernode is not beside {sys.executable}: install flwr into this environment")
    try:
        import torch

        from fedtta_flwr.workbench import choose_device
    except Exception as error:  # a half-installed torch may raise anything
        yield Finding("FAIL", f"torch cannot be imported ({type(error).__name__}: {error}); pip install torch")
        return
    try:
        chosen = choose_device(device)
        name = f"CUDA, {torch.cuda.get_device_name(chosen)}" if chosen.type == "cuda" else "on the CPU"
        yield Finding("ok", f"torch {torch.__version__}, computes {name} (device {device})")
    except FedTTAError as error:
        yield Finding("FAIL", f"torch {torch.__version__}: {error}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def _folders(data_dir: Path | None, state: Path) -> Iterator[Finding]:
    if data_dir is not None:
        try:
            entries = sum(1 for _ in os.scandir(data_dir))
            level: Literal["ok", "warn"] = "ok" if entries else "warn"
            yield Finding(level, f"data folder {data_dir}: {entries or 'no'} entries")
        except OSError as error:
            yield Finding("FAIL", f"data folder {data_dir}: {error.strerror}; make it, or let this user read it")
    # os.path tells of what must not be looked at that it is not there, where Path raises.
    there = next(path for path in (state, *state.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        yield Finding("FAIL", f"state folder {state}: {there} cannot be written; name another by --state-dir")
        return
    free = shutil.disk_usage(there).free
    text = f"state folder {state}: can be written, {free / 1e9:.1f} GB free"
    if free < LITTLE_SPACE:
        yield Finding("FAIL" if free < NO_SPACE else "warn", f"{text}: make room, or name another by --state-dir")
    else:
        yield Finding("ok", text)


def _checkpoint(path: Path) -> Finding:
    if os.path.isdir(path):  # of the zoo's models
        return Finding("ok", f"checkpoint {path}: a folder, for robustbench:ID")
    from fedtta_flwr.models.checkpoints import read_tensors  # on use: it brings torch, which may be what is wrong

    try:
        return Finding("ok", f"checkpoint {path}: {len(read_tensors(path))} tensors")
    except FedTTAError as error:
        return Finding("FAIL", str(error))


def _authority(ca: Path) -> Iterator[Finding]:
    try:
        certificates = load_ca(ca)
    except FedTTAError as error:
        yield Finding("FAIL", str(error))
        return
    last = max(certificates, key=lambda certificate: certificate.not_valid_after_utc)
    if all(map(not_valid_now, certificates)):
        yield Finding("FAIL", f"CA {ca}: {not_valid_now(last)}, or make a new CA (docs/deploy.md)")
        return
    until = last.not_valid_after_utc
    soon = (until - datetime.now(UTC)).days < EXPIRES_SOON
    text = f"CA {ca}: valid until {until:%Y-%m-%d}"
    yield Finding("warn" if soon else "ok", text + (": make a new CA in time (docs/deploy.md)" if soon else ""))


def _private(key: Path) -> Iterator[Finding]:
    try:
        curve = load_key(key).curve.name
    except FedTTAError as error:
        yield Finding("FAIL", str(error))
        return
    mode = key.stat().st_mode & 0o777
    if mode & 0o077:
        yield Finding(
            "warn", f"key {key}: EC, {curve}, but others may read it (mode {mode:o}): chmod 600 {shlex.quote(str(key))}"
        )
    else:
        yield Finding("ok", f"key {key}: EC, {curve}, private")


def _contact(server: Address, ca: Path | None, key: Path | None) -> Iterator[Finding]:
    """Look at the server, step by step; each step needs the one before."""
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        reach(server)
        yield Finding("ok", f"{server} can be reached")
        if ca is None:
            yield Finding("warn", "no --ca: TLS, the clock and the key are not looked at")
            return
        shown = check_tls(server, ca)
        days = (shown.until - datetime.now(UTC)).days
        soon = days < EXPIRES_SOON
        text = f"certificate for {', '.join(shown.names)}, valid until {shown.until:%Y-%m-%d} ({days} days)"
        yield Finding("warn" if soon else "ok", text + (": renew it (docker/keys.sh server)" if soon else ""))
        # Any key will do for the clock, which the server looks at before it looks the key up.
        private_key = ec.generate_private_key(ec.SECP384R1()) if key is None else load_key(key)
        ahead = clock_error(server, ca, private_key)
        if ahead is None or not -BEHIND < ahead < AHEAD:
            yield Finding("FAIL", clock_fault(ahead))
            return
        side = "ahead of" if ahead >= 0 else "behind"
        text = f"this clock is {abs(ahead):.1f} s {side} the server's (allowed: {AHEAD} s ahead, {BEHIND} s behind)"
        yield Finding("warn" if ahead > AHEAD / 2 or ahead < -BEHIND / 2 else "ok", text)
        if key is None:
            yield Finding("warn", "no --key: whether the server knows this device is not looked at")
        elif is_registered(server, ca, private_key):
            yield Finding("ok", "the server knows this key")
        else:
            register = f"fedtta register {key.name}.pub --name CLIENT --ca ca.crt"
            yield Finding("FAIL", f"the server does not know this key: {register} on the server")
    except FedTTAError as error:
        yield Finding("FAIL", str(error))
