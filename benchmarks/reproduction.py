"""The reproduction record: runs configs/bench/record-*.toml, and writes docs/reproduction.md.

    python -m benchmarks.reproduction --cifar DIR --resnet20 FILE.th --frost DIR --output DIR [--workers N]

--cifar: a folder with cifar-10-batches-py. --resnet20: akamaster's ResNet-20 for CIFAR-10 (clean accuracy 91.73 %).
--frost: the photographs of the frost corruption. OUTPUT keeps the regenerated arrays and all runs; what is finished
there is not run again, so the record can be stopped, and extended by more seeds, at any time. --write-only: write the
document from what OUTPUT holds.
"""

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

from fedtta_flwr.reports.of_bench import bench_tables
from fedtta_flwr.reports.read import BenchOf, read_bench

ROOT = Path(__file__).resolve().parents[1]
FEDTTA = [sys.executable, "-c", "from fedtta_flwr.cli import main; main()"]
SPECS = ("record-cifar10-bn", "record-cifar10-grad", "record-cifar10-balanced")
TABLES = ("main", "claims", "collaboration", "costs")
STATISTICS = ("--mean", ".485,.456,.406", "--std", ".229,.224,.225")
HEAD = """# The reproduction record

Written by `python -m benchmarks.reproduction`; its docstring says what it needs. Not the papers' networks and, but for
CIFAR-10's images, not their data: a pretrained ResNet-20 (akamaster's, 91.73 % on clean images) on CIFAR-10-C
*regenerated* from its recipe, since the random streams of the published arrays are not known. So orders and gaps can be
compared with the papers, values cannot. Each part says how it is scaled down. Nothing was tuned: hyper-parameters are
those of docs/strategies.md and docs/adapters.md, except where a row says otherwise.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--cifar", "--resnet20", "--frost", "--output"):
        parser.add_argument(name, type=Path, required=name == "--output")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--write-only", action="store_true", help="from what is there")
    arguments = parser.parse_args()
    output: Path = arguments.output.absolute()
    if not arguments.write_only:
        run(arguments, output)
    parts = [part(read_bench(output / name)) for name in SPECS if (output / name / "bench.json").is_file()]
    (ROOT / "docs" / "reproduction.md").write_text("\n".join([HEAD, *parts]))


def run(arguments: argparse.Namespace, output: Path) -> None:
    """Run what is not finished."""
    data, model = output / "cifar10-c", output / "resnet20.safetensors"
    corrupt = ["--data-dir", arguments.cifar, "--output", data, "--severities", "5", "--frost-dir", arguments.frost]
    subprocess.run([*FEDTTA, "data", "corrupt", *corrupt], check=True)
    if not model.exists():
        convert = [
            arguments.resnet20,
            "--architecture",
            "resnet20-a",
            "--classes",
            "10",
            "--output",
            model,
            *STATISTICS,
        ]
        subprocess.run([*FEDTTA, "source", "convert", *convert], check=True)
    for name in SPECS:
        where = f"data-dir='{data}' checkpoint='{model}'"
        command = [ROOT / "configs" / "bench" / f"{name}.toml", "--output", output / name, "--run-config", where]
        subprocess.run([*FEDTTA, "bench", *command, "--workers", str(arguments.workers)], check=True)


def part(bench: BenchOf) -> str:
    """Return a benchmark's part of the record."""
    spec, machine = bench.spec, bench.about["machine"]
    runs = [cell.run for cell in bench.cells if cell.run is not None]
    seeds = ", ".join(map(str, sorted({cell.seed for cell in bench.cells if cell.run is not None})))
    versions = ", ".join(f"{name} {version}" for name, version in runs[0].about["versions"].items())
    codes = ", ".join(sorted({run.about["code"] for run in runs}))
    comments = itertools.takewhile(
        lambda line: line.startswith("# "),
        (ROOT / "configs" / "bench" / f"{spec.name}.toml").read_text().splitlines(),
    )
    scale = [line.removeprefix("# ") for line in comments if "fedtta bench" not in line and "DIR:" not in line]
    facts = [
        f"`configs/bench/{spec.name}.toml`, beside {spec.source}.",
        f"{len(runs)} of {len(bench.cells)} runs; seeds {seeds}.",
        f"Code {codes}; {versions}; {machine}.",
    ]
    tables = {table.name: table for table in bench_tables(bench)}
    shown = [f"{tables[name].markdown().strip()}\n" for name in TABLES if name in tables]
    return "\n".join([f"## {spec.title}", "", *scale, "", *facts, "", *shown])


if __name__ == "__main__":
    main()
