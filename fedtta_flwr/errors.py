"""What a user can put right: one line that says what was wrong, found, allowed, and what to do."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class FedTTAError(Exception):
    """Base of every error that the user, not the programmer, can put right.

    Its text is one line; the command line prints it without a traceback and exits with status 2.
    """

    def __str__(self) -> str:
        """Return the text, with escapes for what would not stay on its line, or tell a terminal something."""
        # Names of files may hold anything.
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in super().__str__())


class ConfigError(FedTTAError):
    """A run-config key, value or combination is not allowed."""


class DataError(FedTTAError):
    """A data set, stream or file on disk is absent, damaged or of the wrong form."""


class CheckpointError(FedTTAError):
    """A checkpoint is absent, damaged, unsafe or made for another architecture."""


class FederationError(FedTTAError):
    """The federation cannot go on: clients missing, failed, or running other code."""


class RunError(FederationError):
    """A run on a SuperLink has ended, and not as it should."""


class StorageError(FedTTAError):
    """What a run has found cannot be written."""


def in_words(error: BaseException) -> str:
    """Return kind and text of an error of somebody else's, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def few(names: Sequence[str], mark: str = ", ") -> str:
    """Return the first three names, and how many more there are."""
    return mark.join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def install(extra: str) -> str:
    """Return how an extra of this project is had; without -e the project's folder would no longer be what runs."""
    return f"pip install -e '.[{extra}]' in this project's folder"


def first_fault(error: "ValidationError") -> str:
    """Return where the first fault is, and what, on one line."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
