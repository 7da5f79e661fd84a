"""`fedtta new`: what it writes is installable, tested and runs; what would be harm or nonsense is refused."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr import cli
from fedtta_flwr.registry import ADAPTERS, STRATEGIES
from fedtta_flwr.resolve import PLUGIN_VARIABLE
from tests.conftest import TINY

KINDS = {"strategy": ("nearby", "nearby.strategy:Nearby"), "adapter": ("my_biases", "my_biases.adapter:MyBiases")}


def new(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["fedtta", "new", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def package(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that has just been written."""
    name, _ = KINDS[kind]
    assert new(monkeypatch, kind, name, "--directory", str(tmp_path)) == 0
    return tmp_path / name


def start(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != PLUGIN_VARIABLE} | variables
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def fedtta_run(package: Path, output: Path, *, allow: bool, **overrides: Any) -> subprocess.CompletedProcess[str]:
    """`fedtta run` a tiny federation with the package importable, as if it were installed."""
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    pairs = [argument for key, value in (TINY | overrides).items() for argument in ("--run-config", f"{key}={value!r}")]
    allowed = {PLUGIN_VARIABLE: package.name} if allow else {}
    fedtta = str(Path(sys.executable).with_name("fedtta"))
    return start(fedtta, "run", "--output", str(output), *pairs, cwd=package, PYTHONPATH=path, **allowed)


def test_the_package_passes_its_own_tests_and_lint(package: Path) -> None:
    done = start(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    for check in (["check"], ["format", "--check"]):
        done = start(sys.executable, "-m", "ruff", *check, "--no-cache", ".", cwd=package)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_bears_the_new_name_everywhere(kind: str, package: Path) -> None:
    texts = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*") if path.is_file()}
    name, target = KINDS[kind]
    expected = {"README.md", "pyproject.toml", f"{name}/__init__.py", f"{name}/{kind}.py", f"tests/test_{kind}.py"}
    assert set(texts) == expected
    assert not any(f"my_{kind}" in text or f"My{kind.capitalize()}" in text for text in texts.values())
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    assert project["name"] == name
    assert "fedtta-flwr" in project["dependencies"]
    assert f"\"{kind}='{target}'\"" in texts["README.md"]


@pytest.mark.e2e
def test_a_written_strategy_decides_who_helps_whom(monkeypatch, tmp_path) -> None:
    name, target = KINDS["strategy"]
    assert new(monkeypatch, "strategy", name, "--directory", str(tmp_path)) == 0
    # batches large enough that their statistics tell the corruption
    done = fedtta_run(tmp_path / name, tmp_path / "run", allow=True, strategy=target, **{"batch-size": 50})
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(tmp_path / "run" / "collaboration.npz") as run:
        weights = run["weights"]
    assert weights.shape == (4, 4, 4)
    assert np.allclose(weights.sum(axis=2), 1, atol=1e-6)
    same, others = np.kron(np.eye(2), 1 - np.eye(2)) > 0, np.kron(1 - np.eye(2), np.ones((2, 2))) > 0
    assert (weights[:, same] > 0.01).all()  # who sees the same corruption
    assert (weights[:, others] < 0.001).all()


@pytest.mark.e2e
def test_a_written_adapter_adapts(monkeypatch, tmp_path) -> None:
    name, target = KINDS["adapter"]
    assert new(monkeypatch, "adapter", name, "--directory", str(tmp_path)) == 0
    done = fedtta_run(tmp_path / name, tmp_path / "run", allow=True, strategy="fedavg", adapter=target)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"]
    assert summary["rolled_back"] == 0
    assert summary["accuracy"]["tta"]["micro"] > summary["accuracy"]["source"]["micro"] + 20


def test_without_the_operators_consent_nothing_is_imported(kind: str, package: Path, tmp_path: Path) -> None:
    name, target = KINDS[kind]
    (package / name / "__init__.py").write_text("open('imported', 'w').close()\n")
    done = fedtta_run(package, tmp_path / "run", allow=False, **{kind: target})
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"{PLUGIN_VARIABLE}={name}" in done.stderr
    assert not (package / "imported").exists()
    assert not (tmp_path / "run").exists()


def test_nothing_is_overwritten(kind: str, package: Path, monkeypatch, capsys) -> None:
    changed = package / KINDS[kind][0] / f"{kind}.py"
    changed.write_text("# mine\n")
    assert new(monkeypatch, kind, package.name, "--directory", str(package.parent)) == 2
    assert "is there already" in one_line(capsys)
    assert changed.read_text() == "# mine\n"
    assert os.listdir(package.parent) == [package.name]


def test_a_dangling_link_is_not_overwritten_either(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "nearby").symlink_to("nowhere")
    assert new(monkeypatch, "strategy", "nearby", "--directory", str(tmp_path)) == 2
    assert "is there already" in one_line(capsys)
    assert (tmp_path / "nearby").is_symlink()


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    _, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *(
            (name, "no name")
            for name in ("", "Mine", "my-own", "my own", "../mine", "a.b", "_a", "a_", "a__b", "1a", "é")
        ),
        *((name, "Python has taken") for name in ("class", "lambda", "json", "typing")),
        *((name.replace("-", "_"), "ships already") for name in (*STRATEGIES, *ADAPTERS)),
        *((name, "another package") for name in ("tests", "torch", "fedtta_flwr", "flwr")),
        *((name, "its class would be called") for name in ("true", "none", "tensor")),
    ],
)
def test_a_name_that_would_not_work_is_refused(kind, name, reason, tmp_path, monkeypatch, capsys) -> None:
    assert new(monkeypatch, kind, "--directory", str(tmp_path), "--", name) == 2
    text = one_line(capsys)
    assert reason in text
    assert repr(name) in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["my_strategy", "my_adapter", "my_strategy_2", "x"])
def test_names_near_the_templates_own_are_fine(kind, name, tmp_path, monkeypatch) -> None:
    assert new(monkeypatch, kind, name, "--directory", str(tmp_path)) == 0
    module = (tmp_path / name / name / f"{kind}.py").read_text()
    compile(module, name, "exec")
    assert f"class {''.join(part.capitalize() for part in name.split('_'))}(" in module


def test_the_folder_must_be_there(kind, tmp_path, monkeypatch, capsys) -> None:
    assert new(monkeypatch, kind, "nearby", "--directory", str(tmp_path / "none")) == 2
    assert "no such folder" in one_line(capsys)
    (tmp_path / "file").touch()
    assert new(monkeypatch, kind, "nearby", "--directory", str(tmp_path / "file")) == 2
    assert "no such folder" in one_line(capsys)


def test_a_write_that_fails_leaves_nothing(kind, tmp_path, monkeypatch, capsys) -> None:
    def full(self: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert new(monkeypatch, kind, "nearby", "--directory", str(tmp_path)) == 2
    assert "No space left on device" in one_line(capsys)
    assert not list(tmp_path.iterdir())


def test_the_folder_is_open_to_whom_others_are(kind, package: Path) -> None:
    other = package.parent / "other"
    other.mkdir()
    assert package.stat().st_mode == other.stat().st_mode
