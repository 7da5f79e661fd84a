"""The run directory: its files, and that it is valid whatever happens."""

import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedtta_flwr import files
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError, FedTTAError
from fedtta_flwr.files import write_atomically, write_json
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.records import code_fingerprint
from fedtta_flwr.reports import run_directory
from fedtta_flwr.reports.run_directory import RunDirectory, default_path, run_path
from fedtta_flwr.strategies.rounds import Counts, Round

FILES = {"config.json", "rounds.jsonl", "collaboration.npz", "timeline.npz", "summary.json"}


def counts(number: int, client: str, score: str, correct: int, seen: int = 4, domain: str = "fog") -> Counts:
    return Counts(number, client, domain, score, np.array([seen, 0]), np.array([correct, 0]))


def made_round(number: int, **known: Any) -> Round:
    seconds = {"client": 0.5, "server": 0.25, "transport": 0.125, "total": 1.0}
    return Round(number, bytes_up=number * 300, bytes_down=(number - 1) * 30, seconds=seconds, **known)


def written(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    summary = json.loads((path / "summary.json").read_text())
    return summary, [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.from_flat({"num-clients": 3, "spatial-heterogeneity": 1.0})


@pytest.fixture
def directory(tmp_path: Path, config: RunConfig) -> RunDirectory:
    """Two rounds and the closing one, the second without client b."""
    directory = RunDirectory(tmp_path / "deep" / "run")
    directory.on_start(config, ("a", "b", "c"), 2)
    first = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.125, 0.125, 0.75]])
    directory.on_round(
        made_round(
            1,
            clients=("a", "b", "c"),
            weights=first,
            samples=12,
            steps={"a": 2, "b": 1, "c": 0},
            undone={"a": 1},
            largest_share={"a": 0.97, "b": 0.5},
            confidence={"a": 0.75, "b": 0.5, "c": 0.25},
            memory={"client": 70, "server": 30},
            counts=[counts(1, "a", "pre", 1), counts(1, "b", "pre", 3), counts(1, "c", "pre", 4)],
        )
    )
    directory.on_round(
        made_round(
            2,
            clients=("a", "c"),
            weights=torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64),
            samples=8,
            domains={"a": frozenset({"fog"}), "c": frozenset({"snow"})},
            missing={"b": "no reply in time"},
            memory={"client": 60, "server": 40},
            counts=[counts(2, "a", "pre", 2), counts(1, "a", "post", 4), counts(1, "b", "post", 3)],
        )
    )
    return directory


def closing() -> Round:
    return made_round(
        3,
        closing=True,
        counts=[counts(2, "a", "post", 1)],
        missing={"b": "gone"},
        steps={"a": 1, "c": 1},
        undone={"a": 1, "c": 1},
    )


