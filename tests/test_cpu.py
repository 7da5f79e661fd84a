"""How a process computes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, sys, torch
from fedtta_flwr import cpu
if sys.argv[1] == "prepared":
    cpu.prepare(1)

def step():
    kept = [torch.zeros(50, 16, 32, 32) for _ in range(30)]  # 3 MB each, as activations are, until the last is there

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, torch.get_num_threads())
"""


def faults(how: str, **variables: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        env=os.environ | variables,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    pages, threads = map(int, done.stdout.split())
    return pages, threads


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="needs glibc"
)
def test_memory_that_a_step_freed_serves_the_next():
    plain, _ = faults("plain")
    prepared, threads = faults("prepared")
    assert threads == 1
    assert prepared < plain / 2  # a quarter or less, but for what the kernel reclaims meanwhile
    # Who has set the allocator up themselves keeps what they chose.
    assert faults("prepared", MALLOC_TRIM_THRESHOLD_="131072")[0] > plain / 2
