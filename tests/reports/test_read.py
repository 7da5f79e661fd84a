"""Reading run directories that are damaged, of another form, or of clients that were absent."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.reports import mistrust
from fedtta_flwr.reports.read import read_bench, read_run, shifts
from fedtta_flwr.reports.report import write_report


@pytest.fixture(scope="module")
def run(run_local: Callable[..., Any]) -> Path:
    """A real run of 4 clients in 2 groups."""
    path: Path = run_local(scores="post").path
    return path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_arrays(path: Path, **changed: Any) -> None:
    with np.load(path) as file:
        arrays = dict(file)
    np.savez_compressed(path, **(arrays | changed))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("summary.json", lambda c: c.pop("seconds"), r"summary\.json is damaged \(seconds: Field required"),
        ("summary.json", lambda c: c.update(bytes=None), r"summary\.json is damaged \(bytes: "),
        ("summary.json", lambda c: c.update(rounds="x"), r"summary\.json is damaged \(rounds: "),
        ("summary.json", lambda c: c["accuracy"].update(post=None), r"summary\.json is damaged \(accuracy\.post: "),
        ("summary.json", lambda c: c["accuracy"]["post"].pop("per_client"), r"\(accuracy\.post\.per_client: "),
        ("summary.json", lambda c: c["accuracy"]["post"].update(major_minor={}), r"\(accuracy\.post\.major_minor\."),
        (
            "summary.json",
            lambda c: c["accuracy"]["post"]["per_class"].pop("seen"),
            r"\(accuracy\.post\.per_class\.seen: ",
        ),
        (
            "summary.json",
            lambda c: c["accuracy"]["post"]["per_class"].update(seen=[1]),
            r"per_class: .*1 classes seen, 10 ",
        ),
        ("summary.json", lambda c: c.update(undone=["client-00"]), r"summary\.json is damaged \(undone: "),
        ("summary.json", lambda c: c.update(collapsed={"client-00": "x"}), r"damaged \(collapsed\.client-00: "),
        ("config.json", lambda c: c["config"].pop("strategy"), r"config\.json is damaged \(no key strategy\)"),
        ("config.json", lambda c: c.update(clients="client-00"), r"config\.json is damaged \(clients: "),
    ],
)
def test_json_that_lacks_what_a_report_needs(
    copy: Path, name: str, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    edit(copy / name, change)
    with pytest.raises(ConfigError, match=words) as caught:
        read_run(copy)
    assert "\n" not in str(caught.value)


def test_an_accuracy_that_is_not_known_is_none(copy: Path) -> None:
    edit(copy / "summary.json", lambda summary: summary["accuracy"]["post"].update(mean_clients=None))
    assert read_run(copy).accuracy("post", "mean_clients") is None
    assert write_report(copy, copy / "report")[1] == []


def test_a_run_that_is_older_than_major_and_minor_classes_shows_none(copy: Path) -> None:
    edit(copy / "summary.json", lambda summary: summary["accuracy"]["post"].pop("major_minor"))
    page, faults = write_report(copy, copy / "report")
    assert faults == []
    assert "minor class" not in page.read_text()


def test_what_befell_clients_is_told(copy: Path) -> None:
    told = {"steps": 9, "rolled_back": 3, "undone": {"b": 2, "a": 1}, "collapsed": {"c": 4}, "clipped": {"d": 5}}
    for summary, words in (
        (told, ["3 of 9 steps, not finite: b 2, a 1<", ">c in 4 rounds<", ">d in 5 rounds<"]),
        ({"steps": 9, "rolled_back": 3, "undone": {}}, ["3 of 9 steps, not finite<"]),  # of an earlier version
    ):
        edit(copy / "summary.json", lambda known, summary=summary: known.update(summary))
        page = write_report(copy, copy / "report")[0].read_text()
        assert all(text in page for text in words)


def test_arrays_of_any_size_are_not_unpacked(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of zeros, gigabytes are some megabytes in a file."""
    assert read_run(copy).faults == []
    with monkeypatch.context() as patch:
        patch.setattr(mistrust, "MOST_BYTES", 1000)
        (fault, *_) = read_run(copy).faults
        assert "bytes, at most 1,000 are read" in fault
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000, ), }".ljust(117) + b"\n"
    with zipfile.ZipFile(copy / "timeline.npz", "w") as archive:
        archive.writestr("seen.npy", np.lib.format.magic(1, 0) + len(header).to_bytes(2, "little") + header)
    (fault,) = read_run(copy).faults
    assert fault.startswith("timeline.npz cannot be read: ")