def test_a_finished_run(directory: RunDirectory) -> None:
    directory.on_round(closing())
    directory.on_end()
    assert {file.name for file in directory.path.iterdir()} == FILES
    summary, lines = written(directory.path)
    assert summary["finished"] is True
    assert summary["rounds"] == 2
    assert summary["accuracy"]["pre"]["micro"] == pytest.approx(100 * 10 / 16)
    assert summary["accuracy"]["post"]["micro"] == pytest.approx(100 * 8 / 12)
    assert set(summary["accuracy"]) == {"pre", "post"}
    # of all exchanges, for each of 3 clients and 2 rounds
    assert summary["bytes"]["up"] == (300 + 600 + 900) / 6
    assert summary["bytes"]["down"] == (0 + 30 + 60) / 6
    assert summary["seconds"] == {"client": 1.5, "server": 0.75, "transport": 0.375, "total": 3.0}
    assert summary["screened"] == {"b": 1}  # the closing exchange is no round
    assert (summary["steps"], summary["rolled_back"], summary["undone"]) == (5, 3, {"a": 2, "c": 1})
    assert [(line["steps"], line["rolled_back"], line["undone"]) for line in lines] == [(3, 1, {"a": 1}), (0, 0, {})]
    assert summary["collapsed"] == {"a": 1}
    assert [line["predictions"] for line in lines] == [
        {"confidence": 0.5, "largest_share": pytest.approx(0.735), "collapsed": ["a"]},
        {"confidence": None, "largest_share": None, "collapsed": []},
    ]
    assert summary["memory"] == {"client": 70, "server": 40, "unit": "bytes, peak of a process"}

    assert [line["round"] for line in lines] == [1, 2]
    assert lines[0]["accuracy"] == {"pre": pytest.approx(100 * 8 / 12), "post": pytest.approx(100 * 7 / 8)}
    assert lines[1]["accuracy"] == {"pre": 50.0, "post": 25.0}
    assert [line["clients"] for line in lines] == [3, 2]
    assert [line["samples"] for line in lines] == [12, 8]
    assert [line["collaboration"]["self_weight"] for line in lines] == [0.75, 0.625]
    # what was seen in round 1 is not known
    assert [line["collaboration"]["within_group"] for line in lines] == [None, (0.75 + 0.5) / 2]
    ln2 = math.log(2)
    rows = [1.5 * ln2, 0.0, 3 / 4 * ln2 + 3 / 4 * math.log(4 / 3)], [2 * ln2 - 3 / 4 * math.log(3), ln2]
    entropies = [sum(row) / len(row) for row in rows]
    assert [line["collaboration"]["entropy"] for line in lines] == pytest.approx(entropies)
    evenness = [entropies[0] / math.log(3), entropies[1] / ln2]
    assert [line["collaboration"]["evenness"] for line in lines] == pytest.approx(evenness)
    assert summary["collaboration"] == {
        "self_weight": 0.6875,
        "entropy": pytest.approx(sum(entropies) / 2),
        "evenness": pytest.approx(sum(evenness) / 2),
        "within_group": 0.625,  # of the only round in which groups are known
    }
    assert [line["bytes"]["up"] for line in lines] == [300, 600]
    assert [line["screened"] for line in lines] == [{}, {"b": "no reply in time"}]


def test_who_answers_first_changes_no_line(tmp_path: Path, config: RunConfig) -> None:
    lines = []
    for names in ("ab", "ba"):
        directory = RunDirectory(tmp_path / names)
        directory.on_start(config, ("a", "b", "c"), 1)
        about = {name: f"{name} is away" for name in names}
        directory.on_round(made_round(1, missing=about, undone=dict.fromkeys(names, 1)))
        directory.close(finished=False)
        (line,) = written(directory.path)[1]
        lines.append(json.dumps(line | {"time": ""}))  # the order of keys counts, too
    assert lines[0] == lines[1]


def test_a_line_says_when_its_round_ended(directory: RunDirectory) -> None:
    directory.on_end()
    for line in written(directory.path)[1]:
        ended = datetime.fromisoformat(line["time"])
        assert ended.microsecond == 0
        assert timedelta(0) <= datetime.now(UTC) - ended < timedelta(minutes=1)


def test_a_method_without_matrices(tmp_path: Path, config: RunConfig) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.on_start(config, ("a", "b", "c"), 1)
    directory.on_round(made_round(1, clients=("a", "b", "c")))
    directory.on_end()
    summary, lines = written(directory.path)
    assert summary["collaboration"] is lines[0]["collaboration"] is None


def test_the_matrices_have_a_row_for_every_client(directory: RunDirectory) -> None:
    directory.on_end()
    with np.load(directory.path / "collaboration.npz", allow_pickle=False) as arrays:
        assert arrays["clients"].tolist() == ["a", "b", "c"]
        assert arrays["rounds"].tolist() == [1, 2]
        assert arrays["weights"].dtype == np.float32
        assert arrays["weights"][0].tolist() == [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.125, 0.125, 0.75]]
        assert arrays["weights"][1].tolist() == [[0.75, 0.0, 0.25], [0.0, 0.0, 0.0], [0.5, 0.0, 0.5]]


