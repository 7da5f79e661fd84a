"""``fedtta data``: getting, rebuilding, checking and looking at data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtta_flwr.errors import ConfigError, DataError
from fedtta_flwr.paths import expanded
from fedtta_flwr.resolve import names_in

app = typer.Typer(help="Data sets and streams.", no_args_is_help=True)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="cifar10-c or cifar100-c")],
    data_dir: Annotated[Path, typer.Option(help="folder that the set's own folder is put into")],
    base_url: Annotated[str | None, typer.Option(help="of a mirror; default FEDTTA_ZENODO_URL, else Zenodo")] = None,
    md5: Annotated[
        str | None, typer.Option(help="of the mirror's archive, if it is another than the published")
    ] = None,
) -> None:
    """Download a set from Zenodo (2.9 GB); goes on where it stopped, and checks what came."""
    from fedtta_flwr.data.download import fetch

    with _bar(name, unit="bytes") as progress:
        folder = fetch(name, expanded("--data-dir", data_dir), base_url=base_url, md5=md5, progress=progress)
    typer.echo(f"{folder}: use it with dataset = {name}, data-dir = {folder.absolute()}")


@app.command()
def corrupt(
    data_dir: Annotated[Path, typer.Option(help="folder with the clean test images, as `dataset` needs it")],
    output: Annotated[Path, typer.Option(help="folder to write labels.npy and <corruption>.npy into")],
    dataset: Annotated[str, typer.Option(help="cifar10 or cifar100")] = "cifar10",
    corruptions: Annotated[str, typer.Option(help="separated by commas; empty = the papers' fifteen")] = "",
    severities: Annotated[str, typer.Option(help="separated by commas")] = "1,2,3,4,5",
    workers: Annotated[int, typer.Option(min=0, max=1024, help="processes; 0 = one per core")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    frost_dir: Annotated[Path | None, typer.Option(help="folder of the frost photographs")] = None,
) -> None:
    """Rebuild CIFAR-10-C or CIFAR-100-C from clean images; finished files are kept."""
    from fedtta_flwr.data.cifar import READERS
    from fedtta_flwr.data.corruptions import CORRUPTIONS
    from fedtta_flwr.data.parallel import cores
    from fedtta_flwr.data.rebuild import rebuild

    if dataset not in ("cifar10", "cifar100"):
        raise ConfigError(f"--dataset {dataset!r}: unknown; allowed: cifar10, cifar100")
    levels = _severities(severities)
    names = names_in(corruptions) or list(CORRUPTIONS)
    folder = expanded("--data-dir", data_dir)
    if not folder.is_dir():
        raise DataError(f"--data-dir {data_dir}: no such folder; name the folder that holds {dataset}")
    images, labels, _ = READERS[dataset](folder)
    with _bar("corrupting", unit="images") as progress:
        written = rebuild(
            images,
            labels,
            expanded("--output", output),
            dataset=dataset,
            corruptions=names,
            severities=levels,
            seed=seed,
            workers=workers or cores(),
            frost_dir=frost_dir and expanded("--frost-dir", frost_dir),
            progress=progress,
        )
    typer.echo(f"{output}: {len(written)} arrays written, {len(names) - len(written)} were finished")


@app.command()
def check(
    data_dir: Annotated[Path, typer.Option(help="folder of a CIFAR-10-C that was published or rebuilt")],
    checkpoint: Annotated[
        Path, typer.Option(help="the reference ResNet-20, .safetensors (see `fedtta source convert`)")
    ],
    column: Annotated[str, typer.Option(help="none: running statistics; bn200: those of batches of 200")] = "none",
    corruptions: Annotated[str, typer.Option(help="separated by commas; empty = all that are there")] = "",
) -> None:
    """Compare a reference network's accuracy on a set with what it should be; status 1 if it is too far off."""
    from fedtta_flwr.data.corruptions import CORRUPTIONS
    from fedtta_flwr.data.measure import accuracies
    from fedtta_flwr.data.reference import compare
    from fedtta_flwr.data.zenodo import ZenodoSet
    from fedtta_flwr.models.checkpoints import load

    folder = expanded("--data-dir", data_dir)
    if not folder.is_dir():
        raise DataError(f"--data-dir {data_dir}: no such folder; name the folder that holds cifar10-c")
    data = ZenodoSet(folder, "cifar10-c")
    asked = names_in(corruptions)
    names = asked or [name for name in CORRUPTIONS if (data.folder / f"{name}.npy").exists()]
    if unknown := [name for name in names if name not in CORRUPTIONS]:
        raise ConfigError(f"--corruptions: {unknown[0]!r} has no reference; allowed: {', '.join(CORRUPTIONS)}")
    if not names:
        raise DataError(f"{data.folder}: no <corruption>.npy; `fedtta data corrupt` rebuilds them")
    model = load(expanded("--checkpoint", checkpoint), architecture="resnet20-a", classes=10)
    with _bar("measuring", unit="images") as progress:
        rows = compare(accuracies(data, model, names, 5, column, progress), column)
    typer.echo(f"accuracy in % at severity 5, BatchNorm: {column}")
    typer.echo(f"{'':<18} {'measured':>9} {'reference':>9} {'difference':>10}")
    for row in rows:
        mark = "" if row.within else "  out of tolerance"
        typer.echo(f"{row.name:<18} {row.measured:9.2f} {row.reference:9.2f} {row.difference:+10.2f}{mark}")
    if not all(row.within for row in rows):
        raise typer.Exit(1)


@app.command()
def show(
    output: Annotated[Path, typer.Option(help="the .png file to write")],
    run_config: Annotated[
        list[str] | None,
        typer.Option(help="a .toml file, or 'key=value ...' (TOML values); repeatable, the last one counts"),
    ] = None,
) -> None:
    """Draw who sees what when: the corruption of every slot and the classes of every client."""
    from fedtta_flwr.config import RunConfig
    from fedtta_flwr.data.show import draw_streams
    from fedtta_flwr.run_config import read_overrides

    draw_streams(RunConfig.from_flat(read_overrides(run_config or [])), expanded("--output", output))
    typer.echo(str(output))


def _severities(text: str) -> list[int]:
    parts = names_in(text)
    if not parts or any(part not in ("1", "2", "3", "4", "5") for part in parts):
        raise ConfigError(f"--severities {text!r}: allowed: some of 1,2,3,4,5, separated by commas")
    return sorted({int(part) for part in parts})


@contextmanager
def _bar(title: str, *, unit: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar on stderr; give a function of (done, total)."""
    from rich import progress
    from rich.console import Console

    amount: Any = progress.DownloadColumn() if unit == "bytes" else progress.MofNCompleteColumn()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), amount, progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
