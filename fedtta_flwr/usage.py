"""How much memory this process has taken at most."""

import sys

import torch


def peak_memory() -> int:
    """Return the most resident memory so far, bytes; 0 on a system that does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_cuda() -> int:
    """Return the most bytes that this process's tensors have taken on one CUDA device; 0 without."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
