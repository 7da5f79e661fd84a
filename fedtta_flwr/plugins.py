"""What a package of the user's own raises in the middle of a run: one line that says where, and a traceback in the log.

It begins at the package's own code: all that called it is ours, and no help in finding the fault.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from logging import ERROR
from pathlib import Path
from types import TracebackType

from flwr.common.logger import log

from fedtta_flwr.errors import FederationError, FedTTAError


@contextmanager
def plugin_code(name: str, where: Callable[[], str] = str) -> Iterator[None]:
    """Turn what the code of a plugin raises into one line; what others raise, and what is one line already, passes.

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
    except Exception as error:
        own = list(_frames_of(name, error))
        if not own:
            raise
        _log_once("".join(traceback.format_exception(type(error), error, own[0])).rstrip())
        called, raised = own[0].tb_frame.f_code, own[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        file = Path(raised.tb_frame.f_code.co_filename).name
        raise FederationError(
            f"{where()}{called.co_qualname} raised {text} ({file}, line {raised.tb_lineno})"
        ) from error


def _frames_of(name: str, error: Exception) -> Iterator[TracebackType]:
    """Give the parts of a traceback that are in a plugin's package, outermost first."""
    package = name.partition(":")[0].partition(".")[0] if ":" in name else None
    tb = error.__traceback__
    while tb is not None:
        if str(tb.tb_frame.f_globals.get("__name__")).partition(".")[0] == package:
            yield tb
        tb = tb.tb_next


@cache
def _log_once(text: str) -> None:
    """Log an error that every client of a node repeats."""
    log(ERROR, text)
