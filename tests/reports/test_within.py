"""Tables by corruption, position, class and client, beside what was published, of real runs."""

import dataclasses
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr.bench.runner import FILE, cell_folder, open_bench
from fedtta_flwr.bench.spec import Published, cells, make_spec
from fedtta_flwr.launch import run_local
from fedtta_flwr.reports import of_within
from fedtta_flwr.reports.of_within import tables_within
from fedtta_flwr.reports.read import read_bench
from fedtta_flwr.reports.report import WRITTEN, write_report
from tests.conftest import TINY
from tests.reports.conftest import table

SPEC: dict[str, Any] = {
    "name": "lengths",
    "title": "Lengths",
    "rows": ["length"],
    "columns": [],
    "seeds": [0, 1],
    "config": TINY | {"scores": "post", "num-clients": 2, "strategy": "fedavg"},
    "axes": {"length": {"2": {"shift-length": 2}, "1": {"shift-length": 1}}},
    "published": [
        {"at": {"length": "2"}, "over": "position", "values": {"1": 50.0, "2": 60.0, "9": 1.0}, "flag": "doubtful"},
        {"at": {"length": "1"}, "over": "corruption", "values": {"pixelate": 70.0}, "note": "why"},
        {"at": {"length": "1"}, "over": "class", "values": {"3": 40.0}, "flag": "invalid"},
        {"at": {}, "over": "client", "values": {"client-01": 30.0}},
    ],
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cell with 2 positions, one with 4; the second with one seed only, the other of which failed."""
    folder = tmp_path_factory.mktemp("bench")
    spec = make_spec(SPEC, "spec.toml")
    for cell in open_bench(folder, spec, SPEC, cells(spec, {}), {}, quick=False)[0]:
        if cell.id != "1.seed1":
            run_local(cell.config | {"output-dir": str(cell_folder(folder, cell.id))}, nodes=1)
    (folder / "cells" / "1.seed1.log").write_text("it began\nerror: it was too hot\n\n")
    return folder


@pytest.fixture(scope="module")
def written(bench: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("report")
    write_report(bench, output)
    return output


def arrays(bench: Path, cell: str) -> dict[str, Any]:
    with np.load(cell_folder(bench, cell) / "timeline.npz") as file:
        return dict(file)


def of(bench: Path, cell: str) -> dict[str, Any]:
    accuracy: dict[str, Any] = json.loads((cell_folder(bench, cell) / "summary.json").read_text())["accuracy"]["post"]
    return accuracy


def test_cells_with_other_numbers_of_positions_share_a_table(bench: Path, written: Path) -> None:
    rows = table(written, "by-position")
    assert [(row["length"], row["what"]) for row in rows] == [
        ("2", "here"),
        ("2", "published"),
        ("2", "Δ"),
        ("1", "here"),
    ]
    assert rows[0]["3"] == rows[0]["4"] == ""
    for length, name, rounds in (("2", "2", [2, 3]), ("1", "3", [2])):  # position 3 of runs of one round: the third
        values = []
        for seed in (0, 1) if length == "2" else (0,):
            there = arrays(bench, f"{length}.seed{seed}")
            seen = sum(int(there["seen"][0, r, i]) for r in rounds for i in range(2))
            values.append(100 * sum(int(there["correct"][0, r, i]) for r in rounds for i in range(2)) / seen)
        row = next(row for row in rows if (row["length"], row["what"]) == (length, "here"))
        assert float(row[name]) == pytest.approx(statistics.mean(values), abs=0.006)
        assert row.get(f"{name} std", "") == (f"{statistics.stdev(values):.2f}" if len(values) > 1 else "")
    assert rows[1]["2"] == "60.00"
    assert float(rows[2]["2"]) == pytest.approx(float(rows[0]["2"]) - 60, abs=0.011)
    assert "60.00?" in (written / "tables" / "by-position.md").read_text()


def test_corruptions(bench: Path, written: Path) -> None:
    rows = table(written, "by-corruption")
    accuracy = of(bench, "1.seed0")["per_corruption"]
    here, theirs, difference = (row for row in rows if row["length"] == "1")
    assert float(here["pixelate"]) == pytest.approx(accuracy["pixelate"], abs=0.006)
    assert (theirs["pixelate"], theirs["contrast"], difference["contrast"]) == ("70.00", "", "")
    assert float(difference["pixelate"]) == pytest.approx(accuracy["pixelate"] - 70, abs=0.006)
    assert "Published (1): why." in (written / "tables" / "by-corruption.md").read_text()


def test_an_axis_called_client_is_the_main_tables_alone(bench: Path) -> None:
    found = read_bench(bench)
    axis = {"axes": {"client": found.spec.axes["length"]}, "rows": ["client"], "columns": []}
    figures = [Published(over="client", values={"1": 60.0})]
    spec = found.spec.model_copy(update=axis | {"published": figures})
    renamed = [dataclasses.replace(cell, labels={"client": cell.labels["length"]}) for cell in found.cells]
    made = dataclasses.replace(found, spec=spec, cells=renamed)
    (by_client,) = (one for one in tables_within(made) if one.name == "by-client")
    assert len(by_client.rows) == 2  # no row of published figures, which are of other clients
    assert not by_client.notes


def test_by_corruption_and_client_macro_where_the_spec_is(bench: Path) -> None:
    found = read_bench(bench)
    macro = found.spec.model_copy(update={"metric": "macro_all_classes"})
    tables = {made.name: made for made in tables_within(dataclasses.replace(found, spec=macro))}
    for within, key, name in (("corruption", "per_corruption", "pixelate"), ("client", "per_client", "client-01")):
        made = tables[f"by-{within}"]
        (row,) = [row for row in made.rows if row[:2] == ["1", "here"]] or [row for row in made.rows if row[0] == "1"]
        value = of(bench, "1.seed0")[f"{key}_macro_all_classes"][name]
        assert float(row[made.columns.index(name)]) == pytest.approx(value, abs=0.006)
        assert "macro, all K classes" in made.title
    assert "micro" in tables["by-class"].title


def test_a_run_of_another_config_is_not_averaged_with_the_rest(bench: Path, tmp_path: Path) -> None:
    shutil.copytree(bench, tmp_path / "bench")
    path = cell_folder(tmp_path / "bench", "2.seed1") / "config.json"
    about = json.loads(path.read_text())
    about["config"]["batch-size"] = 77
    path.write_text(json.dumps(about))
    found = {cell.id: cell for cell in read_bench(tmp_path / "bench").cells}
    assert found["2.seed0"].run is not None
    assert found["2.seed1"].run is None
    assert found["2.seed1"].fault.startswith("was run with batch-size = 77, the benchmark has ")


def test_an_earlier_report_leaves_nothing_behind(bench: Path, tmp_path: Path) -> None:
    write_report(bench, tmp_path / "report")
    listed = tmp_path / "report" / WRITTEN
    of_an_earlier_one = ("tables/gone.csv", "time-9-dark.png", "time-9.pdf")
    mine = ("time-line.png", "tables/ablation.tex", "my.csv")
    for name in (*of_an_earlier_one, *mine):
        (tmp_path / "report" / name).write_text("")
    (tmp_path / "elsewhere.png").write_text("")
    foreign = ["../elsewhere.png", str(tmp_path / "elsewhere.png"), "my.csv", 3]
    listed.write_text(json.dumps([*json.loads(listed.read_text()), *of_an_earlier_one, *foreign]))
    write_report(bench, tmp_path / "report")
    assert not [name for name in of_an_earlier_one if (tmp_path / "report" / name).exists()]
    assert all((tmp_path / "report" / name).exists() for name in (*mine, "../elsewhere.png"))
    assert "tables/main.csv" in json.loads(listed.read_text())


def test_a_row_of_figures_that_can_be_trusted_to_a_different_degree(bench: Path, tmp_path: Path) -> None:
    shutil.copytree(bench, tmp_path / "bench")
    about = json.loads((bench / FILE).read_text())
    at: dict[str, Any] = {"at": {"length": "2"}, "over": "corruption"}
    about["spec"]["published"] = [
        at | {"values": {"pixelate": 70.0}, "note": "why"},
        at | {"values": {"contrast": 40.0}, "flag": "doubtful", "note": "why not"},
        {"at": {}, "over": "corruption", "values": {"pixelate": 1.0, "contrast": 3.0}, "flag": "invalid"},
    ]
    (tmp_path / "bench" / FILE).write_text(json.dumps(about))
    write_report(tmp_path / "bench", tmp_path / "report")
    _, theirs, difference = (row for row in table(tmp_path / "report", "by-corruption") if row["length"] == "2")
    assert [theirs[name] for name in ("pixelate", "contrast")] == ["70.00", "40.00"]
    assert theirs["contrast mark"] == "?"
    assert difference["contrast"] != ""
    text = (tmp_path / "report" / "tables" / "by-corruption.md").read_text()
    assert "Published (2): why." in text
    assert "Published (2): why not." in text


def test_a_published_figure_without_a_column_is_named(bench: Path, tmp_path: Path) -> None:
    shutil.copytree(bench, tmp_path / "bench")
    about = json.loads((bench / FILE).read_text())
    about["spec"]["published"] = [{"at": {}, "over": "class", "values": {"3": 4.0, "C0": 5.0, "cat": 6.0}}]
    (tmp_path / "bench" / FILE).write_text(json.dumps(about))
    write_report(tmp_path / "bench", tmp_path / "report")
    text = (tmp_path / "report" / "tables" / "by-class.md").read_text()
    assert "Published, and not here: C0, cat." in text


def test_classes_and_clients(bench: Path, written: Path) -> None:
    counts = of(bench, "1.seed0")["per_class"]
    here, theirs, difference = (row for row in table(written, "by-class") if row["length"] == "1")
    for k, (seen, correct) in enumerate(zip(counts["seen"], counts["correct"], strict=True)):
        assert here[str(k)] == (f"{100 * correct / seen:.2f}" if seen else "")
    assert theirs["3"] == "40.00"
    assert difference["3"] == ""  # an invalid figure is no target
    rows = table(written, "by-client")
    values = [of(bench, f"2.seed{seed}")["per_client"]["client-01"] for seed in (0, 1)]
    assert float(rows[0]["client-01"]) == pytest.approx(statistics.mean(values), abs=0.006)
    assert float(rows[2]["client-01"]) == pytest.approx(statistics.mean(values) - 30, abs=0.006)


def test_major_and_minor_classes_of_the_clients(bench: Path, written: Path) -> None:
    found = [of(bench, f"2.seed{seed}")["major_minor"] for seed in (0, 1)]
    rows = [row for row in table(written, "major-and-minor") if row["length"] == "2"]
    clients = [row for row in table(written, "major-and-minor-by-client") if row["length"] == "2"]
    assert [row["class"] for row in rows] == [row["class"] for row in clients] == ["major", "minor"]
    for part in (0, 1):
        means = [statistics.mean(pair[part] for pair in one["per_client"].values()) for one in found]
        assert float(rows[part]["mean of clients"]) == pytest.approx(statistics.mean(means), abs=0.006)
        assert float(rows[part]["mean of clients std"]) == pytest.approx(statistics.stdev(means), abs=0.006)
        for key, there, name in (("per_corruption", rows, "pixelate"), ("per_client", clients, "client-01")):
            values = [value for one in found if (value := one[key][name][part]) is not None]
            assert float(there[part][name]) == pytest.approx(statistics.mean(values), abs=0.006)


def test_means_over_clients(bench: Path, written: Path) -> None:
    row = table(written, "clients")[0]
    for key, name in (
        ("per_client", "mean of clients"),
        ("per_client_macro_all_classes", "mean of clients' macro, all K"),
    ):
        values = [statistics.mean(of(bench, f"2.seed{seed}")[key].values()) for seed in (0, 1)]
        assert float(row[name]) == pytest.approx(statistics.mean(values), abs=0.006)


def test_fewer_seeds_and_failures_are_named(written: Path) -> None:
    text = (written / "tables" / "main.md").read_text()
    assert "over up to 2 seeds." in text
    assert "With 1 of 2 seeds only: 1." in text
    (row,) = table(written, "missing")
    assert row == {
        "run": "1.seed1",
        "why": "did not get as far as its first round; its log ends: error: it was too hot",
    }
    assert "it was too hot" in (written / "report.html").read_text()


def test_a_cell_with_too_many_columns_is_left_out_and_that_is_said(
    bench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_within, "MOST", 3)
    found = next(one for one in tables_within(read_bench(bench)) if one.name == "by-position")
    assert [row[0] for row in found.rows] == ["2", "2", "2"]
    assert "1 cells with more than 3 columns are left out." in found.notes
