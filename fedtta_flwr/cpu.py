"""How a process computes on the CPU: with how many threads, and what it does with memory that a step has freed."""

import ctypes
import os

import torch

#: parameters of glibc's mallopt, and their values: the largest block that is cut from the heap rather than mapped, and
#: how much may lie free at the heap's end
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
LARGEST, FREE = 2**30, 2**31 - 1
OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def prepare(threads: int) -> None:
    """Use so many threads, and keep freed memory for the next batch.

    Unless told otherwise, glibc gives the activations of a training pass back to the system at its end, which then
    hands them out anew page by page: a seventh of the time of a step. The process stays as large as it once was.
    Who has set one of `OWN_SETTINGS` in the environment keeps those; without glibc nothing is done.
    """
    torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and not any(name in os.environ for name in OWN_SETTINGS):
        mallopt(M_MMAP_THRESHOLD, LARGEST)
        mallopt(M_TRIM_THRESHOLD, FREE)
