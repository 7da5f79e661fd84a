"""From a run config to a strategy."""

import pytest

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.server import federation, make_strategy
from fedtta_flwr.strategies.fedctta import FedCTTA


def test_a_name_becomes_its_strategy() -> None:
    assert isinstance(make_strategy(RunConfig()), FedCTTA)


def test_a_plugin_that_is_no_strategy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", "collections")
    with pytest.raises(ConfigError, match=r"collections:Counter.*PersonalizedStrategy"):
        make_strategy(RunConfig(strategy="collections:Counter"))


def test_a_plugin_that_raises_on_import_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "raising_on_import.py").write_text("raise RuntimeError('first line\\nsecond line')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", "raising_on_import")
    with pytest.raises(ConfigError, match="RuntimeError: first line second line") as caught:
        make_strategy(RunConfig(strategy="raising_on_import:Mine"))
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_file_is_found_before_a_run_directory_is_made(tmp_path) -> None:
    broken = tmp_path / "page.safetensors"
    broken.write_text("<!DOCTYPE html><html>not found</html>")
    output = tmp_path / "run"
    with (
        pytest.raises(Exception, match="web page") as caught,
        federation({"checkpoint": str(broken), "output-dir": str(output)}),
    ):
        pytest.fail("the run began")
    assert "\n" not in str(caught.value)
    assert not output.exists()
