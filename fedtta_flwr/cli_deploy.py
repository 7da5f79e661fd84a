"""``fedtta serve``, ``register``, ``nodes``, ``revoke``, ``join`` and ``doctor``: a federation of real machines."""

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from fedtta_flwr.credentials import check_certificate
from fedtta_flwr.deploy import (
    CA,
    CERTIFICATE,
    CONTROL_PORT,
    FLEET_PORT,
    KEY,
    Address,
    check_control,
    parse_address,
    state_dir,
    superlink_command,
)
from fedtta_flwr.deploy import node_config as make_node_config
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.paths import expanded
from fedtta_flwr.resolve import names_in

app = typer.Typer()

Control = Annotated[str, typer.Option(help="HOST:PORT of the server's Control API")]
CaFile = Annotated[Path | None, typer.Option(help="ca.crt of the federation")]
Insecure = Annotated[bool, typer.Option("--insecure", help="no TLS, no authentication: on a bench only")]
Json = Annotated[bool, typer.Option("--json", help="as a JSON array, for other programs")]
LOCAL_CONTROL = f"127.0.0.1:{CONTROL_PORT}"


@app.command()
def serve(
    certificates: Annotated[Path | None, typer.Option(help="folder that `docker/keys.sh server` made")] = None,
    host: Annotated[str, typer.Option(help="address on which devices are awaited")] = "0.0.0.0",
    fleet_port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port for devices")] = FLEET_PORT,
    control: Annotated[str, typer.Option(help="address of the Control API, which has no login")] = LOCAL_CONTROL,
    control_without_login: Annotated[
        bool,
        typer.Option("--control-without-login", help="open --control to others, who can then run code on devices"),
    ] = False,
    state_dir_: Annotated[Path | None, typer.Option("--state-dir", help="nodes, runs and logs of the server")] = None,
    isolation: Annotated[str, typer.Option(help="subprocess; process: start flower-superexec yourself")] = "subprocess",
    superexec_secret: Annotated[Path | None, typer.Option(help="isolation process: file with a shared secret")] = None,
    insecure: Insecure = False,
) -> None:
    """Be the server: a SuperLink that devices join over gRPC."""
    if isolation not in ("subprocess", "process"):
        raise ConfigError(f"--isolation {isolation!r}: unknown; allowed: subprocess, process")
    folder = _certificates(certificates, insecure)
    address = parse_address("--control", control, CONTROL_PORT)
    check_control(address, without_login=control_without_login)
    home = _home(state_dir_, "server")
    from fedtta_flwr.ports import check_apart, check_free

    fleet = Address(host.strip("[]"), fleet_port)
    check_free("--fleet-port or --host", fleet)
    check_free("--control", address)
    check_apart(fleet, address)
    _hold(home)
    command = superlink_command(
        fleet=fleet,
        control=address,
        database=home / "state.db",
        certificates=folder,
        isolation=isolation,
        superexec_secret=_given("--superexec-secret", superexec_secret),
    )
    from fedtta_flwr.control import connect, words

    # Flower's own command line finds this server by FLWR_HOME alone, too.
    reached = str(address), None if folder is None else folder / CA
    env = connect(home, *reached)
    _say(f"`fedtta runs {words(*reached)}` shows this server's runs; so do `fedtta nodes`, `log` and `stop`")
    os.execvpe(command[0], command, env)


@app.command()
def register(
    public_key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="public key of the device")],
    name: Annotated[str, typer.Option(help="of the client that it may host; several: separated by commas")],
    control: Control = LOCAL_CONTROL,
    ca: CaFile = None,
    insecure: Insecure = False,
) -> None:
    """Let a device in, as the host of these clients."""
    from fedtta_flwr.nodes import register as register_node

    _check_names("--name", name, name.split(","))
    where = control_address(control, ca, insecure)
    typer.echo(f"{name}: node {register_node(*where, expanded('KEY.PUB', public_key), name)}")


