"""Run-config overrides from the command line and from files, and what a run directory says of itself."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from flwr.common.config import parse_config_args

from fedtta_flwr.config import Scalar
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.paths import expanded
from fedtta_flwr.reports.mistrust import About, read_part

PAIR = re.compile(r"""(?<!\S)[^\s=]+=('[^']*'|"[^"]*"|\S+)(?!\S)""")
FLOWERS_PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")  # what its parser takes for one


def read_overrides(arguments: Sequence[str]) -> dict[str, Scalar]:
    """Read ``--run-config`` arguments, each a .toml file or ``"key=value key=value"``.

    The syntax is Flower's own; unlike there, both kinds may be mixed and the last one counts.

    Returns
    -------
    dict
        Flat: ``{"batch-size": 10, "fedctta.temperature": 1.0}``.

    Raises
    ------
    ConfigError
        A file is absent or no TOML, or an argument is no list of pairs.
    """
    merged: dict[str, Any] = {}
    for argument in arguments:
        if argument.endswith(".toml") and not expanded("--run-config", argument).is_file():
            raise ConfigError(f"--run-config {argument}: no such file; `fedtta list configs` names those that ship")
        try:
            found = parse_config_args([argument])
        except OSError as error:
            raise ConfigError(
                f"--run-config {argument}: cannot be read ({error.strerror}); see to its rights"
            ) from None
        except (click.ClickException, ValueError) as error:
            text = getattr(error, "message", str(error)).splitlines()[0]
            raise ConfigError(_fault(argument) or f"--run-config {argument!r}: {text}") from None
        # Flower's parser passes over whatever is no pair, such as a flag inside the quotes.
        if not argument.endswith(".toml") and (not found or PAIR.sub("", argument).strip()):
            raise ConfigError(
                f"--run-config {argument!r}: allowed: 'key=value ...', strings in quotes, or a .toml file"
            )
        merged |= found
    return merged


def _fault(argument: str) -> str | None:
    """Return which pair of those that Flower's parser has refused is at fault; None if it is none by itself."""
    if argument.endswith(".toml"):
        return _benchmark(argument)
    given: dict[str, list[str]] = {}
    for key, value in FLOWERS_PAIR.findall(argument):
        given.setdefault(key, []).append(value)
        pair = f"--run-config: {key}={value}"
        try:
            parse_config_args([f"{key}={value}"])
        except (click.ClickException, ValueError, OSError):  # the last of a pair that ends in .toml: it is opened
            if "," in key or value.endswith(",") or ("," in value and "=" in value):
                return f"{pair}: separate pairs by blanks, without commas"
            if value[0] not in "'\"[{":
                return f"{pair}: put it in quotes, {key}='{value}'"
            return f"{pair}: allowed: a number, true, false, or a string in quotes"
    twice = next((key for key, values in given.items() if len(values) > 1), None)
    return twice and f"--run-config: {twice} is given twice ({', '.join(given[twice])}); give it once"


def _benchmark(file: str) -> str | None:
    """Return what to do with a file that is a benchmark's; None if it is none."""
    try:
        axes = "axes" in tomllib.loads(expanded("--run-config", file).read_text())
    except (OSError, ValueError):
        return None
    return f"--run-config {file}: is a benchmark; run it by `fedtta bench {file}`" if axes else None


#: keys that name a place where the data or the source model are
PLACES = ("checkpoint", "data-dir", "tgfl.natural-dir")


def absolute_paths(overrides: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return overrides in which relative paths are of this folder, in whichever a run works."""
    paths = {key: overrides.get(key) for key in (*PLACES, "state-dir")}
    return dict(overrides) | {
        key: str(expanded(key, path).absolute()) for key, path in paths.items() if isinstance(path, str) and path
    }


def resumed(folder: Path) -> dict[str, Scalar]:
    """Return the run config of a run that shall go on: that which its directory holds, and where to resume.

    Raises
    ------
    ConfigError
        If it is no run directory, or a damaged one.
    """
    folder = expanded("--resume", folder).absolute()
    config: dict[str, Scalar] = read_part(folder / "config.json", About, "a run's")["config"]
    return config | {"resume": str(folder)}
