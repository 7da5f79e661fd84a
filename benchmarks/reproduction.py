"""The reproduction record: runs the benchmarks of `benchmarks.record`, and writes docs/reproduction.md.

    python -m benchmarks.reproduction --data DIR --networks DIR --frost DIR --output DIR [--workers N] [--part NAME ...]
                                      [--only AXIS=POINT ...]
    python -m benchmarks.reproduction --write-only [--output DIR]

--data: a folder with torchvision's cifar-10-batches-py and cifar-100-python, or with cifar100_test.npz for the latter.
--networks: a folder with the files of NETWORKS. --frost: the photographs of the frost corruption. OUTPUT gets the
regenerated arrays, the converted networks and all runs. What is finished there, or is kept in docs/record
(`benchmarks.kept`), is not run again, so that the record can be stopped, and extended, at any time and anywhere.
--only: less of a part, e.g. seed=0. --write-only: write the document of what is kept, or has finished in OUTPUT.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.kept import KEPT, ROOT, SPECS, keep, restored, run_config
from benchmarks.record import NETWORKS, PARTS
from fedtta_flwr.records import code_fingerprint
from fedtta_flwr.reports.claims import findings
from fedtta_flwr.reports.of_bench import bench_tables
from fedtta_flwr.reports.read import BenchOf, read_bench

DOCUMENT = ROOT / "docs" / "reproduction.md"
HEAD = """# The reproduction record

Written by `python -m benchmarks.reproduction`; its docstring says what it needs. Not the papers' networks and, but for
CIFAR's images, not their data: public pretrained networks on CIFAR-10-C and CIFAR-100-C *regenerated* from their
recipe, since the random streams of the published arrays are not known. So orders and gaps can be compared with the
papers, values cannot. A CPU's time scales most of it down, and each part says how. Nothing was tuned: hyper-parameters
are those of docs/strategies.md and docs/adapters.md, except where a row says otherwise. Of every run [record](record)
keeps the config and the summary: this page is written of them, and who has the data can add to them with one command.
144 of these runs had been made before, at earlier commits, on an Intel processor
(`git log -- docs/reproduction-earlier.md`): their accuracies were the same, to 0.02 points, most to the digit.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--data", "--networks", "--frost", "--output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--part", choices=list(PARTS), action="append", help="run these alone")
    parser.add_argument("--only", action="append", help="of all that a part runs, the runs at these points alone")
    parser.add_argument("--write-only", action="store_true", help="from what is there")
    arguments = parser.parse_args()
    for name in () if arguments.write_only else ("data", "networks", "frost", "output"):
        if getattr(arguments, name) is None:
            parser.error(f"--{name} is missing; --write-only needs none")
    output: Path | None = arguments.output and arguments.output.absolute()
    if output is not None:
        for name in arguments.part or PARTS:
            try:
                if not arguments.write_only:
                    run(name, arguments, output)
            finally:
                keep(name, output)  # also what had finished when it was stopped
    DOCUMENT.write_text(document())


def document() -> str:
    """Return the document of what is kept."""
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in PARTS if (KEPT / f"{name}.jsonl").exists()]
        planned = {name: read_bench(restored(name, Path(folder))) for name in names}
        there = {name: as_run(bench) for name, bench in planned.items()}
        made = [written(name, bench, not_run(planned[name], bench)) for name, bench in there.items()]
    return "\n".join([HEAD, overview(there), *made])


def run(name: str, arguments: argparse.Namespace, output: Path) -> None:
    """Run what is not finished of a part."""
    part = PARTS[name]
    output.mkdir(parents=True, exist_ok=True)
    network(part.network, arguments.networks, output)
    if not (output / "clean").exists():
        (output / "clean").symlink_to(arguments.data.absolute())
    if part.data != "clean":
        about = ["--dataset", part.data.removesuffix("-c"), "--severities", "5", "--frost-dir", str(arguments.frost)]
        fedtta("data", "corrupt", "--data-dir", output / "clean", "--output", output / part.data, *about)
    folder = restored(name, output)
    how = ["--output", str(folder), "--run-config", run_config(part, output), "--workers", str(arguments.workers)]
    axes = {only.partition("=")[0] for only in arguments.only or ()}
    points = [only for only in part.only if only.partition("=")[0] not in axes] + (arguments.only or [])
    fedtta("bench", SPECS / f"{part.spec}.toml", *how, *(word for point in points for word in ("--only", point)))