def test_a_file_is_no_run_directory(copy: Path) -> None:
    file = copy / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json: is no folder; name a run's or a benchmark's folder$"):
        write_report(file, copy / "report")
    assert not (copy / "report").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '"\\ud800'])
def test_json_of_another_form(copy: Path, text: str) -> None:
    (copy / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match=r"summary\.json is damaged"):
        read_run(copy)


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("timeline.npz", {"domain": np.zeros((4, 3), dtype=np.int16)}, r"domain is \[4, 3\], not \[4, 4\]"),
        ("timeline.npz", {"domain": np.full((4, 4), 9, dtype=np.int16)}, "domain goes from 9 to 9, and there are 2"),
        ("timeline.npz", {"seen": np.zeros((4, 4))}, r"seen is \[4, 4\], not \[1, 4, 4\]"),
        ("timeline.npz", {"confidence": np.zeros(4)}, r"confidence is \[4\], not \[4, 4\]"),
        ("timeline.npz", {"confidence": np.zeros((4, 4), dtype=int)}, "confidence holds int64"),
        ("timeline.npz", {"seen": np.full((1, 4, 4), "1")}, "seen holds str32"),
        ("timeline.npz", {"domains": np.arange(2.0)}, "domains holds float64"),
        ("collaboration.npz", {"rounds": np.full(4, np.nan)}, "rounds holds float64"),
        ("timeline.npz", {"clients": np.array([None])}, "Object arrays cannot be loaded"),
        ("timeline.npz", {"rounds": np.int64(4)}, "unsized"),
        ("collaboration.npz", {"weights": np.zeros((4, 4))}, r"weights is \[4, 4\], not \[4, 4, 4\]"),
        ("collaboration.npz", {"weights": np.pad([[[np.nan]]], (0, 3))}, "not finite"),
    ],
)
def test_arrays_of_another_form_are_left_out(copy: Path, name: str, changed: dict[str, Any], words: str) -> None:
    edit_arrays(copy / name, **changed)
    _, (fault,) = write_report(copy, copy / "report")
    assert fault.startswith(f"{name} cannot be read: ")
    assert words.replace("\\", "") in fault
    assert words.replace("\\", "") in (copy / "report" / "report.html").read_text()


@pytest.mark.parametrize("name", ["rounds.jsonl", "timeline.npz", "collaboration.npz"])
def test_a_file_that_is_absent_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert read_run(copy).faults == [f"{name} is absent"]


def test_an_archive_without_an_array(copy: Path) -> None:
    np.savez_compressed(copy / "timeline.npz", rounds=np.arange(4), scores=np.array(["post"]))
    assert read_run(copy).faults == ["timeline.npz cannot be read: it has no domain"]


