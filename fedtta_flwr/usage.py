"""How much memory this process has taken at most."""

import sys
from pathlib import Path

import torch


def peak_memory() -> int:
    """Return the most resident memory so far, bytes; 0 on a system that does not tell."""
    if sys.platform == "linux":  # where getrusage counts what the process that started this one had taken by then
        return resident("VmHWM")
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident(key: str) -> int:
    """Return bytes of this process's resident memory: ``VmRSS`` now, ``VmHWM`` at most so far; Linux alone."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def peak_cuda() -> int:
    """Return the most bytes that this process's tensors have taken on one CUDA device; 0 without."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
