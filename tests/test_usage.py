"""Peaks of memory."""

import subprocess
import sys

import pytest
import torch

from fedtta_flwr.usage import peak_memory

ASK = "from fedtta_flwr.usage import peak_memory; print(peak_memory())"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process is asked by getrusage")
def test_the_peak_is_this_processs_own() -> None:
    """Not that of the process that started it, which Linux hands on."""
    held = torch.ones(600 * 2**20, dtype=torch.uint8)
    assert peak_memory() > held.numel()
    child = subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True)
    assert 10 * 2**20 < int(child.stdout) < peak_memory() - 100 * 2**20
