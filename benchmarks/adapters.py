"""Error of every adapter on a real continual stream, and its cost as a multiple of a plain forward pass.

    python -m benchmarks.adapters --data-dir DATA --checkpoint r20.safetensors [--images N] [--adapters a,b]

DATA holds CIFAR-10 in torchvision's layout; the frost photographs must be there (see docs/data.md). The stream is the
first N test images under each of the 15 corruptions in turn, severity 5, batches of 200, never reset; an adapter's own
reported prediction is scored. Nothing is tuned: every hyper-parameter is at its default. Cost: the median over batches
of an adapter's time for one batch, divided by that of a plain forward pass of the same batch, measured in turn with
it. MB: the peak memory of the process. up, home: kB that travel (adapted state) and that stay (local state).
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.corruptions import CORRUPTIONS
from fedtta_flwr.registry import ADAPTERS

BATCH = 200
#: title -> (key, digits)
COLUMNS = {"mean": ("mean", 2), "cost": ("cost", 2), "MB": ("peak_mb", 0), "up": ("up_kb", 1), "home": ("home_kb", 1)}


def measure(name: str, checkpoint: str, data_dir: str, images: int, seed: int) -> dict[str, object]:
    import numpy as np
    import torch

    from fedtta_flwr.data.datasets import open_test_set
    from fedtta_flwr.models.checkpoints import load
    from fedtta_flwr.workbench import make_adapter

    torch.set_num_threads(1)
    data = open_test_set("cifar10", data_dir, seed)
    config = RunConfig.from_flat({"adapter": name, "dataset": "cifar10", "data-dir": data_dir, "seed": seed})
    adapter, plain = make_adapter(config, load(checkpoint)), load(checkpoint)
    errors, ratios = {}, []
    for corruption in CORRUPTIONS:
        wrong = 0
        for start in range(0, images, BATCH):
            rows = np.arange(start, min(start + BATCH, images))
            pixels = torch.from_numpy(data.images(corruption, 5)[rows])
            x = pixels.permute(0, 3, 1, 2).float().div_(255).contiguous()
            began = time.perf_counter()
            with torch.inference_mode():
                plain(x)
            between = time.perf_counter()
            logits = adapter.adapt(x)
            ratios.append((time.perf_counter() - between) / (between - began))
            wrong += int((logits.argmax(dim=1).numpy() != data.labels[rows]).sum())
        errors[corruption] = 100 * wrong / images
    return {
        "error": errors,
        "mean": statistics.mean(errors.values()),
        "cost": statistics.median(ratios),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "up_kb": kilobytes(adapter.adapted_state()),
        "home_kb": kilobytes(adapter.local_state()),
        "rolled_back": adapter.rolled_back,
    }


def kilobytes(state: dict[str, Any]) -> float:
    return sum(t.numel() * t.element_size() for t in state.values()) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapters", default=",".join(ADAPTERS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        found = measure(arguments.one, arguments.checkpoint, arguments.data_dir, arguments.images, arguments.seed)
        print(json.dumps(found))
        return
    print(f"error in %, {arguments.images} images of each corruption, batches of {BATCH}; cost: x a forward pass")
    head = f"{'adapter':<10} " + " ".join(f"{title:>7}" for title in COLUMNS)
    print(head + "  " + " ".join(name[:5] for name in CORRUPTIONS))
    for name in arguments.adapters.split(","):
        # A process of its own: the peak memory is this adapter's.
        command = [sys.executable, "-m", "benchmarks.adapters", *sys.argv[1:], "--one", name]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        row = f"{name:<10} " + " ".join(f"{found[key]:7.{digits}f}" for key, digits in COLUMNS.values())
        print(row + "  " + " ".join(f"{value:5.1f}" for value in found["error"].values()), flush=True)


if __name__ == "__main__":
    main()
