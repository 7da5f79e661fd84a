"""What stays of the record's runs: docs/record/PART.jsonl, a line a run, of which docs/reproduction.md is written.

A line holds a run's config.json and summary.json: enough for all tables of the record, and for `fedtta bench` not to
run it again. So the record is extended, by further seeds or parts, on another machine or a year later.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.record import NETWORKS, PARTS, Part
from fedtta_flwr.bench.runner import cell_folder, open_bench
from fedtta_flwr.bench.spec import cells, read_spec
from fedtta_flwr.files import is_finished, write_atomically, write_json
from fedtta_flwr.run_config import read_overrides

ROOT = Path(__file__).resolve().parents[1]
SPECS, KEPT = ROOT / "configs" / "bench", ROOT / "docs" / "record"
HERE = "OUTPUT"  # stands for the folder of the runs, which is another one elsewhere
FILES = ("config", "summary")


def restored(name: str, output: Path, kept: Path = KEPT) -> Path:
    """Return a part's benchmark folder, with what is kept of it laid where `fedtta bench` looks for it."""
    folder = output / name
    spec, table = read_spec(SPECS / f"{PARTS[name].spec}.toml")
    overrides = read_overrides([run_config(PARTS[name], output)])
    everything = cells(spec, overrides)
    known = {cell.id for cell in everything}
    if not (folder / "bench.json").is_file():
        open_bench(folder, spec, table, everything, overrides, quick=False)
    for line in read(name, output, kept):
        own = cell_folder(folder, line["cell"])
        if line["cell"] in known and not is_finished(own):
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            for file in FILES:
                write_json(own / f"{file}.json", line[file])
    return folder


def run_config(part: Part, output: Path) -> str:
    """Return the run config that goes before all that the spec says: where things are, and how it is scaled down."""
    model = f"checkpoint='{output}/{part.network}.safetensors' model='{NETWORKS[part.network].architecture}'"
    return f"data-dir='{output}/{part.data}' {model} {part.config}"


def read(name: str, output: Path, kept: Path = KEPT) -> list[dict[str, Any]]:
    """Return the lines of a part, as if its runs lay in this folder."""
    path = kept / f"{name}.jsonl"
    text = path.read_text().replace(f'"{HERE}/', _begins(output)) if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _begins(output: Path) -> str:
    """Return how a place in this folder begins in JSON."""
    return json.dumps(f"{output}/")[:-1]


def keep(name: str, output: Path, kept: Path = KEPT) -> None:
    """Keep the runs of a part that have finished, and those that were kept before."""
    lines = {line["cell"]: line for line in read(name, output, kept)}
    for own in (output / name / "cells").glob("*/"):
        if is_finished(own):
            lines[own.name] = {"cell": own.name} | {f: json.loads((own / f"{f}.json").read_text()) for f in FILES}
    text = "".join(json.dumps(lines[cell]) + "\n" for cell in sorted(lines)).replace(_begins(output), f'"{HERE}/')
    if lines:
        kept.mkdir(exist_ok=True)
        write_atomically(kept / f"{name}.jsonl", lambda file: file.write(text.encode()))
