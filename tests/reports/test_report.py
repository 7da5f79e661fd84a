"""Reports of real runs: a benchmark with what can go wrong in one, and a single run."""

import itertools
import json
import math
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr import cli
from fedtta_flwr.bench.runner import FILE, cell_folder, open_bench
from fedtta_flwr.bench.spec import cells, make_spec
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.launch import run_local
from fedtta_flwr.reports.of_run import METRICS
from fedtta_flwr.reports.of_within import positions
from fedtta_flwr.reports.read import Run, read_bench, read_run
from fedtta_flwr.reports.report import WRITTEN, write_report
from tests.conftest import TINY
from tests.reports.conftest import table

HOSTILE = "<script>alert(1)</script>"
SPEC: dict[str, Any] = {
    "name": "four",
    "title": f"Four {HOSTILE}",
    "rows": ["strategy"],
    "columns": ["setting"],
    "seeds": [0, 1],
    "config": TINY | {"scores": "tta,post", "slots-per-corruption": 3, "shift-length": 3},
    "axes": {
        "setting": {"NIID": {"spatial-heterogeneity": 0.5}, "IID": {"spatial-heterogeneity": 0.25}},
        "strategy": {
            "Local": {"strategy": "local"},
            "FedAvg": {"strategy": "fedavg"},
            "FedTSA": {"strategy": "fedtsa"},
        },
    },
    "skip": [{"strategy": "FedTSA", "setting": "IID"}],
    "published": [
        {"at": {"setting": "NIID"}, "over": "strategy", "values": {"Local": 64.65}, "note": HOSTILE},
        {"at": {"setting": "NIID"}, "over": "strategy", "values": {"FedAvg": 61.45}, "flag": "invalid"},
    ],
    "claims": [
        {"text": "local first", "better": {"strategy": "Local"}, "than": {"strategy": "FedAvg"}},
        {
            "text": "by far",
            "better": {"strategy": "FedAvg", "setting": "IID"},
            "than": {"strategy": "Local"},
            "by": 99.0,
        },
        {"text": "never run", "better": {"strategy": "FedTSA"}, "than": {"strategy": "Local"}},
        {"text": "of a gap", "better": {"strategy": "FedTSA", "setting": "IID"}, "than": {"strategy": "Local"}},
    ],
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cells but FedTSA's, of which one has never begun and one is broken."""
    folder = tmp_path_factory.mktemp("bench")
    spec = make_spec(SPEC, "spec.toml")
    for cell in open_bench(folder, spec, SPEC, cells(spec, {}), {}, quick=False)[0]:
        if cell.labels["strategy"] != "FedTSA":
            run_local(cell.config | {"output-dir": str(cell_folder(folder, cell.id))}, nodes=1)
    broken = cell_folder(folder, "NIID.FedTSA.seed0")
    shutil.copytree(cell_folder(folder, "NIID.Local.seed0"), broken)
    (broken / "summary.json").write_text("{")
    return folder


def accuracy(bench: Path, cell: str, score: str = "post", metric: str = "micro") -> float:
    summary = json.loads((cell_folder(bench, cell) / "summary.json").read_text())
    return float(summary["accuracy"][score][metric])


@pytest.fixture(scope="module")
def written(bench: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("report")
    page, faults = write_report(bench, output)
    assert page == output / "report.html"
    assert len(faults) == 2
    return output


def test_the_main_table(bench: Path, written: Path) -> None:
    rows = {row["strategy"]: row for row in table(written, "main")}
    assert list(rows) == ["Local", "FedAvg", "FedTSA"]
    values = [accuracy(bench, f"NIID.Local.seed{seed}") for seed in (0, 1)]
    assert float(rows["Local"]["NIID"]) == pytest.approx(statistics.mean(values), abs=0.006)
    assert float(rows["Local"]["NIID std"]) == pytest.approx(statistics.stdev(values), abs=0.006)
    assert rows["Local"]["NIID published"] == "64.65"
    assert float(rows["Local"]["NIID Δ"]) == pytest.approx(statistics.mean(values) - 64.65, abs=0.006)
    assert rows["FedAvg"]["NIID published"] == "61.45"
    assert rows["FedAvg"]["NIID Δ"] == ""  # an invalid figure is no target
    assert rows["FedTSA"]["NIID"] == rows["FedTSA"]["IID"] == ""
    assert "IID published" not in rows["Local"]
    text = (written / "tables" / "main.md").read_text()
    assert "61.45!" in text
    assert "standard deviation over 2 seeds." in text  # of what has run


def test_figures_of_what_is_never_run_are_there_and_what_several_codes_have_made_is_named(
    bench: Path, tmp_path: Path
) -> None:
    shutil.copytree(bench, tmp_path / "bench")
    about = json.loads((bench / FILE).read_text())
    about["spec"]["axes"]["strategy"] |= {name: {"strategy": "fedprox"} for name in ("FedProx", "Unheard")}
    about["spec"]["skip"] += [{"strategy": "FedProx"}, {"strategy": "Unheard"}]
    about["spec"]["published"].append({"at": {"setting": "NIID"}, "over": "strategy", "values": {"FedProx": 9.5}})
    (tmp_path / "bench" / FILE).write_text(json.dumps(about))
    config = cell_folder(tmp_path / "bench", "NIID.FedAvg.seed1") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"plugins": {"mine": "0123"}}))
    write_report(tmp_path / "bench", tmp_path / "report")
    rows = {row["strategy"]: row for row in table(tmp_path / "report", "main")}
    assert list(rows) == ["Local", "FedAvg", "FedTSA", "FedProx"]
    assert (rows["FedProx"]["NIID"], rows["FedProx"]["NIID published"]) == ("", "9.50")
    text = (tmp_path / "report" / "tables" / "main.md").read_text()
    assert "Over runs of several versions of your own code: FedAvg NIID." in text.replace("NIID FedAvg", "FedAvg NIID")
    assert "several versions" not in (tmp_path / "report" / "tables" / "post-macro.md").read_text()


