"""What an adapter's step and prediction cost on a CPU with images channel by channel, as a multiple of pixel by pixel.

    python -m benchmarks.layout [--models resnet20,cct-4] [--adapters source,bn-stats] [--batch 10] [--repeats 15]

Both ways take turns on the same random images, each with an adapter of its own, with one thread; processor time,
medians. `models.base.pixel_by_pixel` is what is left out.
"""

import argparse
import statistics
import time
from unittest.mock import patch

import torch

from fedtta_flwr import cpu
from fedtta_flwr.config import RunConfig
from fedtta_flwr.models import base
from fedtta_flwr.models.normalize import Normalize
from fedtta_flwr.models.registry import BUILDERS
from fedtta_flwr.workbench import make_adapter

MODELS = "resnet8,resnet20,resnet56,wrn-40-2,resnext29-32x4d,cct-4"
ADAPTERS = "source,bn-stats,entropy,tent,bbn"


def measure(model: str, name: str, batch: int, repeats: int) -> list[float]:
    """Return milliseconds of step and predict, pixel by pixel, then of both channel by channel."""
    normalize, config = Normalize((0.5,) * 3, (0.25,) * 3), RunConfig.from_flat({"adapter": name})
    adapters = [make_adapter(config, BUILDERS[model](normalize, 10).eval()) for _ in range(2)]
    for adapter in adapters:
        adapter.identity = (0,)
    x = torch.rand(batch, 3, 32, 32)
    times: list[list[float]] = [[] for _ in range(4)]
    for repeat in range(repeats + 1):
        for way, layout in enumerate((base.pixel_by_pixel, lambda x: x)):
            with patch.object(base, "pixel_by_pixel", layout):
                for what, call in enumerate((adapters[way].step, adapters[way].predict)):
                    began = time.process_time()
                    call(x)
                    if repeat:
                        times[2 * way + what].append(time.process_time() - began)
    return [1000 * statistics.median(each) for each in times]


def main() -> None:
    """Print a line for each network and adapter that fit each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--adapters", default=ADAPTERS)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    cpu.prepare(1)
    torch.manual_seed(0)
    print(
        f"batches of {arguments.batch}\n{'model':16} {'adapter':9} {'step ms':>8} {'x':>5} {'predict ms':>11} {'x':>5}"
    )
    for model in arguments.models.split(","):
        for name in arguments.adapters.split(","):
            if model == "cct-4" and name in ("bn-stats", "bbn"):
                continue  # it has no BatchNorm
            step, predict, other_step, other_predict = measure(model, name, arguments.batch, arguments.repeats)
            ratios = other_step / step, other_predict / predict
            print(f"{model:16} {name:9} {step:8.1f} {ratios[0]:5.2f} {predict:11.1f} {ratios[1]:5.2f}", flush=True)


if __name__ == "__main__":
    main()
