"""Time of the whole FedCTTA protocol on LocalGrid, as a multiple of a bare PyTorch loop; Ray's time beside it.

    python -m benchmarks.local_grid [--rounds 750] [--repeats 5] [--noise-samples 64] [--no-ray]

FedCTTA with bn-stats: ResNet-8, 20 clients, batches of 10, `scores = "post"` (`tta` would cost
nothing more, the other scores a forward pass each). Images are random and not corrupted: corrupting them costs the same
everywhere, and what they show changes no time. With fewer noise images more of the time is Flower's and ours.

The bare loop knows nothing of Flower, messages or files. For each client and round it loads a copy of the client's
mixture, scores it on the last batch (`post`), adapts to the next one in a forward pass that takes its statistics over,
and sends the noise through; then it smooths the answers and mixes. Same batches, same arithmetic: both must
end with the same W (to 1e-4) and the same accuracy of `post` (to 0.1 %), or the comparison ends.

All runs have one thread and a process of their own; bare loop and LocalGrid take turns, medians count. Measured from
after the imports to the last file, by the clock and as processor time (which says more where others use the machine):
LocalGrid's includes reading and writing everything that a run needs and leaves. Ray's is that of its rounds alone, with
two workers, once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: seconds by the clock, of the processor; accuracy of `post` in percent; the last W
Result = tuple[float, float, float, list[list[float]]]
CLIENTS, BATCH, EMA, CLASSES = 20, 10, 0.9, 10


def config(folder: Path, rounds: int, noise: int) -> dict[str, str | int | float | bool]:
    from fedtta_flwr.models.source import embedded_checkpoint

    return {
        "strategy": "fedctta",
        "adapter": "bn-stats",
        "model": "resnet8",
        "checkpoint": str(embedded_checkpoint()),
        "dataset": "arrays",
        "data-dir": str(folder),
        "corruptions": "none",
        "num-clients": CLIENTS,
        "batch-size": BATCH,
        "slots-per-corruption": rounds,
        "scores": "post",
        "fedctta.noise-samples": noise,
        "fedctta.ema": EMA,
        "device": "cpu",
        "threads": 1,
    }


def bare(folder: Path, rounds: int, samples: int) -> Result:
    """Run the loop."""
    import numpy as np
    import torch
    from torch import Tensor, nn

    from fedtta_flwr import cpu
    from fedtta_flwr.config import RunConfig
    from fedtta_flwr.data.build import build_stream, open_data
    from fedtta_flwr.descriptors import noise_images
    from fedtta_flwr.models.source import load_source

    cpu.prepare(1)  # with the allocator settings of a client: only what is around the forwards shall differ
    began = now()
    settings = RunConfig.from_flat(config(folder, rounds, samples))
    data = open_data(settings)
    # Which samples a client gets: what the images and labels of a slot are is read here, by hand.
    slots = [build_stream(settings, name, data, {}).rows for name in settings.client_names()]  # type: ignore[attr-defined]
    images, labels = np.load(folder / "images.npy", mmap_mode="r"), np.load(folder / "labels.npy")
    model = load_source(settings, CLASSES).eval()
    noise = noise_images(0, samples, (3, 32, 32))
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    live = [t for m in layers for t in (m.running_mean, m.running_var)]
    adapting = False

    def take_over(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if adapting:
            h = inputs[0]
            mean = h.mean(dim=(0, 2, 3), keepdim=True)
            layer.running_mean.copy_(mean.flatten())  # type: ignore[operator]
            layer.running_var.copy_((h - mean).square_().mean(dim=(0, 2, 3)))  # type: ignore[operator]

    for layer in layers:
        layer.register_forward_pre_hook(take_over)
    states = [[t.clone() for t in live] for _ in range(CLIENTS)]  # type: ignore[union-attr]
    last: list[tuple[Tensor, Tensor]] = []
    answers: Tensor | None = None
    correct = seen = 0
    with torch.inference_mode():
        for slot in range(rounds + 1):
            uploaded, told, batches = [], [], []
            for client in range(CLIENTS):
                torch._foreach_copy_(live, states[client])
                if last:
                    x, y = last[client]
                    correct += int((model(x).argmax(dim=1) == y).sum())
                    seen += len(y)
                if slot == rounds:
                    continue
                rows = slots[client][slot]
                x = torch.from_numpy(images[rows]).permute(0, 3, 1, 2).to(torch.float32).div_(255).contiguous()
                batches.append((x, torch.from_numpy(labels[rows])))
                adapting = True
                model(x)
                adapting = False
                told.append(model(noise).mean(dim=0))
                uploaded.append([t.clone() for t in live])  # type: ignore[union-attr]
            if slot == rounds:
                break
            last, new = batches, torch.stack(told)
            answers = new if answers is None else EMA * answers + (1 - EMA) * new
            w = torch.softmax(-torch.cdist(answers.double(), answers.double()), dim=1).float()
            mixed = [w @ torch.stack(tensors) for tensors in zip(*uploaded, strict=True)]
            states = [[t[client] for t in mixed] for client in range(CLIENTS)]
    return *since(began), 100 * correct / seen, w.tolist()


def local(folder: Path, rounds: int, samples: int) -> Result:
    """Run the package."""
    import numpy as np

    from fedtta_flwr.launch import run_local

    import_apps()
    with tempfile.TemporaryDirectory() as output:
        began = now()
        run_local(config(folder, rounds, samples) | {"output-dir": f"{output}/run"}, nodes=2)
        taken = since(began)
        summary = json.loads(Path(output, "run", "summary.json").read_text())
        weights = np.load(Path(output, "run", "collaboration.npz"))["weights"]
    return *taken, summary["accuracy"]["post"]["micro"], weights[-1].tolist()


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    clock, processor = (later - earlier for earlier, later in zip(began, now(), strict=True))
    return clock, processor


def import_apps() -> None:
    """Import what a run does, so that it is not timed."""
    import fedtta_flwr.client
    import fedtta_flwr.local_grid
    import fedtta_flwr.models.source
    import fedtta_flwr.server
    import fedtta_flwr.strategies.fedctta  # noqa: F401


def ray(folder: Path, rounds: int, samples: int) -> float:
    """Return the seconds of all rounds."""
    overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in config(folder, rounds, samples).items())
    command = [sys.executable, "-c", "from fedtta_flwr.cli import main; main()", "run", "--engine", "flower"]
    with tempfile.TemporaryDirectory() as output:
        command += ["--run-config", overrides, "--output", f"{output}/run", "--nodes", "2", "--workers", "2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return float(json.loads(Path(output, "run", "summary.json").read_text())["seconds"]["total"])


def measured(engine: str, folder: Path, rounds: int, samples: int) -> Result:
    """Return what an engine returns in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.local_grid", "--one", engine, str(folder)]
    command += ["--rounds", str(rounds), "--noise-samples", str(samples)]
    one_thread = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(command, check=True, env=one_thread, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    clock, processor, accuracy, weights = json.loads(done.stdout.splitlines()[-1])
    return clock, processor, accuracy, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=750)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--noise-samples", type=int, default=64)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds, samples, engines = arguments.rounds, arguments.noise_samples, {"bare": bare, "local": local}
    if arguments.one:
        engine, folder = arguments.one
        print(json.dumps(engines[engine](Path(folder), rounds, samples)))
        return
    import numpy as np

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        np.save(folder / "images.npy", rng.integers(0, 256, (rounds * BATCH, 32, 32, 3), dtype=np.uint8))
        np.save(folder / "labels.npy", rng.permutation(np.arange(rounds * BATCH) % CLASSES))
        taken: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
        for turn in range(arguments.repeats):
            results = {engine: measured(engine, folder, rounds, samples) for engine in engines}
            seconds = ", ".join(f"{engine} {result[0]:.1f} ({result[1]:.1f})" for engine, result in results.items())
            print(f"{turn + 1} of {arguments.repeats}: {seconds} s by the clock (of the processor)", flush=True)
            for engine, result in results.items():
                taken[engine].append(result[:2])
            (*_, own, w), (*_, other, v) = results.values()
            off = float(np.abs(np.subtract(w, v)).max())
            if abs(own - other) > 0.1 or off > 1e-4:
                raise SystemExit(f"they do not compute the same: post {own:.3f}, {other:.3f} %; W differs by {off:.2g}")
        for i, time_of in enumerate(("clock", "processor")):
            median = {engine: statistics.median(pair[i] for pair in pairs) for engine, pairs in taken.items()}
            for engine, seconds in median.items():
                print(
                    f"{time_of:<10} {engine:<6} {seconds:8.1f} s   {seconds / rounds / CLIENTS * 1e3:7.2f} ms a visit"
                )
            ratios = [two[i] / one[i] for one, two in zip(*taken.values(), strict=True)]
            each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"{time_of:<10} local / bare: {median['local'] / median['bare']:.3f} (in turn: {each})", flush=True)
        if not arguments.no_ray:
            print(f"clock      ray    {ray(folder, rounds, samples):8.1f} s", flush=True)


if __name__ == "__main__":
    main()