def test_the_other_metrics(bench: Path, written: Path) -> None:
    for name, score, metric in (("tta-micro", "tta", "micro"), ("post-macro", "post", "macro")):
        row = next(row for row in table(written, name) if row["strategy"] == "FedAvg")
        values = [accuracy(bench, f"IID.FedAvg.seed{seed}", score, metric) for seed in (0, 1)]
        assert float(row["IID"]) == pytest.approx(statistics.mean(values), abs=0.006)


def test_every_run_is_there_unrounded(bench: Path, written: Path) -> None:
    """But for those that have not finished."""
    rows = table(written, "runs")
    for setting, strategy, seed in itertools.product(("NIID", "IID"), ("Local", "FedAvg"), (0, 1)):
        own = [r for r in rows if (r["setting"], r["strategy"], r["seed"]) == (setting, strategy, str(seed))]
        found = {(row["score"], row["metric"]): float(row["value"]) for row in own}
        cell = f"{setting}.{strategy}.seed{seed}"
        for score, metric in itertools.product(("tta", "post"), METRICS):
            assert found.pop((score, metric)) == accuracy(bench, cell, score, metric)
        summary = json.loads((cell_folder(bench, cell) / "summary.json").read_text())
        assert found[("", "bytes up")] == summary["bytes"]["up"]
        assert found[("", "client s")] == summary["seconds"]["client"] / summary["rounds"]
        assert {score for score, _ in found} == {""}
    assert {row["strategy"] for row in rows} == {"Local", "FedAvg"}
    assert not (written / "tables" / "runs.md").exists()


def test_claims(bench: Path, written: Path) -> None:
    found = table(written, "claims")
    assert [(row["claim"], row["where"]) for row in found] == [
        ("local first", "setting NIID"),
        ("local first", "setting IID"),
        ("by far", ""),
        ("never run", "setting NIID"),
        ("of a gap", ""),
    ]
    pairs = [
        [accuracy(bench, f"{setting}.Local.seed{s}") - accuracy(bench, f"{setting}.FedAvg.seed{s}") for s in (0, 1)]
        for setting in ("NIID", "IID")
    ]
    for row, differences in zip(found, pairs, strict=False):
        mean, std = statistics.mean(differences), statistics.stdev(differences)
        assert float(row["difference"]) == pytest.approx(mean, abs=0.006)
        assert row["verdict"].startswith("holds" if mean > 0 else "does not hold")
        chance = 1 - 2 / math.pi * math.atan(abs(mean) / (std / math.sqrt(2)))  # of Student's t, with two seeds
        assert ("within the spread" in row["verdict"]) == (chance > 0.05)
    assert found[2]["verdict"] == "does not hold"
    assert [(row["verdict"], row["difference"]) for row in found[3:]] == [("not run", "")] * 2
    assert [row["claimed"] for row in found] == ["> 0", "> 0", "≥ 99", "> 0", "> 0"]
    assert [row["seeds"] for row in found] == ["2", "2", "2", "0", "0"]


