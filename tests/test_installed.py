"""Copies of the app that Flower has installed, perhaps half: a node that starts has none."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedtta_flwr.control import environment
from fedtta_flwr.installed import APP

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", ["supernode", "superlink"])
def test_a_node_that_starts_has_no_copy_of_an_earlier_run(tmp_path: Path, module: str) -> None:
    half, other = (tmp_path / "apps" / name for name in (f"{APP}.0.1.0.c4ea87ca", "somebody.app.1.0.0.12345678"))
    for folder in (half, other):
        (folder / "package").mkdir(parents=True)
        (folder / "package" / "__init__.py").touch()
    command = [sys.executable, "-m", f"fedtta_flwr.{module}", "--help"]
    subprocess.run(command, env=environment(tmp_path), check=True, capture_output=True)
    assert list((tmp_path / "apps").iterdir()) == [other]
    assert (other / "package" / "__init__.py").exists()


def test_the_app_has_this_name() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"{about['tool']['flwr']['app']['publisher']}.{about['project']['name']}" == APP
