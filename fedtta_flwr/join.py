"""Being a device of a federation: a SuperNode that is started again whenever it ends, until somebody stops it."""

import random
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from fedtta_flwr.control import environment
from fedtta_flwr.credentials import load_key
from fedtta_flwr.deploy import Address, supernode_command
from fedtta_flwr.errors import FederationError
from fedtta_flwr.fleet import NotYet, check_plain, check_tls, is_registered
from fedtta_flwr.ports import check_free, free_port
from fedtta_flwr.processes import await_end, end_with_parent, stop
from fedtta_flwr.resolve import PLUGIN_VARIABLE

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
STOP_SECONDS = 20.0
MARK = "FEDTTA_JOIN"  # in the environment of what one `fedtta join` starts, and of nothing else


def join(
    server: Address,
    *,
    ca: Path | None,
    key: Path | None,
    node_config: Mapping[str, str],
    home: Path,
    runtime_port: int = 0,
) -> None:
    """Join a server and stay joined; returns only by an exception.

    What time may heal is waited for, with growing pauses: an absent server, a clock that is off, a server that still
    counts a killed device as online.

    Parameters
    ----------
    server : Address
        Of the Fleet API.
    ca, key : Path or None
        The certificate to check the server's against, and the private key that the server knows the public half of;
        None for neither TLS nor authentication.
    node_config : mapping
        See `fedtta_flwr.deploy.node_config`.
    home : Path
        Folder that Flower keeps the app in.
    runtime_port : int
        On 127.0.0.1, for the device's own processes; 0 = any free one.

    Raises
    ------
    ConfigError
        A file cannot be used, or the port.
    FederationError
        The server is another one than it should be, or does not know the key: somebody has to see to it.
    """
    if runtime_port:
        check_free("--runtime-port", Address("127.0.0.1", runtime_port))
    if key is not None:
        load_key(key)  # one that cannot be used is said before a server is waited for
    env = environment(home) | {MARK: uuid.uuid4().hex}
    if package := node_config.get("stream", "").partition(":")[0].partition(".")[0]:
        # Who names a function on this device's own command line allows its import.
        env[PLUGIN_VARIABLE] = ",".join(filter(None, [env.get(PLUGIN_VARIABLE), package]))
    wait = FIRST_WAIT
    while True:
        began = time.monotonic()
        try:
            _check(server, ca, key)
            port = runtime_port or free_port()
            status = _run(
                supernode_command(server=server, ca=ca, key=key, node_config=node_config, runtime_port=port), env
            )
            _check(server, ca, key)
            reason = (
                f"flower-supernode ended with status {status}; if it failed to activate, the server still counts "
                f"this device as online: for up to a minute after a kill, or because another process uses its key"
            )
        except NotYet as error:
            reason = str(error)
        if time.monotonic() - began > LONGEST_WAIT:
            wait = FIRST_WAIT
        pause = wait * random.uniform(0.75, 1.25)  # not all devices at once, when a server comes back
        print(f"{reason}; next try in {pause:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause)
        wait = min(2 * wait, LONGEST_WAIT)


def _check(server: Address, ca: Path | None, key: Path | None) -> None:
    """Find out whether a server is the right one and knows this device: Flower says less, and in many lines."""
    if ca is None or key is None:
        check_plain(server)
        return
    check_tls(server, ca)
    if not is_registered(server, ca, load_key(key)):
        raise FederationError(
            f"{server} does not know this device's key: register its public half on the server (fedtta register "
            f"{key.name}.pub --name CLIENT --ca ca.crt); a key that was revoked must be replaced by a new one"
        )


def _run(command: list[str], env: Mapping[str, str]) -> int:
    """Run a SuperNode to its end; whatever ends us ends it, gently, so that its server knows at once."""
    # A killed parent cannot tell its SuperNode, which would stay online and keep its successor out.
    # In a session of its own, for Ctrl-C is for us: processes that are still starting would end with a traceback each.
    process = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=end_with_parent)
    try:
        return process.wait()
    finally:
        stop([process], STOP_SECONDS)
        await_end(MARK, env[MARK], STOP_SECONDS)  # what it started ends after it, and with words of its own
