"""The specs that ship: they run as they stand, and what they say of the papers does not contradict itself."""

import itertools
import math
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from fedtta_flwr.bench.spec import Cell, Claim, Labels, Published, Spec, cells, make_spec, read_spec
from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.btgfl import SETS
from fedtta_flwr.phases import phases
from fedtta_flwr.registry import ADAPTERS, HEADS, STRATEGIES
from fedtta_flwr.run_config import read_overrides
from tests.conftest import ROOT

EVERY = sorted((ROOT / "configs" / "bench").glob("*.toml"))
#: of two heads, which take other keys than those that adapt
HEADS_FILES = [path for path in EVERY if path.name.startswith("btfl-")]
FILES = [path for path in EVERY if path not in HEADS_FILES]
#: of a paper, where the record repeats a part of one on other data
PAPERS = [path for path in FILES if not path.name.startswith("record-")]
CONTRADICTED = "contradicted by the paper's own table: "
#: samples of each class at delta 0.01: pFedBBN's clients together, of every corruption (its Table 4)
FREQUENCY = (1362, 5, 467, 0, 855, 457, 1927, 1000, 2326, 1601)
ROUNDED = 0.0099  # how far the mean of a row is from its printed one, which some tables cut off after two decimals
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
every_heads = pytest.mark.parametrize("path", HEADS_FILES, ids=lambda path: path.stem)
every_paper = pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)


@cache
def spec_of(path: Path) -> Spec:
    return read_spec(path)[0]


@cache
def cells_of(path: Path, quick: bool = False) -> tuple[Cell, ...]:
    return cells(spec_of(path), {}, quick=quick)


def comments(path: Path) -> list[str]:
    lines = itertools.takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
    return [line.removeprefix("# ") for line in lines]