def test_what_is_missing_is_named(written: Path) -> None:
    found = {row["run"]: row["why"] for row in table(written, "missing")}
    assert set(found) == {"NIID.FedTSA.seed0", "NIID.FedTSA.seed1"}
    assert "damaged" in found["NIID.FedTSA.seed0"]
    assert found["NIID.FedTSA.seed1"] == "has not been run"


def test_positions_are_counted_from_shift_to_shift(bench: Path, written: Path) -> None:
    """In NIID, one group sees contrast first and the other pixelate: three rounds each."""
    run = read_run(cell_folder(bench, "NIID.FedAvg.seed0"))
    assert run.timeline is not None
    post = run.timeline["scores"].tolist().index("post")
    correct = run.timeline["correct"][post].sum(axis=1)
    assert positions(run, "post") == [100 * correct[:3].sum() / 60, 100 * correct[3:].sum() / 60]  # 4 clients x 3 x 5
    row = next(r for r in table(written, "by-position") if (r["setting"], r["strategy"]) == ("NIID", "FedAvg"))
    every = [positions(read_run(cell_folder(bench, f"NIID.FedAvg.seed{s}")), "post")[1] for s in (0, 1)]
    assert float(row["2"]) == pytest.approx(np.mean([v for v in every if v is not None]), abs=0.006)


def test_positions_are_of_each_clients_own_shifts() -> None:
    """Clients that shift after two rounds and after one."""
    timeline = {
        "scores": np.array(["post"]),
        "rounds": np.arange(1, 5),
        "domain": np.array([[0, 0], [0, 1], [1, 1], [1, 1]]),
        "seen": np.full((1, 4, 2), 10),
        "correct": np.array([[[1, 5], [2, 6], [3, 7], [4, 8]]]),
    }
    run = Run(Path(), {}, {}, {}, [], timeline)
    assert positions(run, "post") == pytest.approx([100 * (1 + 2 + 5) / 30, 100 * (3 + 4 + 6 + 7 + 8) / 50])


def test_costs(bench: Path, written: Path) -> None:
    row = next(r for r in table(written, "costs") if (r["setting"], r["strategy"]) == ("IID", "FedAvg"))
    summaries = [json.loads((cell_folder(bench, f"IID.FedAvg.seed{s}") / "summary.json").read_text()) for s in (0, 1)]
    per_round = statistics.mean(s["seconds"]["client"] / s["rounds"] for s in summaries)
    assert float(row["client s"]) == pytest.approx(per_round, abs=0.0006)
    assert float(row["bytes up"]) == pytest.approx(summaries[0]["bytes"]["up"], abs=0.6)
    assert float(row["client MiB"]) > 100
    assert "CUDA MiB" not in row  # there is none


def test_the_page_is_one_file_and_escaped(written: Path) -> None:
    page = (written / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert not re.search(r"(src|href|srcset)=\"(?!data:|#)", page)
    assert "default-src 'none'" in page
    names = {path.name for path in written.iterdir()}
    assert {"accuracy-1.png", "accuracy-1-dark.png", "within-1.png", "time-1.png", "time-2-dark.png"} <= names
    dark = {path.name.removesuffix("-dark.png") for path in written.glob("*-dark.png")}
    assert {path.stem for path in written.glob("*.pdf")} == dark  # and a vector figure of each
    listed = json.loads((written / WRITTEN).read_text())
    assert {name for name in names if name.endswith((".png", ".pdf"))} < set(listed)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written.glob("*.png"))


