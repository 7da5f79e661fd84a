"""CPU seconds of one round of FedTSA's training on the server, and how much of them matrix products alone would take.

    python -m benchmarks.fedtsa [--clients N] [--slots T] [--steps S] [--repeats R]

Trains the TS-Block on random features of D = 64 (the embedded ResNet-8), 256 (FedTSA's ResNet-8) and 1024 (ResNeXt-29)
on one thread and prints medians. Floor: the products of X [N T, D] with the block's four matrices [D, D] and those of
their gradients, in turn with each training. CPU seconds, which other work on the machine lengthens less than others.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fedtta_flwr.options import FedTSAOptions
from fedtta_flwr.strategies.ts_block import new_block, train_block

FEATURES = (64, 256, 1024)


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(clients: int, slots: int, features: int, steps: int, repeats: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((clients, slots, features), generator=generator)
    options, block = FedTSAOptions(slots=slots, steps=steps), new_block(features)
    rows, matrix = x.flatten(0, 1), torch.rand((features, features), generator=generator)

    def products() -> None:
        for _ in range(4 * steps):
            rows.T @ (rows @ matrix)

    train_block(block, x, FedTSAOptions(slots=slots, steps=2), generator)
    pairs = [
        (cpu_seconds(lambda: train_block(block, x, options, generator)), cpu_seconds(products)) for _ in range(repeats)
    ]
    training, floor = (statistics.median(column) for column in zip(*pairs, strict=True))
    return training, floor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--slots", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"N = {arguments.clients}, T = {arguments.slots}, {arguments.steps} steps, one thread, CPU seconds")
    for features in FEATURES:
        training, floor = measure(arguments.clients, arguments.slots, features, arguments.steps, arguments.repeats)
        print(f"D = {features:<5} training {training:7.3f}  floor {floor:7.3f}  x{training / floor:.1f}", flush=True)


if __name__ == "__main__":
    main()
