"""``fedtta new``: a package for a method of the user's own.

What is written is a copy of ``templates/strategy`` or ``templates/adapter``, with other names: real files, which are
formatted, checked and tested like all others.
"""

import keyword
import os
import re
import shlex
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.paths import expanded
from fedtta_flwr.registry import ADAPTERS, STRATEGIES
from fedtta_flwr.resolve import PLUGIN_VARIABLE

app = typer.Typer(help="Packages for methods of your own.", no_args_is_help=True)
TEMPLATES = Path(__file__).parent / "templates"
PACKAGE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

Name = Annotated[str, typer.Argument(metavar="NAME", help="of the package and its folder, e.g. my_method")]
Directory = Annotated[Path, typer.Option(help="folder that the package's own folder is put into")]


@app.command()
def strategy(name: Name, directory: Directory = Path()) -> None:
    """Write a package with a strategy that works, and its tests."""
    _new("strategy", name, expanded("--directory", directory))


@app.command()
def adapter(name: Name, directory: Directory = Path()) -> None:
    """Write a package with an adapter that works, and its tests."""
    _new("adapter", name, expanded("--directory", directory))


def _new(kind: str, name: str, directory: Path) -> None:
    class_name = "".join(part.capitalize() for part in name.split("_"))
    names = {f"my_{kind}": name, f"My{kind.capitalize()}": class_name}
    paths = ("pyproject.toml", "README.md", f"my_{kind}/__init__.py", f"my_{kind}/{kind}.py", f"tests/test_{kind}.py")
    files = {path: (TEMPLATES / kind / path).read_text() for path in paths}
    own_words = _renamed("".join(files.values()), dict.fromkeys(names, ""))
    if fault := _fault(name, class_name, own_words):
        raise ConfigError(f"{name!r}: {fault}; choose lower-case letters, digits and _, e.g. my_method")
    folder = directory / name
    if not directory.is_dir():
        raise ConfigError(f"--directory {directory}: no such folder; make it, or name another")
    if os.path.lexists(folder):
        raise ConfigError(f"{folder}: is there already, and stays as it is; choose another NAME or --directory")
    try:
        _write(folder, {_renamed(path, names): _renamed(text, names) for path, text in files.items()})
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    typer.echo(f"{folder}: written. Next:")
    for command in (
        f"cd {shlex.quote(str(folder))} && pip install -e '.[test]'",
        "python -m pytest",
        f"{PLUGIN_VARIABLE}={name} fedtta run --run-config \"{kind}='{name}.{kind}:{class_name}'\"",
    ):
        typer.echo(f"  {command}")


def _fault(name: str, class_name: str, own_words: str) -> str | None:
    """Return why a package, and the class in it, cannot have these names beside the template's own words, or None."""
    if not PACKAGE.fullmatch(name):
        return "no name for a package"
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        return "Python has taken this name"
    if name in {known.replace("-", "_") for known in (*STRATEGIES, *ADAPTERS)}:
        return "a method of this name ships already (`fedtta list`)"
    if name == "tests" or find_spec(name) is not None:
        return "another package has this name"
    if keyword.iskeyword(class_name) or re.search(rf"\b{class_name}\b", own_words):
        return f"its class would be called {class_name}, which is another thing there"
    return None


def _renamed(text: str, names: dict[str, str]) -> str:
    for placeholder, name in names.items():
        text = text.replace(placeholder, name)
    return text


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write the files beside their place, then move them there: the folder is there whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        for path, text in files.items():
            file = Path(beside, folder.name, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        Path(beside, folder.name).rename(folder)