@app.command()
def nodes(
    control: Control = LOCAL_CONTROL, ca: CaFile = None, insecure: Insecure = False, as_json: Json = False
) -> None:
    """Show which devices may join, and which have."""
    from fedtta_flwr.control import words
    from fedtta_flwr.nodes import list_nodes

    where = control_address(control, ca, insecure)
    found = list_nodes(*where)
    if as_json:
        print_json(found)
        return
    if not found:
        _say(f"no devices registered; fedtta register KEY.pub --name NAME {words(*where)}")
    for node in found:
        typer.echo(f"{node.name or '-':<20} {node.status:<12} {node.since:<25} {node.node_id}")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="of the device, as registered")],
    control: Control = LOCAL_CONTROL,
    ca: CaFile = None,
    insecure: Insecure = False,
) -> None:
    """Let a device in no more; if it has joined, it is out at once."""
    from fedtta_flwr.nodes import revoke as revoke_nodes

    for node_id in revoke_nodes(*control_address(control, ca, insecure), name):
        typer.echo(f"{name}: node {node_id} is out, and its key can never be registered again")


@app.command()
def join(
    server: Annotated[str, typer.Argument(metavar="SERVER[:PORT]", help=f"the server; port {FLEET_PORT} if none")],
    client: Annotated[str, typer.Option(help="name of the client here; several: separated by commas")],
    ca: CaFile = None,
    key: Annotated[Path | None, typer.Option(help="private key of this device")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="the data here, instead of the run's data-dir")] = None,
    predictions_dir: Annotated[Path | None, typer.Option(help="for `live`; default beside the images")] = None,
    stream: Annotated[str, typer.Option(help="module:function of this device's own, instead of the run's data")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N here, instead of the run's device")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="the run's checkpoint, where it lies here")] = None,
    state_dir_: Annotated[
        Path | None, typer.Option("--state-dir", help="where Flower keeps the app, and the clients their states")
    ] = None,
    give_up_after: Annotated[
        float,
        typer.Option(min=0, help="seconds after which a visit hangs, and is ended; 0: round-timeout, 600 at least"),
    ] = 0.0,
    runtime_port: Annotated[int, typer.Option(min=0, max=65535, help="on 127.0.0.1; 0: any free one")] = 0,
    insecure: Insecure = False,
) -> None:
    """Be a device: join a server and stay joined until stopped."""
    from fedtta_flwr.join import join as join_server

    if insecure:
        if ca is not None or key is not None:
            raise ConfigError("--insecure: goes with neither --ca nor --key; allowed: either it, or both of them")
        _say("warning: --insecure: anybody on the network can read and change what is sent, and pose as the server")
    elif ca is None or key is None:
        raise ConfigError("--ca and --key are both needed (docker/keys.sh makes them), or --insecure on a bench")
    if data_dir is not None and not expanded("--data-dir", data_dir).is_dir():
        raise ConfigError(f"--data-dir {data_dir}: no such folder; make it, or name another")
    if checkpoint is not None and not expanded("--checkpoint", checkpoint).exists():
        raise ConfigError(f"--checkpoint {checkpoint}: no such file; copy the run's there, or name another")
    names = names_in(client)
    _check_names("--client", client, names)
    _check_settings(device=device or "auto", stream=stream)
    # A device that is switched off and on again finds its clients' own states there, whatever the run config says.
    home = _home(state_dir_, "+".join(sorted(names)))
    settings = make_node_config(
        clients=client,
        data_dir=data_dir,
        stream=stream,
        device=device,
        checkpoint=checkpoint,
        predictions_dir=predictions_dir,
        state_dir=home / "clients",
        give_up_after=give_up_after,
    )
    join_server(
        parse_address("SERVER", server, FLEET_PORT),
        ca=_given("--ca", ca),
        key=_given("--key", key),
        node_config=settings,
        home=home,
        runtime_port=runtime_port,
    )


