"""The reproduction record is what its kept runs say, and goes on from them."""

import re
from pathlib import Path

import pytest

from benchmarks import reproduction
from benchmarks.kept import HERE, KEPT, SPECS, keep, read, restored, run_config
from benchmarks.record import PARTS
from fedtta_flwr.bench.runner import open_bench
from fedtta_flwr.bench.spec import cells, read_spec
from fedtta_flwr.run_config import read_overrides

KEPT_PARTS = [name for name in PARTS if (KEPT / f"{name}.jsonl").exists()]
COMMIT = re.compile(r"^Commit [^;]*;", re.MULTILINE)  # which it was takes all of git's history, and minutes


def test_every_kept_part_is_one_of_the_record() -> None:
    assert KEPT_PARTS
    assert {path.stem for path in KEPT.iterdir()} == set(KEPT_PARTS)


def test_the_document_is_what_the_kept_runs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "commit", lambda code: code)
    assert COMMIT.sub("", reproduction.document()) == COMMIT.sub("", reproduction.DOCUMENT.read_text())


@pytest.mark.parametrize("name", KEPT_PARTS)
def test_what_is_kept_is_not_run_again_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    kept, output = tmp_path / "kept", tmp_path / "Läufe"
    folder = restored(name, output)
    spec, table = read_spec(SPECS / f"{PARTS[name].spec}.toml")
    overrides = read_overrides([run_config(PARTS[name], output)])
    left, _ = open_bench(folder, spec, table, cells(spec, overrides), overrides, quick=False)
    there = {line["cell"] for line in read(name, output)}
    assert there
    assert not there & {cell.id for cell in left}
    keep(name, output, kept)
    assert (kept / f"{name}.jsonl").read_bytes() == (KEPT / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize("name", KEPT_PARTS)
def test_what_is_kept_names_no_folder_of_the_machine(name: str) -> None:
    paths = re.findall(r'"(/[^"]*|[^"]*/(?:tmp|home|root)/[^"]*)"', (KEPT / f"{name}.jsonl").read_text())
    assert not [path for path in paths if not path.startswith(f"{HERE}/")]
