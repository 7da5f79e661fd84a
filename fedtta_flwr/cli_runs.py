"""``fedtta runs``, ``log`` and ``stop``: the runs of a server."""

from typing import Annotated

import typer

from fedtta_flwr.cli_deploy import LOCAL_CONTROL, CaFile, Control, Insecure, Json, control_address, print_json

app = typer.Typer()

RunId = Annotated[
    int, typer.Argument(min=0, max=2**64 - 1, metavar="RUN_ID", help="as `fedtta run` and `fedtta runs` say it")
]


@app.command()
def runs(
    control: Control = LOCAL_CONTROL, ca: CaFile = None, insecure: Insecure = False, as_json: Json = False
) -> None:
    """Show the runs of a server, and what has become of them."""
    from fedtta_flwr.control import control_api
    from fedtta_flwr.runs import list_runs

    with control_api(*control_address(control, ca, insecure)) as client:
        found = list_runs(client)
        if as_json:
            print_json(found)
            return
        if not found:
            typer.echo(f"{control}: no runs so far")
        for run in found:
            typer.echo(f"{run.run_id:<20} {run.status:<18} {run.since}")


@app.command()
def log(run_id: RunId, control: Control = LOCAL_CONTROL, ca: CaFile = None, insecure: Insecure = False) -> None:
    """Show a run's log until its end; status 2 if it does not complete."""
    from fedtta_flwr.control import control_api
    from fedtta_flwr.runs import follow, list_runs

    with control_api(*control_address(control, ca, insecure)) as client:
        list_runs(client, run_id)  # a server that is not there to begin with is not waited for
        follow(client, run_id)


@app.command()
def stop(run_id: RunId, control: Control = LOCAL_CONTROL, ca: CaFile = None, insecure: Insecure = False) -> None:
    """End a run."""
    from fedtta_flwr.control import control_api
    from fedtta_flwr.runs import stop_run

    with control_api(*control_address(control, ca, insecure)) as client:
        stop_run(client, run_id)
        typer.echo(f"run {run_id}: stopped")