@app.command()
def doctor(
    server: Annotated[str, typer.Option(help="SERVER[:PORT] that cannot be joined")] = "",
    ca: CaFile = None,
    key: Annotated[Path | None, typer.Option(help="private key of this device")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="as for `fedtta join`")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="as for `fedtta join`")] = None,
    device: Annotated[str, typer.Option(help="as for `fedtta join`")] = "auto",
    state_dir_: Annotated[Path | None, typer.Option("--state-dir", help="as for `fedtta join`")] = None,
) -> None:
    """Find out why a device cannot join; status 1 if something must be mended."""
    from fedtta_flwr.doctor import examine

    _check_settings(device=device)
    findings = examine(
        server=parse_address("--server", server, FLEET_PORT) if server else None,
        ca=_given("--ca", ca),
        key=_given("--key", key),
        data_dir=_given("--data-dir", data_dir),
        checkpoint=_given("--checkpoint", checkpoint),
        state=expanded("--state-dir", state_dir_ or state_dir("device")),
        device=device,
    )
    failed = False
    for finding in findings:
        typer.echo(str(finding))
        failed |= finding.level == "FAIL"
    if failed:
        raise typer.Exit(1)


def print_json(rows: Iterable[NamedTuple]) -> None:
    """Print what is listed for other programs; ids as texts, since many a reader of JSON rounds numbers of 64 bits."""
    typer.echo(json.dumps([{key: str(value) for key, value in row._asdict().items()} for row in rows], indent=1))


def control_address(control: str, ca: Path | None, insecure: bool) -> tuple[str, Path | None]:
    """Return where the Control API is, and the certificate to check it against."""
    if insecure == (ca is not None):
        raise ConfigError("--ca FILE is needed (ca.crt of the federation), or --insecure for a server without TLS")
    return str(parse_address("--control", control, CONTROL_PORT)), _given("--ca", ca)


def _certificates(folder: Path | None, insecure: bool) -> Path | None:
    if insecure:
        if folder is not None:
            raise ConfigError("--insecure: does not go with --certificates; allowed: either")
        _say("warning: --insecure: no TLS, anybody may join, and anybody on the way can read and change what is sent")
        return None
    if folder is None:
        raise ConfigError("--certificates DIR is needed (docker/keys.sh server DIR HOST...), or --insecure on a bench")
    folder = expanded("--certificates", folder).absolute()
    for name in (CA, CERTIFICATE, KEY):
        if not os.access(folder / name, os.R_OK):
            raise ConfigError(f"--certificates {folder}: {name} is absent or cannot be read; docker/keys.sh makes it")
    check_certificate(folder / CERTIFICATE, folder / KEY, folder / CA)
    return folder


def _check_names(option: str, text: str, names: Sequence[str]) -> None:
    from fedtta_flwr.config import CLIENT_NAME, NAME_WORDS

    for i, name in enumerate(names or [text]):
        if not CLIENT_NAME.fullmatch(name):
            raise ConfigError(
                f"{option} {text!r}: {name!r} is no name of a client; allowed: {NAME_WORDS}; several names separated "
                f"by commas, without spaces"
            )
        if name in names[:i]:
            raise ConfigError(f"{option} {text!r}: {name!r} stands there twice; name each once")


def _check_settings(**settings: str) -> None:
    """Refuse what no run could have: of a device that has joined, nobody but the server would be told."""
    from fedtta_flwr.config import RunConfig

    RunConfig.from_flat(settings)


def _given(option: str, path: Path | None) -> Path | None:
    return None if path is None else expanded(option, path).absolute()


def _home(given: Path | None, name: str) -> Path:
    home = expanded("--state-dir", given or state_dir(name)).absolute()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--state-dir {home}: cannot be made ({error.strerror}); name another") from None
    if home.stat().st_mode & 0o077:  # it was there already, and may be meant to be so
        _say(f"warning: --state-dir {home}: others on this machine can look into it; chmod 700 keeps them out")
    return home


def _hold(home: Path) -> None:
    """Keep a server's state for this process and what takes its place, until that ends."""
    handle = os.open(home, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--state-dir {home}: another server runs there; stop it, or name another") from None
    except OSError:
        pass  # some network file systems know no locks of folders
    os.set_inheritable(handle, True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
