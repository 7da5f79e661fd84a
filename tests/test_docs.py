"""What the documents show runs as it stands there."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta_flwr.models.trial import try_own
from tests.conftest import ROOT, TINY

#: the first line of a block of Python says which file it is
FILE = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package of docs/strategies.md, in a folder of its own."""
    files = FILE.findall((ROOT / "docs" / "strategies.md").read_text())
    assert [path for path, _ in files] == ["my_package/mine.py", "tests/test_mine.py"]
    for path, text in files:
        file = tmp_path / "folder" / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return tmp_path / "folder"


def start(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path} | variables
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_the_test_of_the_example_passes(package: Path) -> None:
    done = start(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_network_is_trained_for_data_of_ones_own_as_shown(tmp_path: Path) -> None:
    shown, name = (ROOT / "docs" / "data.md").read_text(), "train.py"
    (tmp_path / name).write_text(dict(FILE.findall(shown))[name])
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        np.save(tmp_path / part / "images.npy", rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8))
        np.save(tmp_path / part / "labels.npy", np.arange(40) % 5)
    assert start(sys.executable, name, folder=tmp_path).returncode == 0
    fedtta = [sys.executable, "-c", "from fedtta_flwr.cli import main; main()"]
    commands = [shlex.split(line) for line in re.findall(r"^fedtta (.*mine\.safetensors.*)$", shown, re.MULTILINE)]
    tiny = " ".join(f"{key}={value!r}" for key, value in TINY.items())
    more = [[], ["--run-config", tiny, "--output", "run"]]
    assert [command[0] for command in commands] == ["source", "run"]
    for command, further in zip(commands, more, strict=True):
        done = start(*fedtta, *command, *further, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


def test_the_network_of_ones_own_can_be_used() -> None:
    files, found = dict(FILE.findall((ROOT / "docs" / "data.md").read_text())), dict[str, Any]()
    exec(files["my_package/nets.py"], found)
    try_own("my_package.nets:net", found["net"](5).eval(), torch.rand(1, 3, 64, 64), 5)


@pytest.mark.parametrize(
    ("document", "name", "flags"),
    [
        ("data", "my_package/mine.py", {"stream": "my_package.mine:stream", "classes": 10}),
        ("adapters", "my_package/replay.py", {"adapter": "my_package.replay:Replay"}),
        ("two-heads", "my_package/my_module.py", {"task": "tgfl", "head": "my_package.my_module:MyHead"}),
    ],
)
def test_what_is_ones_own_runs_as_shown(document: str, name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "my_package").mkdir()
    text = dict(FILE.findall((ROOT / "docs" / f"{document}.md").read_text()))[name]
    (tmp_path / name).write_text(text)
    tiny = TINY | {"tgfl.train-rounds": 1, "checkpoint": ""} if document == "two-heads" else TINY
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in (tiny | flags).items())
    fedtta = [sys.executable, "-c", "from fedtta_flwr.cli import main; main()", "run", "--output", "run"]
    done = start(*fedtta, "--run-config", config, folder=tmp_path, FEDTTA_PLUGINS="my_package")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] is True
    assert not summary["screened"]  # a client that fails at every visit ends no run


def test_a_run_directory_is_read_as_shown(run_local: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_local(rounds=2)
    (shown,) = re.findall(r"^```python\n(run = .*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {"np": np, "json": json}
    exec(shown.replace("RUN", str(run.path)), found)
    assert found["accuracy"].shape == (2, 4)
    expected = [line["accuracy"]["post"] for line in found["lines"]]
    np.testing.assert_allclose(found["accuracy"].mean(axis=1), expected)


def test_a_script_comes_to_a_clients_local_score(
    run_local: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = (ROOT / "docs" / "adapters.md").read_text()
    (script,) = re.findall(
        r"^```python\n(from fedtta_flwr\.config import RunConfig\n.*?)^```$", shown, re.DOTALL | re.MULTILINE
    )
    tiny = TINY | {"adapter": "tent", "scores": "local", "strategy": "local"}
    script, count = re.subn(r"from_flat\(\{.*?\}\)", f"from_flat({tiny!r})", script)
    assert count == 1
    exec(script, {})
    expected = run_local(**tiny).summary["accuracy"]["local"]["per_client"]["client-00"]
    assert capsys.readouterr().out.splitlines()[0] == str(expected)


@pytest.mark.e2e
def test_the_example_runs_by_its_command(package: Path, tmp_path: Path) -> None:
    shown = (ROOT / "docs" / "strategies.md").read_text()
    command = re.search(r"^(FEDTTA_PLUGINS)=(\w+) fedtta (run) (--run-config) \"(.*)\"$", shown, re.MULTILINE)
    assert command is not None
    variable, allowed, *arguments = command.groups()
    # batches large enough that the nearest is who sees the same corruption
    tiny = [f"{key}={value!r}" for key, value in (TINY | {"batch-size": 50}).items()]
    arguments += ["--run-config", " ".join(tiny), "--output", str(tmp_path / "run")]
    done = start(str(Path(sys.executable).with_name("fedtta")), *arguments, folder=package, **{variable: allowed})
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(tmp_path / "run" / "collaboration.npz") as run:
        weights = run["weights"]
    pair = np.full((2, 2), 0.5)
    expected = np.block([[pair, np.zeros((2, 2))], [np.zeros((2, 2)), pair]])  # clients 0, 1 and 2, 3 see the same
    assert weights.shape == (4, 4, 4)
    assert (weights == expected).all()
