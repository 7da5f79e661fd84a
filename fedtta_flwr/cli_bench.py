"""``fedtta bench``: a grid of runs from one file. ``fedtta report``: what came out."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedtta_flwr.errors import ConfigError, FedTTAError
from fedtta_flwr.paths import expanded, in_home

if TYPE_CHECKING:
    from fedtta_flwr.bench.spec import Cell, Spec, Table
    from fedtta_flwr.config import Scalar


def bench(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="which runs (`fedtta list benchmarks`)")],
    output: Annotated[Path | None, typer.Option(help="folder for all runs; goes on where it stopped")] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option(help="for all runs, in place of what SPEC says: a .toml file, or 'key=value ...'; repeatable"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="fewer rounds and seeds, as SPEC's table `quick` says")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="runs at a time; 0 = as many as cores allow")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(help="axis=point or seed=number; repeatable: runs at one of the points of every axis named"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show which runs there are, and run none")] = False,
) -> None:
    """Run a benchmark: what is finished is kept, a run that fails is reported and the others go on."""
    from fedtta_flwr.bench.spec import cells, read_spec
    from fedtta_flwr.files import locked
    from fedtta_flwr.run_config import absolute_paths, read_overrides

    parsed, table = read_spec(expanded("SPEC", spec))
    if quick and not table.get("quick"):
        raise ConfigError(
            f"--quick: {spec} says nothing under [quick], so all would be run; add it, or leave --quick out"
        )
    overrides = absolute_paths(read_overrides(run_config or []))
    everything = cells(parsed, overrides, quick=quick)
    points = _points(only or [], everything)
    wanted = [cell for cell in everything if all(_labels(cell)[axis] in among for axis, among in points.items())]
    if not wanted:
        raise ConfigError(f"--only {' '.join(only or [])}: no run matches; `--dry-run` shows which there are")
    if dry_run:
        for cell in wanted:
            typer.echo(cell.id)
        typer.echo(f"{len(wanted)} runs")
        return
    name = parsed.name + ("-quick" if quick else "")
    folder = expanded("--output", output or in_home("fedtta-benchmarks", name))
    with locked(folder.absolute(), f"--output {folder}", "benchmark"):
        _run(folder, parsed, table, overrides, everything, wanted, workers, quick=quick)


def _run(
    folder: Path,
    parsed: "Spec",
    table: "Table",
    overrides: "Mapping[str, Scalar]",
    everything: "Sequence[Cell]",
    wanted: "Sequence[Cell]",
    workers: int,
    *,
    quick: bool,
) -> None:
    """Run of a benchmark what is wanted and has not finished, and say what became of it."""
    from fedtta_flwr.bench.progress import Lines, Live
    from fedtta_flwr.bench.runner import check_some, open_bench, run_cells
    from fedtta_flwr.data.parallel import cores

    left, stale = open_bench(folder.absolute(), parsed, table, everything, overrides, quick=quick)
    names = {cell.id for cell in wanted}
    left = [cell for cell in left if cell.id in names]
    done = len(wanted) - len(left)
    workers = workers or max(1, cores() // max(int(cell.config["threads"]) for cell in wanted))
    watcher = Live(len(left)) if sys.stdout.isatty() else Lines(len(left))
    watcher.say(f"{parsed.title}: {len(left)} runs, {workers} at a time, {done} finished before -> {folder}")
    if stale:
        watcher.say(f"warning: {len(stale)} finished runs were made by other code than this, e.g. {stale[0]}")
    check_some(left)
    try:
        with watcher:
            faults = run_cells(folder.absolute(), left, workers, watcher)
    except KeyboardInterrupt:
        watcher.say("stopped; what has finished is kept, and the same command goes on")
        raise
    watcher.say(
        f"{len(wanted) - len(faults)} of {len(wanted)} runs finished; `fedtta report {folder}` shows the results"
    )
    if faults:
        raise FedTTAError(
            f"{len(faults)} runs failed, e.g. {next(iter(faults))}; their .log files are in {folder}/cells"
        )


def report(
    path: Annotated[Path, typer.Argument(metavar="RUN|BENCH", help="a run directory, or a benchmark's folder")],
    output: Annotated[Path | None, typer.Option(help="folder to write to; default: `report` in it")] = None,
) -> None:
    """Write one HTML page with figures, and the tables in it as Markdown, CSV and LaTeX."""
    from fedtta_flwr.reports.report import write_report

    path = expanded("RUN|BENCH", path)
    page, faults = write_report(path, expanded("--output", output or path / "report"))
    for fault in faults[:5]:
        typer.echo(f"not in the report: {fault}")
    if len(faults) > 5:
        typer.echo(f"... and {len(faults) - 5} more; the page names them")
    typer.echo(page)


def _labels(cell: "Cell") -> dict[str, str]:
    return cell.labels | {"seed": str(cell.seed)}


def _points(only: list[str], cells: "Sequence[Cell]") -> dict[str, list[str]]:
    """Return the points that are wanted of each axis that is named."""
    points: dict[str, list[str]] = {}
    for pattern in only:
        axis, equals, point = pattern.partition("=")
        if not equals or axis not in _labels(cells[0]):
            raise ConfigError(f"--only {pattern!r}: allowed: {'=..., '.join(_labels(cells[0]))}=...")
        known = list(dict.fromkeys(_labels(cell)[axis] for cell in cells))
        if point not in known:
            raise ConfigError(
                f"--only {pattern!r}: no such run; allowed: {', '.join(f'{axis}={one}' for one in known)}"
            )
        points.setdefault(axis, []).append(point)
    return points