def test_config_says_what_ran(directory: RunDirectory, config: RunConfig) -> None:
    about = json.loads((directory.path / "config.json").read_text())
    assert RunConfig.from_flat(about["config"]) == config
    assert about["hash"] == config.fingerprint()
    assert about["code"] == code_fingerprint()
    assert about["clients"] == ["a", "b", "c"]
    assert about["rounds"] == 2
    assert about["versions"]["torch"] == torch.__version__.partition("+")[0] or "torch" in about["versions"]
    assert {"flwr", "torch", "numpy", "python"} <= set(about["versions"])
    assert f"{os.cpu_count()} cores" in about["machine"]


def test_a_server_without_ray_writes_its_config(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "PACKAGES", ("numpy", "no-such-package"))
    RunDirectory(tmp_path / "run").on_start(config, ("a", "b", "c"), 2)
    assert set(json.loads((tmp_path / "run" / "config.json").read_text())["versions"]) == {"numpy", "python"}


def test_a_run_that_just_began_says_that_it_is_not_finished(tmp_path: Path, config: RunConfig) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.on_start(config, ("a", "b", "c"), 2)
    summary = json.loads((directory.path / "summary.json").read_text())
    assert summary["finished"] is False
    assert summary["rounds"] == 0
    assert summary["accuracy"] == {}


def test_a_run_that_was_broken_off_keeps_the_line_that_was_held_back(directory: RunDirectory) -> None:
    directory.close(finished=False)
    summary, lines = written(directory.path)
    assert summary["finished"] is False
    assert [line["round"] for line in lines] == [1, 2]
    assert "post" in lines[0]["accuracy"]
    assert "post" not in lines[1]["accuracy"]  # it never came, which is not 0


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.close(finished=False)
    assert not (tmp_path / "run").exists()


def test_a_folder_with_files_of_the_user_is_kept(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files already"):
        RunDirectory(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("made_before", [True, False])
def test_of_a_run_that_never_began_nothing_stays(tmp_path: Path, made_before: bool) -> None:
    path = tmp_path / "run"
    if made_before:
        path.mkdir()
    RunDirectory(path).close(finished=False)
    assert path.exists() == made_before


def test_a_folder_that_holds_a_run_is_refused_untouched(directory: RunDirectory) -> None:
    directory.on_end()
    before = {file.name: file.read_bytes() for file in directory.path.iterdir()}
    with pytest.raises(ConfigError, match="holds files already") as caught:
        RunDirectory(directory.path)
    assert "\n" not in str(caught.value)
    assert str(directory.path) in str(caught.value)
    assert {file.name: file.read_bytes() for file in directory.path.iterdir()} == before


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="output-dir") as caught:
            RunDirectory(path)
        assert "\n" not in str(caught.value)


def test_where_a_run_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def path_of(output: str) -> Path:
        return run_path(RunConfig.from_flat({"output-dir": output}))

    assert path_of("/some/where") == Path("/some/where")
    assert path_of("~/runs/1") == tmp_path / "runs" / "1"
    assert path_of("").parent == tmp_path / "fedtta-runs"
    assert path_of("").name.endswith("-fedctta-bn-stats")
    with pytest.raises(ConfigError, match="relative"):
        path_of("runs/1")
    assert list(tmp_path.iterdir()) == []


def test_a_plugin_names_its_run_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", "mine")
    assert default_path(RunConfig.from_flat({"strategy": "mine.module:Better"})).name.endswith("-Better-bn-stats")


@pytest.mark.parametrize("old", [None, b"the old content"])
def test_a_failing_writer_leaves_the_old_file(tmp_path: Path, old: bytes | None) -> None:
    path = tmp_path / "summary.json"
    if old is not None:
        path.write_bytes(old)

    def fail(file: BinaryIO) -> None:
        file.write(b"half of the new con")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, fail)
    assert [file.name for file in tmp_path.iterdir()] == ([] if old is None else ["summary.json"])
    assert old is None or path.read_bytes() == old


