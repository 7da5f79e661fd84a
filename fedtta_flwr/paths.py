"""Paths as a user writes them."""

from pathlib import Path

from fedtta_flwr.errors import ConfigError


def in_home(*parts: str) -> Path:
    """Return a path in this user's home, which a container's user may lack.

    Raises
    ------
    ConfigError
        If there is none.
    """
    try:
        return Path.home().joinpath(*parts)
    except RuntimeError:
        raise ConfigError(f"this user has no home to hold {'/'.join(parts)}: set HOME to a folder") from None


def expanded(key: str, path: str | Path) -> Path:
    """Return a path in which ``~`` and ``~user`` are the home that they stand for.

    Parameters
    ----------
    key : str
        Of the run config, or an option's or argument's name: for the error.
    path : str or Path
        Its value.

    Raises
    ------
    ConfigError
        If nobody here is called so, or has a home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        named = f"{key} {path}" if key.startswith("--") or key.isupper() else f"{key} = {str(path)!r}"
        raise ConfigError(
            f"{named}: {Path(path).parts[0]} stands for no home on this machine; allowed: ~/... or a path without ~"
        ) from None