def run_config_of(command: str) -> list[str]:
    """Return what a shell would pass after each --run-config."""
    words = shlex.split(command)
    return [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--run-config"]


def rounds(found: tuple[Cell, ...]) -> int:
    total = 0
    for cell in found:
        config = RunConfig.from_flat(cell.config)
        if config.task == "tgfl":
            total += len(phases(config))
            continue
        slots = len(config.corruption_names()) * config.slots_per_corruption
        total += math.ceil(slots / config.aggregate_every)
    return total


def published(spec: Spec, at: Labels, over: str) -> Published | None:
    """Return what is printed in one row of a paper's table."""
    found = [entry for entry in spec.published if entry.over == over and entry.at == at]
    return found[0] if found else None


def printed(spec: Spec, labels: Mapping[str, str]) -> float | None:
    """Return what a paper prints for one cell."""
    found = [
        entry.values[labels[entry.over]]
        for entry in spec.published
        if entry.over in labels
        and labels[entry.over] in entry.values
        and all(labels[axis] == point for axis, point in entry.at.items())
    ]
    assert len(found) < 2, f"{labels}: published twice"
    return found[0] if found else None


def comparisons(path: Path, claim: Claim) -> Iterator[tuple[Labels, Labels]]:
    """Give the cells that a claim compares: they agree in every axis that neither side names."""
    run = {tuple(cell.labels.items()): cell.labels for cell in cells_of(path)}.values()
    both = [{**other, **side} for side, other in ((claim.better, claim.than), (claim.than, claim.better))]
    first, second = ([labels for labels in run if side.items() <= labels.items()] for side in both)
    for better, than in itertools.product(first, second):
        if all(better[axis] == than[axis] for axis in better if axis not in both[0]):
            yield better, than


@every_file
def test_its_first_lines_say_what_it_repeats_and_how(path: Path) -> None:
    command, headline, *_ = comments(path)
    assert command.startswith(f"fedtta bench configs/bench/{path.name} --run-config ")
    assert headline.endswith(".")
    assert path.stem == spec_of(path).name
    overrides = read_overrides(run_config_of(command))
    assert overrides.keys() == {"data-dir", "checkpoint"}
    with_data = cells(spec_of(path), overrides)
    assert {cell.config["data-dir"] for cell in with_data} == {"DIR"}
    where = with_data[0].config["checkpoint"]
    assert where == ("ZOO" if str(with_data[0].config["model"]).startswith("robustbench:") else "FILE.safetensors")
    assert f"{where}".removesuffix(".safetensors") + ":" in " ".join(comments(path))


@every_file
def test_what_it_says_of_other_data_runs_too(path: Path) -> None:
    lines = comments(path)
    others = [line for line in lines if line.startswith("'dataset=")]
    figure = path.stem.startswith(("fedtsa-fig", "fedctta-fig"))
    assert len(others) == figure  # both papers' figures have panels for both data sets
    for other in others:
        overrides = read_overrides([*run_config_of(lines[0]), *run_config_of(f"--run-config {other}")])
        made = cells(spec_of(path), overrides)
        assert len(made) == len(cells_of(path))
        table = cells_of(path.with_name("fedtsa-table1-cifar100.toml"))[0].config
        for cell in made:
            assert cell.config["checkpoint"] == "ZOO"
            assert all(cell.config[key] == table[key] for key in ("dataset", "model", "legacy-no-norm"))


@every_file
def test_every_method_in_it_exists(path: Path) -> None:
    for cell in cells_of(path):
        assert cell.config["strategy"] in STRATEGIES
        assert cell.config["adapter"] in ADAPTERS


@every_file
def test_its_score_is_among_those_that_are_made(path: Path) -> None:
    assert {spec_of(path).score in str(cell.config["scores"]).split(",") for cell in cells_of(path)} == {True}


@every_file
def test_quick_is_a_small_part_of_it(path: Path) -> None:
    quick, whole = cells_of(path, quick=True), cells_of(path)
    assert len({cell.seed for cell in quick}) <= 2
    assert {tuple(cell.labels.items()) for cell in quick} == {tuple(cell.labels.items()) for cell in whole}
    assert rounds(quick) <= rounds(whole) / 5
    for cell in quick:
        assert int(cell.config["shift-length"]) <= int(cell.config["slots-per-corruption"])


@every_paper
def test_it_runs_nothing_that_can_have_no_effect(path: Path) -> None:
    no_gradient = ("source", "bn-stats")
    one_step = ("entropy", "tent", "cotta", "roid", "bbn")
    for cell in cells_of(path):
        strategy, adapter, slots = (cell.config[key] for key in ("strategy", "adapter", "aggregate-every"))
        assert not (strategy in ("fedprox", "moon", "pfedsd") and adapter in no_gradient), cell.id
        assert not (strategy in ("fedavgm", "ldawa", "fedavg-ft") and adapter in no_gradient), cell.id
        assert not (strategy == "fedprox" and adapter in one_step and slots == 1), cell.id
        assert not (adapter == "source" and strategy != "local"), cell.id


@every_paper
def test_every_run_stands_in_the_paper(path: Path) -> None:
    """Runs of a table have a published figure each, but for methods that it leaves out; figures print none."""
    spec = spec_of(path)
    absent = {
        "fedtsa-table4": {"Local", "FedAvg"},
        "fedctta-table3": {"Local", "FedAvg"},
        "pfedbbn-table2-cifar10": {"pFedBBN"},
        "pfedbbn-table2-cifar100": {"pFedBBN"},
    }.get(path.stem, set())
    without = {str(cell.labels.get("strategy")) for cell in cells_of(path) if printed(spec, cell.labels) is None}
    assert bool(spec.published) == ("-table" in path.name)
    assert not spec.published or without == absent


@every_paper
def test_rows_have_the_printed_mean(path: Path) -> None:
    spec = spec_of(path)
    for entry in (entry for entry in spec.published if entry.over not in spec.axes):
        size = {"class": 10, "corruption": 15, "position": 15}[entry.over]
        assert len(entry.values) == size
        if entry.over == "corruption":
            assert list(entry.values) == str(spec.config["corruptions"]).split(",")
        else:
            first = 0 if entry.over == "class" else 1
            assert list(entry.values) == [str(first + i) for i in range(size)]
        mean = printed(spec, entry.at)
        assert mean is not None
        if entry.flag == "sound":
            assert sum(entry.values.values()) / size == pytest.approx(mean, abs=ROUNDED), entry.at


def test_rows_by_class_are_the_rows_of_table_1_of_pfedbbn() -> None:
    by_class, overall = (spec_of(ROOT / "configs" / "bench" / f"pfedbbn-table{n}-cifar10.toml") for n in (2, 1))
    sound = [entry for entry in by_class.published if entry.over == "class" and entry.flag == "sound"]
    assert len(sound) == 7
    for entry in sound:
        correct = sum(value * n for value, n in zip(entry.values.values(), FREQUENCY, strict=True))
        micro = published(overall, entry.at, "setting")
        assert micro is not None
        assert correct / sum(FREQUENCY) == pytest.approx(micro.values["delta 0.01"], abs=0.015), entry.at


@every_paper
def test_what_is_not_sound_has_a_reason(path: Path) -> None:
    for entry in spec_of(path).published:
        assert entry.flag == "sound" or entry.note
        assert entry.values


def flags(spec: Spec, **at: str) -> dict[tuple[object, str, str], str]:
    """Return the flag of each figure: where it stands, `at` added, what its row is over, and the point there."""
    return {
        (frozenset({**entry.at, **at}.items()), entry.over, point): entry.flag
        for entry in spec.published
        for point in entry.values
    }


@pytest.mark.parametrize("table", ["table1-cifar100", "table2-cifar100"])
def test_what_is_invalid_is_so_where_it_is_copied(table: str) -> None:
    fedtsa, fedctta = (flags(spec_of(ROOT / "configs" / "bench" / f"{x}-{table}.toml")) for x in ("fedtsa", "fedctta"))
    copied = {figure for figure in fedctta if fedtsa.get(figure) == "invalid"}
    assert copied
    assert {fedctta[figure] for figure in copied} == {"invalid"}


@pytest.mark.parametrize("adapter", ["grad", "bn"])
def test_the_record_flags_a_figure_as_its_table_does(adapter: str) -> None:
    names = ("fedctta-table1-cifar10", f"record-cifar10-{adapter}")
    table, record = (spec_of(ROOT / "configs" / "bench" / f"{name}.toml") for name in names)
    assert flags(record, adapter=adapter).items() <= flags(table).items()


@every_paper
def test_fedavgm_is_that_of_the_published_code(path: Path) -> None:
    rules = {cell.config["fedavgm.rule"] for cell in cells_of(path) if cell.config["strategy"] == "fedavgm"}
    assert rules <= {"ema"}


@every_paper
def test_skipped_figures_say_so(path: Path) -> None:
    """What a paper prints for a combination that is not run has a note: why there is nothing beside it."""
    spec = spec_of(path)
    run = [cell.labels for cell in cells_of(path)]
    for entry in spec.published:
        if entry.over in spec.axes:
            for point in entry.values:
                labels = {**entry.at, entry.over: point}
                if not any(labels.items() <= cell.items() for cell in run):
                    assert re.search(r"\bnot run\b", entry.note), labels


@every_file
def test_every_claim_compares_runs_of_it(path: Path) -> None:
    texts = [claim.text for claim in spec_of(path).claims]
    for claim in spec_of(path).claims:
        pairs = list(comparisons(path, claim))
        assert pairs, claim.text
        assert all(better != than for better, than in pairs), claim.text
    assert len(set(texts)) == len(texts)


@every_paper
def test_a_claim_says_whether_its_paper_contradicts_it(path: Path) -> None:
    spec = spec_of(path)
    for claim in spec.claims:
        figures = [(printed(spec, better), printed(spec, than)) for better, than in comparisons(path, claim)]
        gains = [round(a - b, 2) for a, b in figures if a is not None and b is not None]
        said = [float(x) for x in re.findall(r"[+-]\d+\.\d\d", claim.text.partition(CONTRADICTED)[2])]
        # "At least so many points"; without a number, as good is not better.
        missed = [gain for gain in gains if gain < claim.by or gain == claim.by == 0]
        assert sorted(said) == sorted(missed), claim.text


@every_heads
def test_a_file_of_two_heads(path: Path) -> None:
    spec, found = spec_of(path), cells_of(path)
    assert comments(path)[0].startswith(f"fedtta bench configs/bench/{path.name}")
    for cell in found:
        assert cell.config["task"] == "tgfl"
        assert cell.config["head"] in HEADS
        assert spec.score in str(cell.config["scores"]).split(",")
    assert rounds(cells_of(path, quick=True)) < rounds(found)
    labels = [cell.labels for cell in found]
    for entry in spec.published:
        assert tuple(entry.values) == SETS or entry.over == "head"
        assert any(entry.at.items() <= one.items() for one in labels)


@every_heads
def test_rows_of_two_heads_have_the_printed_average(path: Path) -> None:
    """The last column of BTFL's tables is the mean of the five (to 0.014); a row where it is not, is doubtful."""
    spec = spec_of(path)
    rows = [entry for entry in spec.published if entry.over == "corruption"]
    averages = {
        (head, entry.at["partition"]): value
        for entry in spec.published
        if entry.over == "head"
        for head, value in entry.values.items()
    }
    assert {(entry.at["head"], entry.at["partition"]) for entry in rows} == set(averages)
    for entry in rows:
        printed_, mean = averages[entry.at["head"], entry.at["partition"]], sum(entry.values.values()) / len(SETS)
        assert abs(mean - printed_) < 0.015 or "average" in entry.note, entry.at


def test_the_document_lists_them_all() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \| (\d+) \((\d+)\) \| ([\d,]+) \(([\d,]+)\) \|$", text, re.MULTILINE)
    listed = {name: tuple(int(figure.replace(",", "")) for figure in figures) for name, _, *figures in rows}
    both = {path.stem: (cells_of(path), cells_of(path, quick=True)) for path in EVERY}
    assert listed == {name: (len(a), len(b), rounds(a), rounds(b)) for name, (a, b) in both.items()}


def test_the_example_of_the_document_has_every_key() -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "docs" / "benchmarks.md").read_text(), re.DOTALL | re.M)
    table = tomllib.loads(example)
    spec = make_spec(table, "example")
    assert table.keys() == Spec.model_fields.keys()
    assert {key for entry in table["published"] for key in entry} == Published.model_fields.keys()
    assert {key for entry in table["claims"] for key in entry} == Claim.model_fields.keys()
    assert len(cells(spec, {})) == 3 * (2 * 3 - 2)
    assert len(cells(spec, {}, quick=True)) == 2 * 3 - 2
