"""The ``fedtta`` command."""

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from fedtta_flwr import cli_bench, cli_data, cli_deploy, cli_new, cli_runs
from fedtta_flwr.errors import ConfigError, FedTTAError
from fedtta_flwr.paths import expanded
from fedtta_flwr.processes import as_command

app = typer.Typer(
    help="Federated test-time adaptation on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
source = typer.Typer(help="Source models.", no_args_is_help=True)
app.add_typer(source, name="source")
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_deploy.app)
app.add_typer(cli_runs.app)
app.add_typer(cli_new.app, name="new")
app.command()(cli_bench.bench)
app.command()(cli_bench.report)


@app.command()
def run(
    engine: Annotated[
        str, typer.Option(help="local: in this process; flower: Ray simulation; deployment: the devices of --control")
    ] = "local",
    run_config: Annotated[
        list[str] | None,
        typer.Option(help="a .toml file, or 'key=value ...' (TOML values); repeatable, the last one counts"),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="run directory: a new or an empty folder")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="run directory of a run that shall go on from its last checkpoint")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, show_default="2", help="engines local, flower: nodes that the clients are spread over"),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, show_default="1", help="engine flower: Ray workers")] = None,
    control: cli_deploy.Control = cli_deploy.LOCAL_CONTROL,
    ca: cli_deploy.CaFile = None,
    insecure: cli_deploy.Insecure = False,
) -> None:
    """Run a federation to the end of its streams."""
    from fedtta_flwr.launch import forget_states, run_deployment, run_flower, run_local, with_states
    from fedtta_flwr.run_config import absolute_paths, read_overrides, resumed

    if engine not in ("local", "flower", "deployment"):
        raise FedTTAError(f"--engine {engine!r}: unknown; allowed: local, flower, deployment")
    if output is not None and resume is not None:
        raise FedTTAError(f"--output {output}: a run goes on in its own directory, {resume}; leave --output out")
    server = None if control == cli_deploy.LOCAL_CONTROL else control
    for option, given, engines in (
        ("--nodes", nodes, ("local", "flower")),
        ("--workers", workers, ("flower",)),
        ("--control", server, ("deployment",)),
        ("--ca", ca, ("deployment",)),
        ("--insecure", insecure or None, ("deployment",)),
    ):
        if given is not None and engine not in engines:
            what = option if given is True else f"{option} {given}"
            raise ConfigError(f"{what}: --engine {engine} has none; allowed with --engine {' or '.join(engines)}")
    overrides = resumed(resume) if resume is not None else {}
    overrides |= read_overrides(run_config or [])
    if output is not None:  # of a deployment it is a place on the server
        overrides["output-dir"] = str(output if engine == "deployment" else expanded("--output", output).absolute())
    if engine == "deployment":
        run_deployment(overrides, *cli_deploy.control_address(control, ca, insecure))
        return
    overrides = with_states(absolute_paths(overrides))
    if engine == "local":
        run_local(overrides, nodes or 2)
    else:
        run_flower(overrides, nodes or 2, workers or 1)
    forget_states(overrides)


@app.command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="strategies, adapters, heads, datasets, corruptions, models, configs, presets, benchmarks or keys"
        ),
    ] = None,
) -> None:
    """Show what a run config can name."""
    from fedtta_flwr.catalogue import catalogue, describe_adapter

    entries = catalogue()
    if what is not None and what not in entries:
        raise FedTTAError(f"list {what!r}: unknown; allowed: {', '.join(entries)}")
    for kind in [what] if what else [kind for kind in entries if kind != "keys"]:
        typer.echo(f"{kind}:")
        width = max(len(name) for name, _ in entries[kind])
        for name, text in entries[kind]:
            typer.echo(f"  {name:<{width}}  {text}".rstrip())
            if what == "adapters":
                _echo_facts(describe_adapter(name))
    if not what:
        typer.echo("`fedtta list adapters` tells more of each; `fedtta list keys` explains every key of the run config")


def _echo_facts(facts: dict[str, str]) -> None:
    for title, text in facts.items():
        # A pair `key = value` stays on one line.
        lines = textwrap.wrap(text.replace(" = ", "\0=\0"), 84, break_on_hyphens=False, break_long_words=False)
        for head, line in zip((title, *[""] * len(lines)), lines, strict=False):
            typer.echo(f"      {head:<10}{line}".replace("\0", " "))


@source.command("train")
def source_train(
    output: Annotated[Path, typer.Option(help="the .safetensors file to write")],
    model: Annotated[str, typer.Option(help="architecture (`fedtta list models`)")] = "resnet8",
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Train a source model on the clean digits that scikit-learn ships."""
    from fedtta_flwr.models.source import train_digits

    accuracy = train_digits(_file(output), model, epochs=epochs, seed=seed, report=typer.echo)
    typer.echo(f"{output}: {model}, {accuracy:.2f} % on the clean test part")


@source.command("convert")
def source_convert(
    input_: Annotated[Path, typer.Argument(metavar="INPUT", help="a file of torch.save; no code in it is run")],
    architecture: Annotated[str, typer.Option(help="what it holds (`fedtta list models`)")],
    classes: Annotated[int, typer.Option(min=2, help="number of classes")],
    output: Annotated[Path, typer.Option(help="the .safetensors file to write")],
    mean: Annotated[str, typer.Option(help="of its input normalisation, for pixels in [0, 1]: r,g,b")],
    std: Annotated[str, typer.Option(help="the same")],
) -> None:
    """Convert a foreign checkpoint; every renaming is shown."""
    from fedtta_flwr.models.checkpoints import save
    from fedtta_flwr.models.convert import convert

    statistics = {"mean": _numbers("mean", mean), "std": _numbers("std", std)}
    place = _file(output)
    model, renames = convert(expanded("INPUT", input_), architecture=architecture, classes=classes, **statistics)
    for old, new in renames:
        typer.echo(f"{old} -> {new}")
    about = {"architecture": architecture, "classes": str(classes), "converted-from": input_.name}
    save(model, place, about)
    typer.echo(f"{output}: {architecture}, {classes} classes, mean {mean}, std {std}")


def _file(output: Path) -> Path:
    """Return where a checkpoint is to be written; what cannot be a file is refused before there is one to write."""
    path = expanded("--output", output)
    if path.is_dir():
        raise ConfigError(f"--output {output}: is a folder; name the .safetensors file to write, in it or elsewhere")
    return path


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option} {text!r}: allowed: numbers separated by commas, e.g. 0.5,0.5,0.5") from None


def main() -> None:
    """Run the command."""
    as_command(app)
