"""Error of every adapter on a real continual stream, and its cost as a multiple of a plain forward pass.

    python -m benchmarks.adapters --data-dir DATA --checkpoint r20.safetensors [--images N] [--adapters a,b]

DATA holds CIFAR-10 in torchvision's layout, whose images are corrupted first (frost needs its photographs, see
docs/data.md), or a CIFAR-10-C, published or made by `fedtta data corrupt`, which saves that time at every call. The
stream is the first N test images under each of the 15 corruptions in turn, severity 5, batches of 200, never reset; an
adapter's own reported prediction is scored. Nothing is tuned: every hyper-parameter is at its default, unless for
example `--set rotta.alpha=0.5` says otherwise.

Cost: the median over batches of an adapter's time for one batch, divided by that of a plain forward pass of the same
batch, measured in turn with it; with `--jobs 1` only, since adapters that run side by side slow each other down. MB:
the peak memory of the process; on a GPU that of its tensors. up, home: kB that travel (adapted state) and that stay
(local state). `--by-batch` shows the error by a batch's place after a shift instead of by corruption, `--order
class-sorted` sorts the images of each corruption by class. `--json` saves every row as soon as it is there.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedtta_flwr.data.contracts import to_tensor
from fedtta_flwr.data.corruptions import CORRUPTIONS
from fedtta_flwr.files import write_json
from fedtta_flwr.registry import ADAPTERS
from fedtta_flwr.run_config import read_overrides
from fedtta_flwr.usage import peak_memory

BATCH, SEVERITIES, SEVERITY = 200, 5, 5
#: title -> (key, digits)
COLUMNS = {"mean": ("mean", 2), "cost": ("cost", 2), "MB": ("peak_mb", 0), "up": ("up_kb", 1), "home": ("home_kb", 1)}
#: batches at either end of a corruption whose error is shown
ENDS = 5


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Send one adapter through the stream, in a process of its own."""
    import numpy as np
    import torch

    from fedtta_flwr import cpu
    from fedtta_flwr.config import RunConfig
    from fedtta_flwr.models.checkpoints import load
    from fedtta_flwr.workbench import choose_device, make_adapter

    cpu.prepare(1)
    device, timed, overrides = choose_device(arguments.device), arguments.jobs == 1, read_overrides(arguments.set)
    config = RunConfig.from_flat({"adapter": name, "seed": arguments.seed} | overrides)
    plain = load(arguments.checkpoint).to(device)
    adapter = make_adapter(config, load(arguments.checkpoint).to(device))
    adapter.identity = (arguments.seed,)
    initial = {key: t.clone() for key, t in adapter.adapted_state().items()}
    labels = np.load(folder / "labels.npy")[: arguments.images]
    order = np.argsort(labels, kind="stable") if arguments.order == "class-sorted" else np.arange(len(labels))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def forward(x: torch.Tensor) -> None:
        with torch.inference_mode():
            plain(x)

    wrong: dict[str, list[int]] = {}
    ratios: list[float] = []
    for corruption in CORRUPTIONS:
        pixels = np.load(folder / f"{corruption}.npy", mmap_mode="r")
        pixels = pixels[(SEVERITY - 1) * (len(pixels) // SEVERITIES) :]
        wrong[corruption] = []
        for rows in batches:
            x = to_tensor(pixels[rows]).to(device)
            if timed and not ratios:  # the first call of everything is slow
                forward(x)
                adapter.adapt(x)
                adapter.reset(initial)
            began = now()
            if timed:
                forward(x)
            between = now()
            logits = adapter.adapt(x)
            if timed:
                ratios.append((now() - between) / (between - began))
            wrong[corruption].append(int((logits.argmax(dim=1).cpu().numpy() != labels[rows]).sum()))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()
    errors = {corruption: 100 * sum(counts) / len(labels) for corruption, counts in wrong.items()}
    return {
        "adapter": name,
        "set": overrides,
        "error": errors,
        "mean": statistics.mean(errors.values()),
        "by_batch": [
            100 * statistics.mean(counts) / len(rows)
            for counts, rows in zip(zip(*wrong.values(), strict=True), batches, strict=True)
        ],
        "wrong": wrong,
        "cost": statistics.median(ratios) if ratios else None,
        "peak_mb": peak / 2**20,
        "up_kb": kilobytes(adapter.adapted_state()),
        "home_kb": kilobytes(adapter.local_state()),
        "rolled_back": adapter.rolled_back,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def kilobytes(state: dict[str, Any]) -> float:
    return sum(t.numel() * t.element_size() for t in state.values()) / 1024


@contextmanager
def corrupted(arguments: argparse.Namespace) -> Iterator[Path]:
    """Give the folder with the corrupted images: the one that was named, or one for the time of this call."""
    from fedtta_flwr.data.zenodo import ZenodoSet

    folder = Path(arguments.data_dir)
    if (folder / "labels.npy").exists() or (folder / "CIFAR-10-C").is_dir():
        data = ZenodoSet(folder, "cifar10-c")
        for corruption in CORRUPTIONS:
            data.images(corruption, SEVERITY)  # refuses what is absent or was not rebuilt
        yield data.folder
        return
    from fedtta_flwr.data.cifar import READERS
    from fedtta_flwr.data.parallel import cores
    from fedtta_flwr.data.rebuild import rebuild

    images, labels, _ = READERS["cifar10"](folder)
    images, labels = images[: arguments.images], labels[: arguments.images]
    made = {"dataset": "cifar10", "corruptions": CORRUPTIONS, "severities": [SEVERITY], "seed": arguments.seed}
    with TemporaryDirectory(prefix="fedtta-") as output:
        rebuild(images, labels, Path(output), workers=cores(), **made)
        yield Path(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--images", type=int, default=1000, help="of each corruption")
    parser.add_argument("--order", choices=["as-is", "class-sorted"], default="as-is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapters", default=",".join(ADAPTERS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run config; repeatable")
    parser.add_argument("--device", default="cpu", help="as in the run config")
    parser.add_argument("--jobs", type=int, default=1, help="adapters side by side")
    parser.add_argument("--by-batch", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    names = arguments.adapters.split(",")
    cost = "x a forward pass" if arguments.jobs == 1 else f"not measured, {arguments.jobs} adapters run side by side"
    stream = f"{arguments.images} images of each corruption, {arguments.order}, batches of {BATCH}"
    print(f"error in %; {stream}; cost: {cost}")
    places = range(-(-arguments.images // BATCH))
    shown = [*places[:ENDS], *places[max(ENDS, len(places) - ENDS) :]]
    titles = [f"{place + 1:>5}" for place in shown] if arguments.by_batch else [name[:5] for name in CORRUPTIONS]
    print(f"{'adapter':<10} " + " ".join(f"{title:>7}" for title in COLUMNS) + "  " + " ".join(titles), flush=True)
    rows: list[dict[str, Any]] = []
    # A process for each adapter: the peak memory is its own.
    context = multiprocessing.get_context("spawn")
    with corrupted(arguments) as folder, ProcessPoolExecutor(arguments.jobs, context, max_tasks_per_child=1) as pool:
        waiting = {pool.submit(measure, name, folder, arguments): name for name in names}
        for future in as_completed(waiting):
            if error := future.exception():
                print(f"{waiting[future]:<10} {type(error).__name__}: {error}", flush=True)
                continue
            row = future.result()
            rows.append(row)
            cells = " ".join(
                f"{'-':>7}" if row[key] is None else f"{row[key]:7.{digits}f}" for key, digits in COLUMNS.values()
            )
            values = [row["by_batch"][place] for place in shown] if arguments.by_batch else row["error"].values()
            print(f"{row['adapter']:<10} {cells}  " + " ".join(f"{value:5.1f}" for value in values), flush=True)
            if arguments.json:
                about = {key: str(value) for key, value in vars(arguments).items()}
                write_json(arguments.json, {"arguments": about, "rows": rows})
    sys.exit(len(rows) < len(names))


if __name__ == "__main__":
    main()
