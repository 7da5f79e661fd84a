"""Seconds per 1,000 test samples of every head, beside a plain forward pass by both heads of the same network.

    python -m benchmarks.heads [--model cnn] [--batch 32] [--heads btfl,fedthe,memo,ttt] [--samples 1000] [--limit 1.5]

Extractor and heads are drawn, not trained, and the images are noise: how long a method takes depends on neither, but
for FedTHE, whose samples may stop early. Every hyper-parameter is at its default unless `--set`, for example `--set
memo.steps=3`, says otherwise. Heads that took less than a second are measured again, in turn with the plain pass (the
extractor, both heads, both softmaxes), up to `--repeat` times; the medians are shown, and the median ratio. `--limit`:
the exit status is 1 if BTFL's ratio is above it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedtta_flwr.files import write_json
from fedtta_flwr.registry import HEADS
from fedtta_flwr.run_config import read_overrides

CLASSES, CLIENTS, TRAINING = 10, 20, 1000


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time one head and the plain pass, in turn."""
    import torch

    from fedtta_flwr import cpu
    from fedtta_flwr.config import RunConfig
    from fedtta_flwr.heads.base import SHARED, VALIDATION, Predictor
    from fedtta_flwr.heads.training import TwoHeads, fitted
    from fedtta_flwr.heads.training import statistics as statistics_of
    from fedtta_flwr.models import build
    from fedtta_flwr.resolve import make, resolve
    from fedtta_flwr.workbench import choose_device

    cpu.prepare(1)
    device = choose_device(arguments.device)
    options = RunConfig.from_flat(read_overrides(arguments.set)).options(name)
    method = resolve("head", name, HEADS)
    torch.manual_seed(arguments.seed)
    net = TwoHeads(build(arguments.model, CLASSES), method.recipe(options)).to(device)
    torch.nn.init.normal_(net.personal_head.weight, std=0.1)
    images, labels = torch.rand(TRAINING, 3, 32, 32, device=device), torch.randint(CLASSES, (TRAINING,), device=device)

    def training() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from zip(images.split(100), labels.split(100), strict=True)

    found = statistics_of(net, training, method.needs)
    found |= {name: found[own] for own, name in VALIDATION.items() if own in found}
    found |= {mean: 0.9 * found[own] + 0.05 for own, mean in SHARED.items() if own in found}
    found["clients"] = torch.tensor(CLIENTS)
    predictor: Predictor = make("head", name, HEADS, Predictor, fitted(net, found), options)
    batches = torch.rand(arguments.samples, 3, 32, 32, device=device).split(arguments.batch)

    @torch.inference_mode()
    def plain(x: torch.Tensor) -> None:
        for logits in predictor.logits(predictor.extractor(x)):
            logits.softmax(1)

    def seconds(predict: Callable[[torch.Tensor], object]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for x in batches:
            predict(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) * 1000 / arguments.samples

    for predict in (plain, predictor.predict):
        predict(batches[0])  # the first call of everything is slow
    pairs: list[tuple[float, float]] = []
    while len(pairs) < arguments.repeat and (not pairs or sum(map(sum, pairs)) < arguments.repeat):
        predictor.reset()
        pairs.append((seconds(plain), seconds(predictor.predict)))
    return {
        "head": name,
        "plain": statistics.median(before for before, _ in pairs),
        "seconds": statistics.median(after for _, after in pairs),
        "ratio": statistics.median(after / before for before, after in pairs),
        "runs": len(pairs),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn", help="of 32x32 colour images")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run config; repeatable")
    parser.add_argument("--device", default="cpu", help="as in the run config")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="RATIO")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    print(f"seconds per 1,000 samples; {arguments.model}, batches of {arguments.batch}, {arguments.device}")
    print(f"{'head':<12} {'plain':>8} {'head':>9} {'ratio':>8}", flush=True)
    rows = []
    for name in arguments.heads.split(","):
        rows.append(row := measure(name, arguments))
        print(f"{name:<12} {row['plain']:8.3f} {row['seconds']:9.3f} {row['ratio']:8.2f}", flush=True)
    if arguments.json:
        about = {key: str(value) for key, value in vars(arguments).items()}
        write_json(arguments.json, {"arguments": about, "rows": rows})
    sys.exit(any(row["head"] == "btfl" and row["ratio"] > arguments.limit for row in rows))


if __name__ == "__main__":
    main()
