"""Code of the user's own that a run config names: whether it can be imported, its source, and what it raises."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from logging import ERROR
from pathlib import Path

from fedtta_flwr.config import RunConfig, Scalar
from fedtta_flwr.errors import FederationError, FedTTAError, in_words
from fedtta_flwr.models import MODELS, ROBUSTBENCH
from fedtta_flwr.processes import is_of_a_signal
from fedtta_flwr.registry import ADAPTERS, HEADS, STRATEGIES
from fedtta_flwr.resolve import frames_of, resolve

#: keys of the run config that take ``package.module:Class`` -> names in them that are the project's own
KEYS: dict[str, Mapping[str, str | tuple[str, ...]]] = {
    "strategy": STRATEGIES,
    "adapter": ADAPTERS,
    "head": HEADS,
    "model": MODELS,
    "stream": {},
}
#: those whose code must be the same on every device; a stream may be a device's own
ON_DEVICES = ("adapter", "head", "model")


def is_own(name: str) -> bool:
    """Return whether a value of these keys names what is the user's own."""
    return ":" in name and not name.startswith(ROBUSTBENCH)


def named(config: Mapping[str, Scalar]) -> dict[str, str]:
    """Return what a flat run config names of the user's own: key -> ``package.module:Class``."""
    return {key: str(config[key]) for key in KEYS if is_own(str(config.get(key, "")))}


def check_plugins(config: Mapping[str, Scalar]) -> None:
    """Import what a flat run config names of the user's own, and find out whether it takes what it is given.

    Raises
    ------
    ConfigError
        If the operator has not allowed it, it cannot be imported, or a class has no such attributes.
    """
    own = named(config)
    for key, known in KEYS.items():
        options = str(config.get(f"{key}-options", ""))
        if key in own or options:
            resolve(key, str(config[key]), known, options)


def plugin_fingerprints(config: Mapping[str, Scalar]) -> dict[str, str]:
    """Return a short hash of the source of each package of the user's own that a flat run config names.

    Nothing is imported, and nothing remembered: who develops a method changes it while a benchmark goes on.
    """
    packages = {_package(name) for name in named(config).values()}
    return {package: _fingerprint(package) for package in sorted(packages)}


def device_code(config: RunConfig) -> list[str]:
    """Return package and hash of the code of the user's own that devices run: networks, adapters and heads."""
    flat = config.to_flat()
    found = plugin_fingerprints({key: flat[key] for key in ON_DEVICES})
    return [f"{package} {fingerprint or 'without source'}" for package, fingerprint in found.items()]


@contextmanager
def plugin_code(name: str, where: Callable[[], str] = str) -> Iterator[None]:
    """Turn what the code of a plugin raises into one line; what others raise, and what is one line already, passes.

    The log gets the traceback from the plugin's own code on: all that called it is ours, and no help in finding the
    fault.

    Parameters
    ----------
    name : str
        As in a run config: ``package.module:Class``; of a method that ships nothing is caught.
    where : callable
        Begins the line, if the class alone does not say when it was.

    Raises
    ------
    FederationError
        It names the method that was called, and the line of the plugin's that raised.
    """
    try:
        yield
    except FedTTAError:
        raise
    except (Exception, SystemExit) as error:
        own = frames_of(name, error) if is_own(name) else []
        if isinstance(error, SystemExit) and (not own or is_of_a_signal(error)):
            raise  # it is not the plugin that ends the process
        if not own:
            method = name.partition(":")[2] + "."
            if is_own(name) and isinstance(error, TypeError) and str(error).startswith(method):
                # "MyMethod.personalize() missing 1 required positional argument": it was never entered.
                raise FederationError(f"{where()}{error}: the method takes other arguments than it is given") from error
            raise
        log_once("".join(traceback.format_exception(type(error), error, own[0])).rstrip())
        called, raised = own[0].tb_frame.f_code, own[-1]
        file = Path(raised.tb_frame.f_code.co_filename).name
        raise FederationError(
            f"{where()}{called.co_qualname} raised {in_words(error)} ({file}, line {raised.tb_lineno})"
        ) from error


def _package(name: str) -> str:
    """Return the package of ``package.module:Class``."""
    return name.partition(":")[0].partition(".")[0]


def _fingerprint(package: str) -> str:
    """Return the hash of a package's .py files, or of a module's file; empty where there is no source."""
    from fedtta_flwr.records import source_hash  # on use: it brings torch, which reading a spec does not need

    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a finder that fails; a module that no file was read for
        spec = None
    if spec is None:
        return ""
    if spec.submodule_search_locations is None:
        file = Path(spec.origin or "")
        return source_hash(file.parent, [file]) if file.is_file() else ""
    (root, *_) = map(Path, spec.submodule_search_locations)
    return source_hash(root, root.rglob("*.py"))


@cache
def log_once(text: str) -> None:
    """Log an error that every client of a node repeats."""
    from flwr.common.logger import log  # on use, as below

    log(ERROR, text)
