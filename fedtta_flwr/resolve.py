"""How a name in a run config becomes a class or a function.

Nothing heavy is imported before a name is resolved. A class of the user's own package is named
``my_package.my_module:MyClass``; since a run config may come from somebody else, such an import needs the
operator's consent: the environment variable ``FEDTTA_PLUGINS`` lists the packages that may be imported.
"""

import importlib
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fedtta_flwr.errors import ConfigError, FedTTAError, in_words
from fedtta_flwr.own import check_taken, is_ours, with_values
from fedtta_flwr.processes import is_of_a_signal

PLUGIN_VARIABLE = "FEDTTA_PLUGINS"
FUNCTIONS = ("model", "stream")  # keys that take a function, where others take a class


def ships(thing: object) -> bool:
    """Return whether an object is of a class of the project's own."""
    return is_ours(type(thing))


def check_name(kind: str, name: str, known: Mapping[str, str | tuple[str, ...]]) -> str:
    """Return `name` if it may be used.

    Raises
    ------
    ConfigError
        If it is neither known nor an import that the operator allowed.
    """
    if name in known:
        return name
    module, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier():
        own = f"package.module:{'function' if kind in FUNCTIONS else 'Class'} of your own"
        choice = f"{', '.join(known)}, or {own} (see `fedtta list`)" if known else own
        raise ConfigError(f"{kind} = {name!r}: unknown; allowed: {choice}")
    package = module.partition(".")[0]
    allowed = names_in(os.environ.get(PLUGIN_VARIABLE, ""))
    if package not in allowed:
        raise ConfigError(
            f"{kind} = {name!r}: importing package {package!r} is not allowed here (allowed: "
            f"{', '.join(allowed) or 'none'}); the operator permits it with {PLUGIN_VARIABLE}={package}"
        )
    return name


def names_in(text: str) -> list[str]:
    """Return the names in a list that is separated by commas, without blanks around them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def resolve(kind: str, name: str, known: Mapping[str, str | tuple[str, ...]], options: str = "") -> Any:
    """Import and return the class behind a checked name; one of the user's own with the values of ``KIND-options``.

    Raises
    ------
    ConfigError
        If the name is not allowed, the import fails, or the class has no such attributes.
    """
    check_name(kind, name, known)
    if options and name in known:
        raise ConfigError(
            f"{kind}-options = {options!r}: for a {kind} of your own only, but {kind} = {name!r} ships; its "
            f"options are keys of their own (`fedtta list keys`)"
        )
    target = known[name][0] if name in known else name
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a package of the user's own may raise anything, and end by itself
        if is_of_a_signal(error):
            raise
        absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        remedy = "; install it (pip install -e its folder), or put it on PYTHONPATH" if absent else ""
        raise ConfigError(f"{kind} = {name!r}: cannot be imported: {in_words(error)}{remedy}") from error
    return with_values(kind, found, options) if options and isinstance(found, type) else found


def make(
    kind: str, name: str, known: Mapping[str, tuple[str, ...]], base: type, *arguments: Any, options: str = ""
) -> Any:
    """Return an object of the class behind a checked name.

    Parameters
    ----------
    kind : str
        The key of the run config, for messages.
    name : str
        Its value.
    known : dict
        The names that need no consent.
    base : type
        What the class must be a subclass of.
    *arguments
        Of its constructor.
    options : str
        Values of attributes, for one of the user's own.

    Raises
    ------
    ConfigError
        If the name is not allowed, the import fails, what it names is no such class, or one of the user's own raises.
    """
    found = resolve(kind, name, known, options)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{kind} = {name!r}: no subclass of {base.__module__}.{base.__name__}; make it one")
    if name in known:
        return found(*arguments)
    made = call(kind, name, found, *arguments)
    check_taken(kind, name, made)
    return made


def frames_of(name: str, error: BaseException) -> list[TracebackType]:
    """Return the parts of a traceback that are in the package of ``package.module:Class``, outermost first."""
    package, found, tb = name.partition(":")[0].partition(".")[0], [], error.__traceback__
    while tb is not None:
        if str(tb.tb_frame.f_globals.get("__name__")).partition(".")[0] == package:
            found.append(tb)
        tb = tb.tb_next
    return found


def call(kind: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function or class of the user's own makes of its arguments.

    Raises
    ------
    ConfigError
        If it raises: in one line, with the place; `kind` and `name` are key and value of the run config.
    """
    try:
        return function(*arguments)
    except FedTTAError as error:  # of what it uses of ours, such as an `Optimizer`, which does not know for whom
        raise ConfigError(str(error) if name in str(error) else f"{kind} = {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        if is_of_a_signal(error):
            raise
        inside = traceback.extract_tb(error.__traceback__)[1:]
        if own := frames_of(name, error):  # their line, rather than that of ours or of torch's which it called
            inside = traceback.extract_tb(own[-1], limit=1)
        where = f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""
        given = ", ".join(type(argument).__name__ for argument in arguments)
        raise ConfigError(
            f"{kind} = {name!r}: {name.rpartition(':')[2]}({given}) raised {in_words(error)}{where}; put it right there"
        ) from error