@pytest.mark.parametrize("member", ["seen.npy", "rounds.npy", "domain.npy"])
def test_every_flipped_byte_of_an_archive_is_a_fault_and_no_crash(copy: Path, member: str) -> None:
    path = copy / "timeline.npz"
    whole = path.read_bytes()
    entry = zipfile.ZipFile(path).getinfo(member)
    names, extra = (int.from_bytes(whole[entry.header_offset + i :][:2], "little") for i in (26, 28))
    start = entry.header_offset + 30 + names + extra
    for at in range(start, start + entry.compress_size, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        (fault,) = read_run(copy).faults
        assert fault.startswith("timeline.npz cannot be read")


def test_who_was_absent_for_a_round_stays_in_its_group(copy: Path) -> None:
    with np.load(copy / "timeline.npz") as file:
        domain = file["domain"]
    groups = read_run(copy).groups()
    assert [len(group) for group in groups] == [2, 2]
    (a, _), (b, _) = groups
    domain[1, a] = domain[2:, b] = -1
    edit_arrays(copy / "timeline.npz", domain=domain)
    assert read_run(copy).groups() == groups
    domain[:, a] = -1  # never there: nothing is known
    edit_arrays(copy / "timeline.npz", domain=domain)
    assert sorted(map(len, read_run(copy).groups())) == [1, 1, 2]
    write_report(copy, copy / "report")
    # The first and the third never met; the second met both.
    domain = np.array([[0, 0, -1, 1], [-1, 1, 1, 0], [-1, 0, 0, 0], [-1, 1, 1, 1]], dtype=np.int16)
    edit_arrays(copy / "timeline.npz", domain=domain)
    assert read_run(copy).groups() == [[0, 1, 2], [3]]


def test_a_round_without_a_client_is_no_shift() -> None:
    #                  steady  shifts  returns  late  never
    domain = np.array([[0, 0, 0, -1, -1], [0, 1, -1, -1, -1], [0, 1, 0, 2, -1], [0, 0, 1, 2, -1]], dtype=np.int16)
    expected = np.zeros((4, 5), dtype=bool)
    for client in range(5):  # by definition: another than the last one that it saw
        last = -1
        for round_ in range(4):
            now = domain[round_, client]
            expected[round_, client] = last >= 0 and now >= 0 and now != last
            last = now if now >= 0 else last
    assert expected.sum() == 3
    np.testing.assert_array_equal(shifts(domain), expected)


def test_names_from_outside_are_only_names(copy: Path) -> None:
    """Formulas of matplotlib, tags, quotes and the end of a script."""
    names = [r"a$\frac$b", "_x&\"'", "</script><script>alert(1)</script>", "<img src=http://x/>"]

    def rename(about: dict[str, Any]) -> None:
        about["clients"] = names

    def rename_counts(summary: dict[str, Any]) -> None:
        counts = summary["accuracy"]["post"]
        for key in ("per_client", "per_client_macro_all_classes"):
            counts[key] = dict(zip(names, counts[key].values(), strict=True))

    edit(copy / "config.json", rename)
    edit(copy / "summary.json", rename_counts)
    page, faults = write_report(copy, copy / "report")
    assert faults == []
    text = page.read_text()
    assert (copy / "report" / "time-post.png").exists()
    assert "alert(1)&lt;/script&gt;" in text
    assert not any(name in text for name in names[1:])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"cells": [{"id": "../../elsewhere", "labels": {}, "seed": 0}]}, "cells.0.id"),
        ({"cells": [{"id": "..", "labels": {}, "seed": 0}]}, "cells.0.id"),
        ({"cells": [{"id": "a", "labels": {}}]}, "cells.0.seed"),
        ({"overrides": ["x"]}, "overrides"),
        ({"spec": {}}, "name: missing"),
    ],
)
def test_a_benchmark_that_none_has_written(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    """Also one whose cells lie outside it, of which not even a log is read."""
    spec = {"name": "a", "title": "A", "rows": ["s"], "columns": [], "seeds": [0], "axes": {"s": {"x": {}}}}
    good = {"spec": spec, "cells": [{"id": "x.seed0", "labels": {"s": "x"}, "seed": 0}]}
    (tmp_path / "bench.json").write_text(json.dumps(good))
    assert [(cell.run, cell.fault) for cell in read_bench(tmp_path).cells] == [(None, "has not been run")]
    (tmp_path / "bench.json").write_text(json.dumps(good | change))
    with pytest.raises(ConfigError, match=fault) as error:
        read_bench(tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_memory_that_is_no_number(copy: Path) -> None:
    edit(copy / "summary.json", lambda summary: summary.update(memory={"client": "much"}))
    with pytest.raises(ConfigError, match=r"damaged \(memory\.client"):
        read_run(copy)
