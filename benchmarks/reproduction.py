"""The reproduction record: runs the benchmarks of PARTS, and writes docs/reproduction.md.

    python -m benchmarks.reproduction --data DIR --networks DIR --frost DIR --output DIR [--workers N] [--part NAME ...]

--data: a folder with torchvision's cifar-10-batches-py and cifar-100-python, or with cifar100_test.npz for the latter.
--networks: a folder with the files of NETWORKS. --frost: the photographs of the frost corruption. OUTPUT keeps the
regenerated arrays, the converted networks and all runs; what is finished there is not run again, so that the record can
be stopped, and extended, at any time. --write-only: write the document from what OUTPUT holds.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from fedtta_flwr.records import code_fingerprint
from fedtta_flwr.reports.of_bench import bench_tables
from fedtta_flwr.reports.read import BenchOf, read_bench

ROOT = Path(__file__).resolve().parents[1]
SPECS = ROOT / "configs" / "bench"
TABLES = ("main", "claims", "collaboration", "costs")
HEAD = """# The reproduction record

Written by `python -m benchmarks.reproduction`; its docstring says what it needs. Not the papers' networks and, but for
CIFAR's images, not their data: public pretrained networks on CIFAR-10-C and CIFAR-100-C *regenerated* from their
recipe, since the random streams of the published arrays are not known. So orders and gaps can be compared with the
papers, values cannot. A CPU's time scales all of it down, and each part says how. Nothing was tuned: hyper-parameters
are those of docs/strategies.md and docs/adapters.md, except where a row says otherwise.
"""


@dataclass(frozen=True)
class Network:
    """A pretrained network: its file, what it is, its normalisation, its accuracy on clean test images in %."""

    file: str
    architecture: str
    classes: int
    mean: str
    std: str
    words: str


IMAGENET = (".485,.456,.406", ".229,.224,.225")
NETWORKS = {
    "r20": Network("akamaster_resnet20-12fca82f.th", "resnet20-a", 10, *IMAGENET, "akamaster's ResNet-20"),
    "r56": Network("akamaster_resnet56-4bfd9763.th", "resnet56-a", 10, *IMAGENET, "akamaster's ResNet-56"),
    "r20-100": Network(
        "chenyaofo_cifar100_resnet20.pth",
        "resnet20",
        100,
        ".5070,.4865,.4409",
        ".2673,.2564,.2761",
        "chenyaofo's ResNet-20 for CIFAR-100",
    ),
}


@dataclass(frozen=True)
class Part:
    """A part of the record.

    Attributes
    ----------
    spec : str
        Its file in configs/bench.
    data : str
        ``cifar10-c``, ``cifar100-c``, or ``clean`` for the folder of ``--data``.
    config : str
        Run config that scales it down.
    only : tuple of str
        What is run of it: axis=point.
    words : str
        How it is scaled down.
    tables : tuple of str
        What it shows of its report.
    """

    spec: str
    network: str = "r20"
    data: str = "cifar10-c"
    config: str = ""
    only: tuple[str, ...] = ()
    words: str = ""
    tables: tuple[str, ...] = TABLES


BN_ROWS = tuple(f"strategy={name}" for name in ("No-Adapt", "Local", "FedAvg", "pFedGraph", "FedTSA", "FedCTTA"))
FOUR = "corruptions='gaussian_noise,glass_blur,contrast,jpeg_compression'"
PARTS = {
    "bn": Part(
        "record-cifar10-bn",
        words="""5 slots of each corruption, where the papers have 50: batch statistics have no memory, so a slot is as
good as another. Not so for FedTSA's memory of 10 slots and FedCTTA's smoothing over rounds (ema 0.9): both span two
corruptions here.""",
    ),
    "bn-r56": Part(
        "fedctta-table1-cifar10",
        network="r56",
        config="slots-per-corruption=3 shift-length=3",
        only=("adapter=bn", *BN_ROWS),
        words="3 slots of each corruption, where the paper has 50.",
    ),
    "bn-cifar100": Part(
        "fedctta-table1-cifar100",
        network="r20-100",
        data="cifar100-c",
        config="slots-per-corruption=3 shift-length=3 legacy-no-norm=false",
        only=("adapter=bn", *BN_ROWS),
        words="""3 slots of each corruption, where the paper has 50; its network is an AugMix ResNeXt, trained for
corruptions.""",
    ),
    "grad": Part(
        "record-cifar10-grad",
        words="""5 corruptions of 20 slots. `post` is predicted with running statistics, which follow a new corruption
over tens of slots: few corruptions, long runs.""",
    ),
    "spatial": Part(
        "fedctta-fig2-spatial",
        config="slots-per-corruption=3 shift-length=3",
        only=("seed=0",),
        words="3 slots of each corruption, where the paper has 50.",
    ),
    "temporal": Part(
        "fedctta-fig2-temporal",
        config=f"{FOUR} slots-per-corruption=20",
        only=("seed=0", "heterogeneity=TH 0.1", "heterogeneity=TH 0.5", "heterogeneity=TH 1"),
        words="4 corruptions of 20 slots, where the paper has 15 of 50.",
    ),
    "interval": Part(
        "fedctta-fig5-interval",
        config=f"{FOUR} slots-per-corruption=25 shift-length=25",
        only=("seed=0", *(f"interval=every {k}" for k in (1, 2, 5, 10, 25))),
        words="4 corruptions of 25 slots, where the paper has 15 of 50.",
    ),
    "batch": Part(
        "fedctta-fig5-batch",
        config=FOUR,
        only=("seed=0",),
        words="4 corruptions, where the paper has 15.",
    ),
    "metric": Part(
        "fedctta-table4",
        data="clean",
        config=f"{FOUR} slots-per-corruption=10 shift-length=10",
        only=("seed=0",),
        words="4 corruptions of 10 slots, where the paper has 15 of 50; they are laid over clean images as these come.",
    ),
    "balanced": Part(
        "record-cifar10-balanced",
        words="""4 corruptions of 2 slots. A client's 1,000 samples of a corruption are sorted by class: of five slots