def network(name: str, folder: Path, output: Path) -> None:
    """Convert a network, if that has not been done."""
    one, model = NETWORKS[name], output / f"{name}.safetensors"
    if not model.exists():
        about = ["--architecture", one.architecture, "--classes", str(one.classes)]
        fedtta("source", "convert", folder / one.file, *about, "--mean", one.mean, "--std", one.std, "--output", model)


def fedtta(*words: str | Path) -> None:
    """Run a command of this package."""
    done = subprocess.run([sys.executable, "-c", "from fedtta_flwr.cli import main; main()", *words])
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why


def overview(there: Mapping[str, BenchOf]) -> str:
    """Return how many of the comparisons that claims are hold, part by part."""
    rows = []
    for name, bench in there.items():
        verdicts = Counter(finding.verdict() for finding in findings(bench))
        plain = [f"{verdicts[verdict]}" for verdict in ("holds", "does not hold")]
        within, single = (
            f"{sum(n for verdict, n in verdicts.items() if w in verdict)}" for w in ("within", "one seed")
        )
        network, seeds = NETWORKS[PARTS[name].network].words, len(bench.spec.seeds)
        link = f"[{name}](#{anchor(heading(name, bench))})"
        rows.append([link, bench.spec.title, network, f"{seeds}", *plain, within, single])
    columns = ["part", "of", "network", "seeds", "comparisons that hold", "that do not"]
    columns += ["within the spread of the seeds", "known from one seed alone"]
    lines = [columns, [":--", ":--", ":--", *["--:"] * 5], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def heading(name: str, bench: BenchOf) -> str:
    """Return the heading of a part: the same benchmark may be there in several parts."""
    return f"{name}: {bench.spec.title}"


def anchor(title: str) -> str:
    """Return where a heading is to be found, as GitHub has it."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def not_run(planned: BenchOf, ran: BenchOf) -> str:
    """Return in words which points of a benchmark were not run, and how many of its claims lack one; empty if none."""
    left = {axis: [p for p in points if p not in ran.spec.axes[axis]] for axis, points in planned.spec.axes.items()}
    points = "; ".join(f"{axis} {', '.join(names)}" for axis, names in left.items() if names)
    claims = len(planned.spec.claims) - len(ran.spec.claims)
    compared = f" So {claims} of the benchmark's {len(planned.spec.claims)} claims are not judged." if claims else ""
    return f"Not run: {points}.{compared}" if points else ""


def written(name: str, bench: BenchOf, lacking: str) -> str:
    """Return a part of the record; `lacking` says what of the benchmark was not run."""
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
        f"{len(runs)} runs, {'seeds' if len(bench.spec.seeds) > 1 else 'seed'} "
        f"{', '.join(map(str, bench.spec.seeds))}; {rounds} rounds.",
        f"Commit {codes}; {versions}; {bench.machines()}.",
    ]
    if lacking:
        facts.append(textwrap.fill(lacking, 120))
    tables = {table.name: table for table in bench_tables(bench)}
    shown = [f"{tables[name].markdown().strip()}\n" for name in part.tables if name in tables]
    return "\n".join([f"## {heading(name, bench)}", "", *facts, "", *shown])


def commit(code: str) -> str:
    """Return the latest commit whose package has this fingerprint (`records.code_fingerprint`)."""
    commits = git("rev-list", "HEAD", "--", "fedtta_flwr").decode().split()
    return next((one[:7] for one in commits if fingerprint(one) == code), f"unknown (package {code})")


@cache
def fingerprint(commit: str) -> str:
    """Return the fingerprint of the package at a commit."""
    packed = git("archive", commit, "fedtta_flwr")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        return code_fingerprint(Path(folder) / "fedtta_flwr")


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