def test_what_killed_writers_left_is_removed_when_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer in another container may have any PID, and one that lives keeps its file young."""
    others = [tmp_path / name for name in (".mine.tmp", "summary.json.fedtta-tmp")]
    for path in others:
        path.write_text("mine")
    child = os.fork()
    if not child:
        write_atomically(tmp_path / "summary.json", lambda file: os.kill(os.getpid(), signal.SIGKILL))
    os.waitpid(child, 0)
    (left,) = set(tmp_path.iterdir()) - set(others)
    now = time.time()
    for later, stays in ((files.STALE / 2, True), (3 * files.STALE, False)):
        monkeypatch.setattr(files.time, "time", lambda later=later: now + later)
        write_json(tmp_path / "x.json", {"a": later})
        assert left.exists() == stays
    assert all(path.exists() for path in others)


def test_json_without_a_value_is_refused_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


# ------------------------------------------------------------------------------------------------------- whole runs


def test_a_real_run(run_local: Callable[..., Any], tiny_config: Callable[..., RunConfig]) -> None:
    run = run_local()
    assert {file.name for file in run.path.iterdir()} == FILES
    assert run.summary["finished"] is True
    assert run.summary["rounds"] == len(run.lines()) == 4
    with np.load(run.path / "collaboration.npz", allow_pickle=False) as arrays:
        assert arrays["weights"].shape == (4, 4, 4)
        assert np.abs(arrays["weights"].sum(axis=2) - 1).max() < 1e-5
        within = [(w[:2, :2].sum() + w[2:, 2:].sum()) / 4 for w in arrays["weights"]]
        assert arrays["clients"].tolist() == list(tiny_config().client_names())
    # 2 groups of 2 clients: what they give each other, and themselves, as the matrices have it
    assert [line["collaboration"]["within_group"] for line in run.lines()] == pytest.approx(within, abs=1e-6)
    assert run.summary["collaboration"]["within_group"] == pytest.approx(np.mean(within), abs=1e-6)
    # what the lines say adds up to what the summary says, since all batches are equal
    for score, accuracy in run.summary["accuracy"].items():
        assert np.mean([line["accuracy"][score] for line in run.lines()]) == pytest.approx(accuracy["micro"])


def test_lines_and_summary_agree_when_rounds_have_several_slots(run_local: Callable[..., Any]) -> None:
    """Of the `post` scores of such a round only the last slot's comes late."""
    run = run_local(**{"aggregate-every": 2})
    assert len(run.lines()) == 2
    for score, accuracy in run.summary["accuracy"].items():
        assert np.mean([line["accuracy"][score] for line in run.lines()]) == pytest.approx(accuracy["micro"])


def test_interrupting_a_run_leaves_a_valid_directory(
    apps: tuple[Any, Any], tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    class Interrupted(LocalGrid):
        exchanges = 0

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            self.exchanges += 1
            if self.exchanges == 4:  # hello and two rounds have been
                raise KeyboardInterrupt
            return super().push_messages(messages)

    server_app, client_app = apps
    config = tiny_config(**{"output-dir": str(tmp_path / "run")})
    with pytest.raises(KeyboardInterrupt):
        Interrupted(client_app, config.to_flat(), 2).run_server(server_app)
    assert {file.name for file in (tmp_path / "run").iterdir()} == FILES
    summary, lines = written(tmp_path / "run")
    assert summary["finished"] is False
    assert summary["rounds"] == 2
    assert [line["round"] for line in lines] == [1, 2]
    with np.load(tmp_path / "run" / "collaboration.npz", allow_pickle=False) as arrays:
        assert arrays["rounds"].tolist() == [1, 2]


def test_a_run_is_not_written_over(run_local: Callable[..., Any]) -> None:
    run = run_local(rounds=1, scores="")
    before = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in run.path.iterdir()}
    with pytest.raises(FedTTAError, match="holds files already"):
        run_local(**{"output-dir": str(run.path)})
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in run.path.iterdir()} == before


def test_a_run_whose_clients_do_not_join_leaves_nothing(run_local: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(FedTTAError, match="did not join"):
        run_local(hosting=["client-00"], nodes=1, **{"output-dir": str(tmp_path / "run"), "join-timeout": 0.05})
    assert list(tmp_path.iterdir()) == []
