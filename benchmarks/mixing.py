"""CPU seconds and peak memory of the server's mixing, beside one flat matrix product.

    python -m benchmarks.mixing [--cases 20:resnet20,1000:resnet20] [--repeats 5]

A case is N clients with the state layout of a model (all its floating-point tensors, 32 bit). Measured in one process,
one thread, in turn, medians: `W @ theta` with theta one [N, P] matrix, in torch and in numpy; `mix_`, which a run uses,
and its multiple of both; `mix_` with one mixture for all, as FedAvg has it; and the path around it: stacking the
replies, mixing, a view a client and tensor, and writing the messages of two nodes. Peaks are of resident memory, as
multiples of the stacked states: of `mix_` with the states that it is given; of the path beyond the replies, so that it
includes the stacked states. (Where a case is small, memory that the process has in reserve hides its peak.)
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = "20:resnet20,100:resnet20,1000:resnet20,20:wrn-28-10"
COLUMNS = ("MB", "torch s", "numpy s", "mix_ s", "x torch", "x numpy", "one s", "peak", "path s", "path peak")


def measure(clients: int, model: str, repeats: int) -> list[float]:
    import torch

    from fedtta_flwr.models import build
    from fedtta_flwr.records import to_stacked_arrays, unstack
    from fedtta_flwr.strategies.updates import Update, mix_, stack_updates

    torch.set_num_threads(1)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in build(model, 10).state_dict().items() if t.is_floating_point()}
    weights = torch.rand((clients, clients), dtype=torch.float64).softmax(dim=1)
    w = weights.float()
    theta = torch.empty(clients, sum(shape.numel() for shape in shapes.values())).uniform_(0.5, 1.5)
    # The same memory, read as one matrix or as a stacked tensor for each name.
    parts = theta.view(-1).split([clients * shape.numel() for shape in shapes.values()])
    state = {name: t.view(clients, *shape) for t, (name, shape) in zip(parts, shapes.items(), strict=True)}
    names = [f"client-{i:04d}" for i in range(clients)]
    replies = {name: Update(unstack(state, i), None, 10) for i, name in enumerate(names)}

    def path() -> None:
        mixed = mix_(weights, stack_updates(1, replies, ()).state)
        personal = [unstack(mixed, i) for i in range(clients)]
        for node in (personal[::2], personal[1::2]):
            to_stacked_arrays(node)

    runs: dict[str, Callable[[], Any]] = {
        "torch": lambda: w @ theta,
        "numpy": lambda: w.numpy() @ theta.numpy(),
        "mix_": lambda: mix_(weights, dict(state)),
        "one": lambda: mix_(weights[:1].expand_as(weights), dict(state)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    runs["torch"]()  # the first product of a process sets much up
    while len(seconds["mix_"]) < repeats or (len(seconds["mix_"]) < 200 and sum(seconds["mix_"]) < 1):
        for name, run in runs.items():
            seconds[name].append(timed(run))
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    path_seconds = statistics.median(timed(path) for _ in range(repeats))
    path_peak = peak_bytes(path)
    stacked = stack_updates(1, replies, ()).state
    peak = theta.nbytes + peak_bytes(lambda: mix_(weights, stacked))
    return [
        theta.nbytes / 1e6,
        *(median[name] for name in ("torch", "numpy", "mix_")),
        median["mix_"] / median["torch"],
        median["mix_"] / median["numpy"],
        median["one"],
        peak / theta.nbytes,
        path_seconds,
        path_peak / theta.nbytes,
    ]


def timed(run: Callable[[], Any]) -> float:
    began = time.thread_time()  # what else the machine does counts little in it
    run()
    return time.thread_time() - began


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return by how much the process's resident memory grew at most."""
    from fedtta_flwr.usage import resident

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        clients, model = arguments.one.split(":")
        found = measure(int(clients), model, arguments.repeats)
        print(f"{arguments.one:<16}" + "".join(f"{value:>10.3g}" for value in found))
        return
    print(f"{'N:model':<16}" + "".join(f"{title:>10}" for title in COLUMNS), flush=True)
    one_thread = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    for case in arguments.cases.split(","):
        command = [sys.executable, "-m", "benchmarks.mixing", "--one", case, "--repeats", str(arguments.repeats)]
        subprocess.run(command, check=True, env=one_thread)


if __name__ == "__main__":
    main()
