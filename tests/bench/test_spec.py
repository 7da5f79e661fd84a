"""The spec of a benchmark: which cells it makes, what goes before what, and what is wrong with one that is wrong."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr.bench.spec import Cell, Spec, cells, make_spec, read_spec
from fedtta_flwr.errors import ConfigError

SPEC = """
name = "small"
title = "Small"
rows = ["strategy"]
columns = ["setting"]
seeds = [0, 1]
[config]
adapter = "bn-stats"
batch-size = 10
entropy = { learning-rate = 0.5 }
[axes.setting]
"SH 0.5" = { spatial-heterogeneity = 0.5, batch-size = 20, entropy = { loss = "hard-pl" } }
IID = { spatial-heterogeneity = 0.05 }
[axes.strategy]
No-Adapt = { strategy = "local", adapter = "source" }
FedAvg = { strategy = "fedavg", batch-size = 30 }
FedProx = { strategy = "fedprox" }
[[skip]]
strategy = ["FedProx", "FedAvg"]
setting = "IID"
[[published]]
at = { setting = "IID" }
over = "strategy"
values = { FedAvg = 50.0 }
[[claims]]
text = "one"
better = { strategy = "FedAvg" }
than = { strategy = "No-Adapt" }
[quick]
seeds = [7]
shift-length = 4
entropy = { learning-rate = 0.25 }
"""


def table(**changes: Any) -> dict[str, Any]:
    return tomllib.loads(SPEC) | changes


def spec(**changes: Any) -> Spec:
    return make_spec(table(**changes), "small.toml")


def by_id(made: tuple[Cell, ...]) -> dict[str, Cell]:
    found = {cell.id: cell for cell in made}
    assert len(found) == len(made)
    return found


def test_a_cell_is_every_combination_that_is_not_skipped_with_every_seed() -> None:
    made = cells(spec(), {})
    # seed after seed; in a seed, the first axis is the slowest
    per_seed = ["SH-0.5.No-Adapt", "SH-0.5.FedAvg", "SH-0.5.FedProx", "IID.No-Adapt"]
    assert [cell.id for cell in made] == [f"{name}.seed{seed}" for seed in (0, 1) for name in per_seed]
    assert made[1].labels == {"setting": "SH 0.5", "strategy": "FedAvg"}
    assert [cell.seed for cell in made] == [cell.config["seed"] for cell in made] == [0] * 4 + [1] * 4


def test_a_later_axis_goes_before_an_earlier_one_and_that_before_the_config() -> None:
    made = by_id(cells(spec(), {}))
    assert made["SH-0.5.FedAvg.seed0"].config["batch-size"] == 30
    assert made["SH-0.5.FedProx.seed0"].config["batch-size"] == 20
    assert made["IID.No-Adapt.seed0"].config["batch-size"] == 10
    assert made["IID.No-Adapt.seed0"].config["adapter"] == "source"
    assert made["SH-0.5.FedAvg.seed0"].config["adapter"] == "bn-stats"


def test_a_point_changes_single_keys_of_a_table() -> None:
    made = by_id(cells(spec(), {}))
    there, elsewhere = made["SH-0.5.FedAvg.seed0"].config, made["IID.No-Adapt.seed0"].config
    assert (there["entropy.learning-rate"], there["entropy.loss"]) == (0.5, "hard-pl")
    assert (elsewhere["entropy.learning-rate"], elsewhere["entropy.loss"]) == (0.5, "entropy")


def test_quick_goes_before_the_config_and_overrides_before_all() -> None:
    quick = by_id(cells(spec(), {}, quick=True))
    assert {cell.seed for cell in quick.values()} == {7}
    assert {cell.config["shift-length"] for cell in quick.values()} == {4}
    assert quick["SH-0.5.FedAvg.seed7"].config["entropy.learning-rate"] == 0.25
    assert quick["SH-0.5.FedAvg.seed7"].config["entropy.loss"] == "hard-pl"
    changed = cells(spec(), {"shift-length": 2, "entropy.optimizer": "adam"}, quick=True)
    assert {(cell.config["shift-length"], cell.config["entropy.optimizer"]) for cell in changed} == {(2, "adam")}


@pytest.mark.parametrize(
    ("taken", "names"),
    [
        ({"strategy": "fedavg"}, "strategy = 'fedavg': the axis strategy varies it, at No-Adapt"),
        ({"adapter": "tent"}, "adapter = 'tent': the axis strategy varies it, at No-Adapt"),  # one point alone has it
        ({"entropy.loss": "entropy"}, "entropy.loss = 'entropy': the axis setting varies it, at SH 0.5"),
    ],
)
def test_overrides_set_nothing_that_an_axis_varies(taken: dict[str, Any], names: str) -> None:
    """Else a cell would stand in the tables under the name of a point that it is not."""
    with pytest.raises(ConfigError) as caught:
        cells(spec(), taken)
    assert str(caught.value).startswith(f"small: --run-config: {names}; leave it out (`--only ")
    assert "\n" not in str(caught.value)


def test_nor_does_quick() -> None:
    axes = {"setting": {"a": {"shift-length": 1}, "b": {"shift-length": 4}}, "strategy": {"FedAvg": {}}}
    changed = spec(axes=axes, skip=[], published=[], claims=[], quick={"shift-length": 2})
    assert len(cells(changed, {})) == 4
    with pytest.raises(ConfigError, match=r"small: quick: shift-length = 2: the axis setting varies it, at a"):
        cells(changed, {}, quick=True)


def test_figures_over_corruptions_may_be_of_any_points() -> None:
    changes = {
        "config": {"corruptions": "fog, frost"},
        "axes": table()["axes"] | {"data": {"old": {}, "new": {"corruptions": "fog,snow"}}},
        "rows": ["strategy", "data"],
        "published": [{"over": "corruption", "values": {"frost": 1.0, "snow": 2.0}}],
    }
    assert spec(**changes).published[0].values == {"frost": 1.0, "snow": 2.0}


def test_an_axis_called_as_what_is_within_a_cell_goes_before_it() -> None:
    made = spec(
        config={"corruptions": "fog,snow"},
        axes={"corruption": {"both": {}}, "strategy": {"A": {}}},
        rows=["strategy"],
        columns=["corruption"],
        skip=[],
        claims=[],
        published=[{"over": "corruption", "values": {"both": 1.0}}],
    )
    assert made.published[0].values == {"both": 1.0}


def test_quick_without_seeds_keeps_them() -> None:
    assert {cell.seed for cell in cells(spec(quick={"shift-length": 2}), {}, quick=True)} == {0, 1}


def test_what_quick_says_is_checked_also_where_it_is_not_wanted() -> None:
    with pytest.raises(ConfigError, match=r"quick: .*sedes.*unknown"):
        cells(spec(quick={"sedes": [0]}), {})


def test_a_cell_holds_its_whole_config() -> None:
    (cell, *_) = cells(spec(), {})
    assert {"dataset", "shift-length", "fedtsa.slots"} <= set(cell.config)
    assert not any(isinstance(value, dict) for value in cell.config.values())


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"wrong": 1}, "wrong: unknown key; allowed: name, title, source, score"),
        ({"name": "Small one"}, "name = 'Small one': allowed: lower-case letters, digits and hyphens"),
        ({"score": "after"}, "score = 'after': unknown; allowed: source, local, pre, tta, post"),
        ({"metric": "mean"}, "metric = 'mean': allowed: 'micro', 'macro', "),
        ({"rows": "strategy"}, "rows = 'strategy': allowed: a list"),
        ({"rows": []}, "rows = [], columns = ['setting']: allowed: all axes, each once: setting, strategy"),
        ({"columns": ["setting", "strategy"]}, "each once"),
        ({"seeds": 3}, "seeds = 3: allowed: a list, [...]; "),
        ({"seeds": []}, "seeds = []: allowed: one at least"),
        ({"seeds": [-1]}, "seeds.0 = -1: allowed: greater than or equal to 0"),
        ({"quick": {"seeds": 1}}, "quick.seeds = 1: allowed: a list"),
        ({"quick": {"seeds": []}}, "quick.seeds = []: allowed: one at least"),
        ({"quick": True}, "quick = True: allowed: a table"),
        ({"axes": {"strategy": {}, "setting": {"IID": {}}}}, "axes.strategy: no point"),
        (
            {"axes": {"strategy": {"a/b": {}}, "setting": {"IID": {}}}},
            "axes.strategy: 'a/b': allowed: a letter or digit, then letters",
        ),
        (
            {"axes": {"strategy": {"..": {}}, "setting": {"IID": {}}}},
            "axes.strategy: '..': allowed: a letter or digit, then letters",
        ),
        ({"axes": {"strategy": {"A": 1}, "setting": {"IID": {}}}}, "axes.strategy.A = 1: allowed: a table"),
        ({"skip": [{"strategy": 3}]}, "skip.0.strategy = 3: allowed: a list"),
        ({"skip": [{"strategy": ["FedAvg", "FedSGD"]}]}, "skip: strategy = 'FedSGD': unknown; allowed: No-Adapt"),
        ({"skip": [{"method": "FedAvg"}]}, "skip: method = 'FedAvg': unknown; allowed: setting, strategy"),
        ({"published": [{"over": "method", "values": {}}]}, "published: over = 'method': allowed: setting"),
        (
            {"published": [{"over": "strategy", "values": {"FedSGD": 1.0}}]},
            "axes.strategy; allowed: No-Adapt, FedAvg, FedP",
        ),
        ({"seeds": [4, 4]}, "seeds = [4, 4]: allowed: each once"),
        (
            {"axes": {"seed": {"a": {}}, "strategy": {"b": {}}}, "rows": ["seed"], "columns": ["strategy"]},
            "axes.seed: a column of tables/runs.csv has that name",
        ),
        (
            {"axes": {"metric": {"a": {}}, "strategy": {"b": {}}}, "rows": ["metric"], "columns": ["strategy"]},
            "axes.metric: ",
        ),
        ({"published": [{"over": "setting", "at": {"setting": "IID"}, "values": {}}]}, "`at` names a point of it"),
        (
            {"config": {"corruptions": "fog,snow"}, "published": [{"over": "corruption", "values": {"frog": 1.0}}]},
            "published: 'frog': allowed over corruption: fog, snow",
        ),
        (
            {"config": {"corruptions": "fog , snow"}, "published": [{"over": "corruption", "values": {"frog": 1.0}}]},
            "published: 'frog': allowed over corruption: fog, snow",
        ),
        ({"published": [{"over": "class", "at": {"setting": "II"}, "values": {}}]}, "published.at: setting = 'II'"),
        (
            {"published": [{"over": "class", "values": {"0": "1.0"}}]},
            "published.0.values.0 = '1.0': allowed: a valid number",
        ),
        (
            {"published": [{"over": "class", "values": {"0": float("nan")}}]},
            "published.0.values.0 = nan: allowed: a finite number",
        ),
        (
            {"published": [{"over": "class", "values": {"0": 100.5}}]},
            "published.0.values.0 = 100.5: allowed: less than or equal to 100",
        ),
        (
            {"published": [{"over": "class", "values": {"0": -0.5}}]},
            "published.0.values.0 = -0.5: allowed: greater than or equal to 0",
        ),
        (
            {"claims": [{"text": "a", "better": {"setting": "IID"}, "than": {"setting": "IID"}}]},
            "claims: 'a': better = {'setting': 'IID'} and than = {'setting': 'IID'} are the same cells",
        ),
        (
            {"claims": [{"text": "a", "better": {"setting": "IID"}, "than": {"strategy": "FedAvg"}}]},
            "are the same cells; name another point of an axis in each",  # FedAvg and IID hold for both
        ),
        (
            {"claims": [{"text": "a", "better": {}, "than": {}, "by": float("inf")}]},
            "claims.0.by = inf: allowed: a finite number",
        ),
        (
            {"published": [{"over": "class", "values": {}, "flag": "good"}]},
            "published.0.flag = 'good': allowed: 'sound'",
        ),
        ({"published": [{"over": "class", "values": {}, "by": 1.0}]}, "by: unknown key; allowed: at, over, values"),
        ({"claims": [{"text": "a", "better": {}}]}, "claims.0.than: missing; add than = "),
        ({"claims": [{"text": "a", "better": {"setting": "x"}, "than": {}}]}, "claims.better: setting = 'x'"),
        ({"claims": [{"text": "a", "better": {}, "than": {"setting": "x"}}]}, "claims.than: setting = 'x'"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_key(changes: dict[str, Any], names: str) -> None:
    kept: dict[str, Any] = {"skip": [], "published": [], "claims": []} if "axes" in changes else {}
    with pytest.raises(ConfigError) as caught:
        spec(**(kept | changes))
    text = str(caught.value)
    assert text.startswith("small.toml: ")
    assert names in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"config": {"batch-sise": 1}}, "small, cell SH-0.5.No-Adapt.seed0: batch-sise: unknown key"),
        ({"config": {"batch-size": "ten"}, "quick": {}}, "small, cell IID.No-Adapt.seed0: batch-size = 'ten'"),
        ({"config": {"seed": 3}}, "small: seed = 3"),
        (
            {"score": "pre", "config": {"scores": "tta,post"}, "quick": {}},
            "small, cell SH-0.5.No-Adapt.seed0: score = 'pre' is not among its scores = 'tta,post'",
        ),
        ({"skip": [{"setting": ["SH 0.5", "IID"]}]}, "small: skip leaves no cell"),
    ],
)
def test_what_is_wrong_with_a_cell_is_one_line_with_its_key(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cells(spec(**changes), {})
    assert str(caught.value).startswith(names)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "axes",
    [
        {"one": {"A B": {}, "A-B": {}}},
        {"one": {"A.B": {}, "A": {}}, "two": {"C": {}, "B.C": {}}},
    ],
)
def test_two_cells_may_not_share_a_folder(axes: dict[str, Any]) -> None:
    kept = {"skip": [], "published": [], "claims": [], "rows": list(axes), "columns": []}
    with pytest.raises(ConfigError, match=r"two cells are called A[.-]B"):
        cells(spec(axes=axes, **kept), {})


def test_points_that_an_override_sets_may_hold_what_no_run_config_may() -> None:
    axes = {"data": {"two": {"corruptions": ["fog", "snow"]}, "one": {"corruptions": ["fog"]}}}
    kept = {"skip": [], "published": [], "claims": [], "quick": {}, "rows": ["data"], "columns": []}
    with pytest.raises(ConfigError, match=r"--run-config: corruptions = 'fog': the axis data varies it, at two"):
        cells(spec(axes=axes, **kept), {"corruptions": "fog"})


def test_a_cell_has_a_name_that_a_file_can_have() -> None:
    axes = {f"axis {i}": {"x" * 48: {}} for i in range(6)}
    kept = {"skip": [], "published": [], "claims": [], "rows": list(axes), "columns": []}
    with pytest.raises(ConfigError, match=r"^small: a cell would be called xxx.* \(299 characters, at most 200\)"):
        cells(spec(axes=axes, **kept), {})


def test_a_seed_among_the_overrides_is_no_silent_nothing() -> None:
    with pytest.raises(ConfigError, match=r"small: seed = 3: .*--only seed=N"):
        cells(spec(), {"seed": 3})
    for key in ("output-dir", "resume"):
        with pytest.raises(ConfigError, match=f"{key}: every run has a directory in that of the benchmark"):
            cells(spec(), {key: "/runs/1"})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "absent.toml"
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file.*fedtta list benchmarks") as absent:
        read_spec(path)
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"absent\.toml: no TOML") as damaged:
        read_spec(path)
    assert "\n" not in str(absent.value) + str(damaged.value)
    path.write_text(SPEC)
    parsed, raw = read_spec(path)
    assert parsed == spec()
    assert raw == table()
