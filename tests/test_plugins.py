"""Code of the user's own that a run config names: imported in time, and recognised when it has changed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr.bench.runner import FILE, _goes_on, cell_folder, open_bench
from fedtta_flwr.bench.spec import cells, make_spec
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.plugins import named, plugin_fingerprints
from fedtta_flwr.records import code_fingerprint
from fedtta_flwr.reports.run_directory import RunDirectory
from fedtta_flwr.resolve import PLUGIN_VARIABLE
from fedtta_flwr.server import check_same
from fedtta_flwr.strategies.checkpoint import FILE as CHECKPOINT

LAB, MODULE = "fedtta_test_lab", "fedtta_test_module"
STRATEGY, STREAM = f"{LAB}.deep.mine:Mine", f"{MODULE}:stream"
TABLE: dict[str, Any] = {
    "name": "own",
    "title": "Own",
    "rows": ["strategy"],
    "columns": [],
    "seeds": [0],
    "axes": {"strategy": {"FedAvg": {"strategy": "fedavg"}, "Mine": {"strategy": STRATEGY}}},
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the user's own, and beside it a module of one file."""
    root = tmp_path / "site" / LAB
    (root / "deep").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "deep" / "mine.py").write_text("class Mine:\n    share = 0.5\n")
    (root / "deep" / ".#mine.py").symlink_to("somebody@somewhere")  # what an editor leaves
    (root.parent / f"{MODULE}.py").write_text("def stream(config, client): ...\n")
    monkeypatch.syspath_prepend(root.parent)
    monkeypatch.setenv(PLUGIN_VARIABLE, f"{LAB},{MODULE}")
    yield root
    for name in [name for name in sys.modules if name.startswith((LAB, MODULE))]:
        del sys.modules[name]


def config(**changes: Any) -> RunConfig:
    return RunConfig.from_flat({"strategy": STRATEGY, "stream": STREAM, "classes": 10} | changes)


def test_only_what_is_not_the_projects_own_is_named() -> None:
    assert named(RunConfig().to_flat()) == plugin_fingerprints(RunConfig().to_flat()) == {}
    assert named({"strategy": "fedavg", "adapter": "a.b:C", "stream": "d:e"}) == {"adapter": "a.b:C", "stream": "d:e"}


def test_a_fingerprint_is_of_the_whole_package_or_the_one_file_and_imports_nothing(lab: Path) -> None:
    flat = config().to_flat()
    before = plugin_fingerprints(flat)
    assert list(before) == [LAB, MODULE]
    assert all(before.values())
    (lab / "deep" / "notes.txt").write_text("no code")
    (lab.parent / "other.py").write_text("")  # beside the module
    assert plugin_fingerprints(flat) == before
    (lab / "deep" / "mine.py").write_text("class Mine:\n    share = 0.25\n")
    (lab.parent / f"{MODULE}.py").write_text("def stream(config, client): return\n")
    after = plugin_fingerprints(flat)
    assert all(after[package] not in ("", before[package]) for package in (LAB, MODULE))
    assert not {LAB, MODULE} & set(sys.modules)
    assert plugin_fingerprints({"adapter": "fedtta_test_nowhere:A"}) == {"fedtta_test_nowhere": ""}


def test_the_run_directory_holds_them(lab: Path, tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").on_start(config(), ("client-00",), 1)
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["plugins"] == plugin_fingerprints(config().to_flat())
    assert about["code"] == code_fingerprint()


def test_a_resumed_run_of_other_code_is_warned_of(lab: Path, tmp_path: Path, warned: list[str]) -> None:
    RunDirectory(tmp_path / "run").on_start(config(), ("client-00",), 1)
    check_same(tmp_path / "run", config())
    assert warned == []
    (lab / "new.py").write_text("")
    check_same(tmp_path / "run", config())
    (line,) = warned
    assert f"written by other code of {LAB} than this" in line


def test_a_benchmark_tells_runs_of_other_code_of_ones_own(lab: Path, tmp_path: Path) -> None:
    spec, folder = make_spec(TABLE, "own.toml"), tmp_path / "out"
    own = cells(spec, {})
    assert [cell.id for cell in open_bench(folder, spec, TABLE, own, {}, quick=False)[0]] == [c.id for c in own]
    for cell in own:
        RunDirectory(cell_folder(folder, cell.id)).on_start(RunConfig.from_flat(cell.config), ("client-00",), 1)
        (cell_folder(folder, cell.id) / "summary.json").write_text('{"finished": true}')
        (cell_folder(folder, cell.id) / CHECKPOINT).write_bytes(b"")
    assert open_bench(folder, spec, TABLE, own, {}, quick=False) == ([], [])
    assert [_goes_on(cell_folder(folder, cell.id), cell) for cell in own] == [True, True]
    (lab / "deep" / "mine.py").write_text("class Mine:\n    share = 0.25\n")
    assert open_bench(folder, spec, TABLE, own, {}, quick=False) == ([], ["Mine.seed0"])
    assert [_goes_on(cell_folder(folder, cell.id), cell) for cell in own] == [True, False]
    assert json.loads((folder / FILE).read_text())["code"] == code_fingerprint()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": f"{LAB}.deep.mine:Mien"}, f"own, cell Wrong.seed0: strategy = '{LAB}.deep.mine:Mien': cannot be"),
        ({"adapter": f"{LAB}.shallow:Mine"}, f"own, cell Wrong.seed0: adapter = '{LAB}.shallow:Mine': cannot be"),
        ({"stream": f"{MODULE}:steram", "classes": 2}, f"own, cell Wrong.seed0: stream = '{MODULE}:steram': cannot be"),
        ({"stream": "os:getcwd", "classes": 2}, "importing package 'os' is not allowed here"),
    ],
)
def test_a_misspelt_name_is_refused_before_anything_runs(lab: Path, changes: dict[str, Any], words: str) -> None:
    points = TABLE["axes"]["strategy"]
    assert len(cells(make_spec(TABLE, "own.toml"), {})) == 2
    with pytest.raises(ConfigError) as caught:
        cells(make_spec(TABLE | {"axes": {"strategy": points | {"Wrong": changes}}}, "own.toml"), {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
