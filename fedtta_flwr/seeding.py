"""Every random draw of the project comes from here: seeded by (seed, *what it is for*).

The purpose is a tuple of names and numbers, for example ``("client-03", 17, "augment")``. Two draws for different
purposes are independent, and none depends on process, worker, order of arrival or number of draws made before.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose.

    Parameters
    ----------
    seed : int
        The run's seed.
    *purpose : str or int
        What the draw is for, e.g. client name, round, use.

    Returns
    -------
    int
        In [0, 2**63), the same on every machine and Python version.
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_rng(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return numpy's generator for one purpose."""
    return np.random.default_rng(derive_seed(seed, *purpose))


def torch_rng(seed: int, *purpose: str | int) -> "torch.Generator":
    """Return torch's CPU generator for one purpose (draw on the CPU, then move: devices draw differently)."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


@contextmanager
def seeded(device: "torch.device", seed: int, *purpose: str | int) -> Iterator[None]:
    """Seed all global generators, torch's (of the CPU and of `device`), numpy's and Python's, and restore them after.

    For what draws from them alone: dropout, and code of the user's own.
    """
    import torch

    own, python, numpy = derive_seed(seed, *purpose), random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(own)
            np.random.seed(own % 2**32)
            random.seed(own)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
