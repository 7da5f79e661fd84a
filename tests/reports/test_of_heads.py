"""The figures of a run of two heads, from a real one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedtta_flwr.bench.runner import cell_folder, open_bench
from fedtta_flwr.bench.spec import cells, make_spec
from fedtta_flwr.data.btgfl import SETS
from fedtta_flwr.launch import run_local
from fedtta_flwr.reports.interpolation import FILE
from fedtta_flwr.reports.of_heads import head_bench_figures, head_figures
from fedtta_flwr.reports.read import read_bench, read_run
from fedtta_flwr.reports.report import write_report

TINY_HEADS = {
    "task": "tgfl",
    "head": "btfl",
    "dataset": "digits",
    "model": "cnn",
    "num-clients": 3,
    "batch-size": 32,
    "corruptions": "contrast",
    "scores": "source,local,tta",
    "device": "cpu",
    "tgfl.dirichlet": 1.0,
    "tgfl.train-rounds": 1,
    "tgfl.epochs": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "run"
    run_local(TINY_HEADS | {"output-dir": str(folder)}, nodes=1)
    return folder


def test_accuracy_and_weights_by_test_set(run: Path) -> None:
    bars, weights = head_figures(read_run(run))
    accuracy = json.loads((run / "summary.json").read_text())["accuracy"]
    for head, score in (("global head", "source"), ("personal head", "local"), ("btfl", "tta")):
        assert f"{head}: {accuracy[score]['per_corruption_mean_clients'][SETS[0]]:.2f} %" in bars.text
    with np.load(run / FILE) as file:
        table, edges = file["histogram"].sum(axis=1), file["edges"]
    for name, row in zip(SETS, table, strict=True):
        mean = sum(count * (a + b) / 2 for count, a, b in zip(row, edges, edges[1:], strict=False)) / row.sum()
        assert f"{name} mean {mean:.2f}" in weights.text
    for figure in (bars, weights):
        assert figure.light.startswith(b"\x89PNG")
        assert figure.light != figure.dark


def test_they_are_in_the_report(run: Path, tmp_path: Path) -> None:
    page, faults = write_report(run, tmp_path)
    assert faults == []
    assert {"sets.png", "sets-dark.png", "weights.png", "weights-dark.png"} <= {p.name for p in tmp_path.iterdir()}
    assert "two heads, btfl" in page.read_text()
    assert "Weight of the global head" in page.read_text()


def test_a_benchmark_has_them_for_each_column(run: Path, tmp_path: Path) -> None:
    table = {
        "name": "heads",
        "title": "Heads",
        "score": "tta",
        "metric": "mean_clients",
        "rows": ["head"],
        "columns": ["partition"],
        "seeds": [0, 1],
        "config": TINY_HEADS,
        "axes": {
            "head": {"FedAvg": {"head": "global"}, "BTFL": {"head": "btfl"}},
            "partition": {"Dir 01": {"tgfl.dirichlet": 0.1}, "Dir 1": {}},
        },
    }
    spec = make_spec(table, "heads.toml")
    open_bench(tmp_path / "bench", spec, table, cells(spec, {}), {}, quick=False)
    ran = ("FedAvg.Dir-01.seed0", "BTFL.Dir-01.seed0", "BTFL.Dir-1.seed0", "BTFL.Dir-1.seed1")
    for cell in (cell for cell in cells(spec, {}) if cell.id in ran):
        own = cell_folder(tmp_path / "bench", cell.id)
        shutil.copytree(run, own)
        about = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps(about | {"config": cell.config}))
    other = cell_folder(tmp_path / "bench", "BTFL.Dir-1.seed1") / "summary.json"
    summary = json.loads(other.read_text())
    accuracy = summary["accuracy"]["tta"]
    here = dict(accuracy["per_corruption_mean_clients"])
    accuracy["per_corruption_mean_clients"] = dict.fromkeys(SETS, 0.0)
    accuracy["mean_clients"] = 0.0
    other.write_text(json.dumps(summary))
    made = {figure.name: figure for figure in head_bench_figures(read_bench(tmp_path / "bench"))}
    assert list(made) == ["sets-1", "sets-2", "weights-1-1", "weights-1-2", "weights-2-2"]
    assert made["sets-1"].text.startswith(f"FedAvg: {here[SETS[0]]:.2f} %")  # rows in their order
    assert made["sets-2"].text.startswith(f"BTFL: {here[SETS[0]] / 2:.2f} %")  # the mean over seeds
    assert made["weights-2-2"].title == "Weight of the global head, by test set: Dir 1: BTFL"
    write_report(tmp_path / "bench", tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert {"accuracy-1.png", "sets-1.png", "weights-2-2-dark.png"} <= names
    assert not any(name.startswith("time") for name in names)
    rows = (tmp_path / "out" / "tables" / "main.csv").read_text().splitlines()
    assert f"{sum(here.values()) / len(here) / 2:.2f}" in rows[2]


@pytest.mark.parametrize("spoilt", ["histogram", "clients", "edges"])
def test_damaged_weights_are_named(run: Path, tmp_path: Path, spoilt: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    with np.load(folder / FILE) as file:
        arrays = dict(file)
    if spoilt == "edges":
        arrays["edges"] = np.full_like(arrays["edges"], np.nan)
    else:
        arrays[spoilt] = np.concatenate([arrays[spoilt]] * 2)
    np.savez_compressed(folder / FILE, **arrays)
    _, faults = write_report(folder, tmp_path / "out")
    assert [fault.partition(" ")[0] for fault in faults] == [FILE]
    assert not (tmp_path / "out" / "weights.png").exists()
    assert (tmp_path / "out" / "sets.png").exists()


def test_without_weights_there_are_bars_alone(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / FILE).unlink()
    assert [figure.name for figure in head_figures(read_run(tmp_path / "run"))] == ["sets"]
