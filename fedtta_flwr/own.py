"""Classes of the user's own: values of their attributes from the run config, and names that are taken."""

import inspect
import math
import tomllib
from types import FunctionType
from typing import Any

from fedtta_flwr.errors import ConfigError

KINDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string in quotes"}
METHODS = (FunctionType, classmethod, staticmethod, property)


def is_ours(cls: type) -> bool:
    """Return whether a class is of this project, not of a package of the user's own."""
    return cls.__module__.partition(".")[0] == __package__


def declared(found: type) -> dict[str, bool | int | float | str]:
    """Return the plain attributes that a class, and those of its package above it, declare; no private ones."""
    package = found.__module__.partition(".")[0]
    theirs = [cls for cls in reversed(found.__mro__) if cls.__module__.partition(".")[0] == package]
    every = {name: value for cls in theirs for name, value in vars(cls).items()}
    return {name: value for name, value in every.items() if type(value) in KINDS and not name.startswith("_")}


def with_values(kind: str, found: type, text: str) -> type:
    """Return a class whose attributes have the values of ``KIND-options``.

    Parameters
    ----------
    kind : str
        strategy, adapter or head.
    found : type
        The user's own class. It stays as it is: one with the same name inherits from it.
    text : str
        ``name=value name=value``, with TOML values; an underscore may be a hyphen.

    Raises
    ------
    ConfigError
        If that is no such list, or the class declares no such attribute, or one of another type.
    """
    known, values = declared(found), dict[str, Any]()
    for name, value in _pairs(kind, text).items():
        attribute, given = name.replace("-", "_"), f"{kind}-options: {name} = {value!r}"
        if attribute not in known:
            allowed = ", ".join(known) or "none, since it declares none, such as `temperature = 1.0` in the class"
            raise ConfigError(f"{given}: {found.__name__} has no such attribute; allowed: {allowed}")
        default = known[attribute]
        value = float(value) if type(value) is int and type(default) is float else value
        if type(value) is not type(default) or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{given}: allowed: {KINDS[type(default)]}, as its default {default!r} is")
        values[attribute] = value
    if not values:
        return found
    names = {"__module__": found.__module__, "__qualname__": found.__qualname__, "__doc__": found.__doc__}
    return type(found)(found.__name__, (found,), names | values)


def _pairs(kind: str, text: str) -> dict[str, Any]:
    from fedtta_flwr.run_config import PAIR  # on use: it reads run configs, which this is a part of

    pairs = [pair.group() for pair in PAIR.finditer(text)]
    try:
        if PAIR.sub("", text).strip():
            raise ValueError("no list of pairs")
        return tomllib.loads("\n".join(pairs))
    except ValueError as error:
        raise ConfigError(
            f"{kind}-options = {text!r}: {error}; allowed: 'name=value name=value', strings in quotes"
        ) from None


def check_taken(kind: str, name: str, made: object) -> None:
    """Find out whether an object of the user's own keeps something under a name that its base class needs itself.

    Of classes of ours `_begun` holds what their constructor has set, by name.

    Raises
    ------
    ConfigError
        If so; it would otherwise be lost, or what calls the base class would fail far from there.
    """
    ours = next(cls for cls in type(made).__mro__ if is_ours(cls))
    begun: dict[str, Any] = getattr(made, "_begun", {})
    classes = [vars(cls) for cls in type(made).__mro__ if cls is not object and not is_ours(cls)]
    for attribute in dict.fromkeys([*(name for names in classes for name in names), *vars(made)]):
        value = inspect.getattr_static(made, attribute)
        method = isinstance(inspect.getattr_static(ours, attribute, None), METHODS)
        if method and not (isinstance(value, METHODS) or callable(value)):
            what = "a method"
        elif attribute in begun and (value is not begun[attribute] or any(attribute in names for names in classes)):
            what = "an attribute"
        else:
            continue
        raise ConfigError(
            f"{kind} = {name!r}: {type(made).__name__}.{attribute} ({type(value).__name__}) takes the place of "
            f"{what} that {ours.__name__} needs itself; choose another name"
        )