of 200 it sees the first two.""",
        tables=("main", "claims", "major-and-minor", "collaboration", "costs"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--data", "--networks", "--frost", "--output"):
        parser.add_argument(name, type=Path, required=name == "--output")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--part", choices=list(PARTS), action="append", help="run these alone")
    parser.add_argument("--write-only", action="store_true", help="from what is there")
    arguments = parser.parse_args()
    output: Path = arguments.output.absolute()
    if not arguments.write_only:
        for name in arguments.part or PARTS:
            run(name, arguments, output)
    there = {name: as_run(read_bench(output / name)) for name in PARTS if (output / name / "bench.json").is_file()}
    made = [written(name, bench) for name, bench in there.items() if bench.cells]
    (ROOT / "docs" / "reproduction.md").write_text("\n".join([HEAD, *made]))


def run(name: str, arguments: argparse.Namespace, output: Path) -> None:
    """Run what is not finished of a part."""
    part = PARTS[name]
    model, data = network(part.network, arguments.networks, output), Path(arguments.data)
    if part.data != "clean":
        clean, data = data, output / part.data
        about = ["--dataset", part.data.removesuffix("-c"), "--severities", "5", "--frost-dir", str(arguments.frost)]
        fedtta("data", "corrupt", "--data-dir", clean, "--output", data, *about)
    architecture = NETWORKS[part.network].architecture
    where = f"data-dir='{data.absolute()}' checkpoint='{model}' model='{architecture}' {part.config}"
    how = ["--output", str(output / name), "--run-config", where, "--workers", str(arguments.workers)]
    fedtta("bench", SPECS / f"{part.spec}.toml", *how, *(word for only in part.only for word in ("--only", only)))


def network(name: str, folder: Path, output: Path) -> Path:
    """Convert a network, if that has not been done."""
    one, model = NETWORKS[name], output / f"{name}.safetensors"
    if not model.exists():
        about = ["--architecture", one.architecture, "--classes", str(one.classes)]
        fedtta("source", "convert", folder / one.file, *about, "--mean", one.mean, "--std", one.std, "--output", model)
    return model


def fedtta(*words: str | Path) -> None:
    """Run a command of this package."""
    subprocess.run([sys.executable, "-c", "from fedtta_flwr.cli import main; main()", *words], check=True)


def written(name: str, bench: BenchOf) -> str:
    """Return a part of the record."""
    part = PARTS[name]
    runs = [cell.run for cell in bench.cells if cell.run is not None]
    versions = ", ".join(f"{name} {version}" for name, version in runs[0].about["versions"].items())
    codes = ", ".join(sorted({commit(run.about["code"]) for run in runs}))
    numbers = [run.about["rounds"] for run in runs]
    rounds = " to ".join(map(str, sorted({min(numbers), max(numbers)})))
    facts = [
        f"`python -m benchmarks.reproduction --part {name}`: `configs/bench/{part.spec}.toml`.",
        f"Beside {bench.spec.source}.",
        textwrap.fill(f"{NETWORKS[part.network].words}. {part.words}", 120),
        f"{len(runs)} runs, seeds {', '.join(map(str, bench.spec.seeds))}; {rounds} rounds.",
        f"Commit {codes}; {versions}; {bench.about['machine']}.",
    ]
    tables = {table.name: table for table in bench_tables(bench)}
    shown = [f"{tables[name].markdown().strip()}\n" for name in part.tables if name in tables]
    return "\n".join([f"## {bench.spec.title}", "", *facts, "", *shown])


@cache
def commit(code: str) -> str:
    """Return the latest commit whose package has this fingerprint (`records.code_fingerprint`)."""
    for one in git("rev-list", "HEAD", "--", "fedtta_flwr").decode().split():
        packed = git("archive", one, "fedtta_flwr")
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive, tempfile.TemporaryDirectory() as folder:
            archive.extractall(folder, filter="data")
            if code_fingerprint(Path(folder) / "fedtta_flwr") == code:
                return one[:7]
    return f"unknown (package {code})"


def git(*words: str) -> bytes:
    """Return what git says."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True).stdout


def as_run(bench: BenchOf) -> BenchOf:
    """Return a benchmark without the points, the seeds and the claims of which nothing has been run."""
    ran = [cell for cell in bench.cells if cell.run is not None]
    axes = {
        axis: {name: config for name, config in points.items() if any(cell.labels[axis] == name for cell in ran)}
        for axis, points in bench.spec.axes.items()
    }
    seeds = sorted({cell.seed for cell in ran})
    claims = [
        claim
        for claim in bench.spec.claims
        if all(point in axes[axis] for side in (claim.better, claim.than) for axis, point in side.items())
    ]
    spec = bench.spec.model_copy(update={"axes": axes, "seeds": seeds, "claims": claims})
    there = [c for c in bench.cells if c.seed in seeds and all(p in axes[axis] for axis, p in c.labels.items())]
    return replace(bench, spec=spec, cells=there)


if __name__ == "__main__":
    main()