def test_a_single_run(bench: Path, tmp_path: Path) -> None:
    page, faults = write_report(cell_folder(bench, "NIID.FedAvg.seed0"), tmp_path)
    assert faults == []
    assert {row["score"] for row in table(tmp_path, "accuracy")} == {"tta", "post"}
    assert len(table(tmp_path, "per-client")) == 4
    assert [row["class"] for row in table(tmp_path, "per-class")][:10] == list("0123456789")
    row = table(tmp_path, "per-class")[3]
    run = json.loads((cell_folder(bench, "NIID.FedAvg.seed0") / "summary.json").read_text())
    counts = run["accuracy"]["post"]["per_class"]
    if counts["seen"][3]:
        assert float(row["post"]) == pytest.approx(100 * counts["correct"][3] / counts["seen"][3], abs=0.006)
    (mean, *rows), entry = table(tmp_path, "major-and-minor"), run["accuracy"]["post"]["major_minor"]
    assert [row["client or corruption"] for row in rows] == [*entry["classes"], "contrast", "pixelate"]
    for row, (client, classes) in zip(rows, entry["classes"].items(), strict=False):
        assert [row["major"], row["minor"]] == [str(k) for k in classes]
        assert float(row["post minor"]) == pytest.approx(entry["per_client"][client][1], abs=0.006)
    majors = [major for major, _ in entry["per_client"].values()]
    assert mean["client or corruption"] == "mean of clients"
    assert float(mean["post major"]) == pytest.approx(statistics.mean(majors), abs=0.006)
    assert "client-00 and 1 more" in read_groups(cell_folder(bench, "NIID.FedAvg.seed0"))
    assert page.stat().st_size < 2_000_000


def read_groups(path: Path) -> list[str]:
    from fedtta_flwr.reports.figures import group_name

    run = read_run(path)
    assert [len(group) for group in run.groups()] == [2, 2]
    return [group_name(run, group) for group in run.groups()]


def test_a_run_without_labels_or_with_broken_files_has_a_report_too(bench: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(cell_folder(bench, "IID.Local.seed1"), folder)
    (folder / "timeline.npz").write_bytes(b"PK\x03\x04 no archive")
    (folder / "collaboration.npz").unlink()
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 9')
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"accuracy": {}, "collaboration": None, "memory": None}))
    _, faults = write_report(folder, tmp_path / "out")
    assert [fault.split()[0] for fault in faults] == ["rounds.jsonl:", "timeline.npz", "collaboration.npz"]
    assert {path.stem for path in (tmp_path / "out" / "tables").iterdir()} == {"costs"}


def test_a_run_without_labels_shows_how_sure_its_clients_were(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_local(TINY | {"scores": "", "aggregate-every": 2, "output-dir": str(path)}, nodes=1)
    page, _ = write_report(path, tmp_path / "out")
    rows = table(tmp_path / "out", "confidence")
    with np.load(path / "timeline.npz") as file:
        found = file["confidence"]
    assert found.shape == (2, 4)
    for row, column in zip(rows, found.T.tolist(), strict=True):
        expected = (sum(column) / 2, min(column), column[1], column[1] - column[0])
        assert [float(text) for text in list(row.values())[1:-1]] == [pytest.approx(v, abs=0.0006) for v in expected]
        assert row["in round"] == "2"
    text = page.read_text()
    assert text.index(">Results</h2>") < text.index("Mean probability of what was") < text.index(">Over time</h2>")
    assert (tmp_path / "out" / "time-confidence.pdf").exists()


def test_without_matplotlib_only_the_figures_are_missing(
    bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _, faults = write_report(bench, tmp_path)
    assert "pip install -e '.[plots]'" in faults[0]
    assert list(tmp_path.glob("*.png")) == []
    assert table(tmp_path, "main")


def test_neither_a_run_nor_a_benchmark(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run directory, config\.json is absent"):
        write_report(tmp_path, tmp_path / "out")
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(ConfigError, match="damaged"):
        write_report(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written(bench: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*file/out: cannot be written"):
        write_report(bench, tmp_path / "file" / "out")
    assert len(read_bench(bench).cells) == 10


def test_the_command(
    bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes into the directory itself, may do so again, and a report in it is no part of the next one."""
    folder = tmp_path / "run"
    shutil.copytree(cell_folder(bench, "NIID.Local.seed0"), folder)
    texts = []
    for _ in range(2):
        assert call(monkeypatch, "report", str(folder)) == 0
        assert capsys.readouterr().out.split() == [str(folder / "report" / "report.html")]
        texts.append((folder / "report" / "report.html").read_text())
    assert texts[0] == texts[1]
    assert not list((folder / "report").rglob(".*"))  # nothing half written is left
    (folder / "timeline.npz").unlink()
    assert call(monkeypatch, "report", str(folder), "--output", str(tmp_path / "other")) == 0
    assert "not in the report: timeline.npz is absent" in capsys.readouterr().out
    assert "<li>timeline.npz is absent</li>" in (tmp_path / "other" / "report.html").read_text()
    assert call(monkeypatch, "report", str(tmp_path / "nowhere")) == 2
    assert "no run directory, config.json is absent" in capsys.readouterr().err


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["fedtta", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)
