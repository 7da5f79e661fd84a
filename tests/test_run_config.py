"""Overrides from the command line and from files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr.cli import main
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError, FederationError
from fedtta_flwr.launch import app_root, run_deployment
from fedtta_flwr.run_config import absolute_paths, read_overrides, resumed
from tests.conftest import TINY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a folder" / "run.toml"
    path.parent.mkdir()
    path.write_text('# fedtta run\nbatch-size = 3\nstrategy = "local"\n\n[fedctta]\ntemperature = 2.0\n')
    return path


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_overrides(arguments)
    assert "\n" not in str(caught.value)
    assert "--run-config" in str(caught.value)
    return str(caught.value)


def test_nothing() -> None:
    assert read_overrides([]) == {}


def test_pairs_keep_their_types() -> None:
    found = read_overrides(["batch-size=10 fedctta.temperature=2.0 strategy='local' scores=\"\" flag=true rate=1e-3"])
    assert found == {
        "batch-size": 10,
        "fedctta.temperature": 2.0,
        "strategy": "local",
        "scores": "",
        "flag": True,
        "rate": 0.001,
    }
    assert [type(value) for value in found.values()] == [int, float, str, str, bool, float]


def test_strings_may_have_blanks_and_commas() -> None:
    assert read_overrides(["corruptions='fog, snow' output-dir='/a b'"]) == {
        "corruptions": "fog, snow",
        "output-dir": "/a b",
    }


def test_a_file_is_flattened(file: Path) -> None:
    found = read_overrides([str(file)])
    assert found == {"batch-size": 3, "strategy": "local", "fedctta.temperature": 2.0}
    assert RunConfig.from_flat(found).fedctta.temperature == 2.0


def test_the_last_one_counts(file: Path) -> None:
    assert read_overrides([str(file), "batch-size=5", "seed=1"])["batch-size"] == 5
    assert read_overrides(["batch-size=5 seed=1", str(file)]) == read_overrides([str(file)]) | {"seed": 1}
    assert read_overrides(["batch-size=5", "batch-size=6"]) == {"batch-size": 6}


@pytest.mark.parametrize("name", ["absent.toml", "folder.toml"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    assert str(tmp_path / name) in refused(str(tmp_path / name))


@pytest.mark.parametrize(
    "content", [b"x = = 1\n", b"\xff\xfe\x00", b"corruptions = ['fog']\n", b"seed = 2020-01-01\n", b"<html></html>"]
)
def test_a_file_that_is_no_run_config(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    assert "bad.toml" in refused(str(tmp_path / "bad.toml"))


def test_a_benchmark_is_no_run_config() -> None:
    specs = list((app_root() / "configs" / "bench").glob("*.toml"))
    assert specs
    for spec in specs:
        assert refused(str(spec)) == f"--run-config {spec}: is a benchmark; run it by `fedtta bench {spec}`"


@pytest.mark.parametrize("argument", ["", "  ", "seed", "=3", "seed=", "a.yaml", "fedctta=1 fedctta.ema=0.5"])
def test_arguments_that_are_no_pairs(argument: str) -> None:
    assert repr(argument) in refused(argument)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("slots=2 seed=1 slots=0", "slots is given twice (2, 0); give it once"),
        ("head='a b' head='c'", "head is given twice ('a b', 'c'); give it once"),
        ("seed=1 strategy=fedavg", "strategy=fedavg: put it in quotes, strategy='fedavg'"),
        ("scores=tta,post", "scores=tta,post: put it in quotes, scores='tta,post'"),
        ("data-dir=/data seed=1", "data-dir=/data: put it in quotes, data-dir='/data'"),
        ("checkpoint=a.toml head=b seed=1", "checkpoint=a.toml: put it in quotes, checkpoint='a.toml'"),
        ("batch-size=10, seed=1", "batch-size=10,: separate pairs by blanks, without commas"),
        ("batch-size=10,seed=1", "batch-size=10,seed=1: separate pairs by blanks, without commas"),
        ("head='a',seed=1", ",seed=1: separate pairs by blanks, without commas"),
        ("seed=1 a=[1]", "a=[1]: allowed: a number, true, false, or a string in quotes"),
        ("seed=1 head='a", "head='a: allowed: a number, true, false, or a string in quotes"),
    ],
)
def test_the_pair_at_fault_is_named_and_what_to_do(argument: str, words: str) -> None:
    assert refused(argument) == f"--run-config: {words}"


@pytest.mark.parametrize("argument", ["batch-size=5 seed", "seed=1 --nodes 3", "seed=1 strategy='a' b"])
def test_nothing_beside_the_pairs_is_passed_over(argument: str) -> None:
    assert repr(argument) in refused(argument)


def test_one_bad_argument_among_good_ones_is_named(file: Path) -> None:
    assert "'seed='" in refused(str(file), "seed=", "batch-size=5")


def test_relative_places_are_of_the_folder_in_which_the_command_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"checkpoint", "data-dir", "state-dir", "tgfl.natural-dir"}
    found = absolute_paths(dict.fromkeys(keys, "here/x") | {"model": "here/x"})
    assert found == dict.fromkeys(keys, str(tmp_path / "here" / "x")) | {"model": "here/x"}


NOBODY = "~nobody-of-this-name"


@pytest.mark.parametrize("key", ["output-dir", "state-dir", "data-dir", "checkpoint", "resume"])
def test_a_home_of_nobody_is_named_by_its_key(monkeypatch: pytest.MonkeyPatch, capsys, key: str) -> None:
    assert told(monkeypatch, capsys, "run", "--run-config", f"{key}='{NOBODY}/x'") == (
        f"error: {key} = '{NOBODY}/x': {NOBODY} stands for no home on this machine; allowed: ~/... or a path without ~"
    )


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["run", "--output"], "--output"),
        (["run", "--resume"], "--resume"),
        (["bench"], "SPEC"),
        (["report"], "RUN|BENCH"),
        (["data", "show", "--output"], "--output"),
        (["new", "adapter", "my_method", "--directory"], "--directory"),
        (["serve", "--certificates"], "--certificates"),
        (["serve", "--insecure", "--state-dir"], "--state-dir"),
        (["join", "fed", "--client", "a", "--insecure", "--predictions-dir"], "--predictions-dir"),
    ],
)
def test_a_home_of_nobody_is_named_by_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path, command: list[str], name: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    text = told(monkeypatch, capsys, *command, f"{NOBODY}/x")
    assert text.startswith(f"error: {name} {NOBODY}/x: {NOBODY} stands for no home on this machine")


def test_a_home_at_the_server_is_not_looked_for_here() -> None:
    """It stands for the server's user; and nothing has been started yet when an absent server is what is wrong."""
    with pytest.raises(FederationError, match=r"^flwr run: "):
        run_deployment({"data-dir": f"{NOBODY}/x", "output-dir": f"{NOBODY}/y"}, "127.0.0.1:1", None)


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that fails, in this process; return the one line that is not a warning."""
    monkeypatch.setattr("sys.argv", ["fedtta", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: --insecure")]
    return line


def test_a_run_goes_on_with_the_config_that_it_had(run_local: Callable[..., Any]) -> None:
    run = run_local(rounds=1, strategy="fedavg")
    had = RunConfig.from_flat(TINY | {"rounds": 1, "strategy": "fedavg", "output-dir": str(run.path)})
    assert resumed(run.path) == had.to_flat() | {"resume": str(run.path)}


def test_a_file_that_may_not_be_read_is_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("fedtta_flwr.run_config.parse_config_args", locked)
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\); see to its rights$"):
        read_overrides([str(file)])
