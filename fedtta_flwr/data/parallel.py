"""Work shared by processes."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from fedtta_flwr.errors import DataError
from fedtta_flwr.processes import end_with_parent

Task = TypeVar("Task")
Result = TypeVar("Result")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def worker_pool(work: Callable[[Task], Result], workers: int) -> Iterator[Callable[[list[Task]], Iterator[Result]]]:
    """Give a function that does a list of tasks and yields their results in the order in which they end.

    Parameters
    ----------
    work : callable
        Does one task; a function of a module, since other processes must find it.
    workers : int
        Number of processes; with 1 all is done in this one.

    Raises
    ------
    DataError
        A process was killed.
    """
    if workers == 1:
        yield lambda tasks: map(work, tasks)
        return
    # Spawned, not forked: torch, if it is loaded, has threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_quiet, initargs=(os.getpid(),))

    def run(tasks: list[Task]) -> Iterator[Result]:
        futures: list[Future[Result]] = [pool.submit(work, task) for task in tasks]
        return (future.result() for future in as_completed(futures))

    try:
        yield run
    except BrokenProcessPool:
        raise DataError(
            "one of the worker processes was killed, probably for want of memory; use fewer --workers: what is "
            "finished is kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _quiet(parent: int) -> None:
    """Leave Ctrl-C to the parent, and the other cores to the other workers; end with the parent, if it is killed."""
    from threadpoolctl import threadpool_limits

    end_with_parent()
    if os.getppid() != parent:  # it had ended already
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threadpool_limits(1)
