"""Names that become classes, those of the user's own if the operator allows it."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.registry import ADAPTERS
from fedtta_flwr.resolve import PLUGIN_VARIABLE, call, check_name, make, resolve

PLUGIN = "fedtta_test_plugin_package.module:Mine"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the user's own; a marker file tells whether it was imported."""
    package = tmp_path / "fedtta_test_plugin_package"
    package.mkdir()
    marker = tmp_path / "imported"
    (package / "__init__.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    (package / "module.py").write_text("class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(PLUGIN_VARIABLE, raising=False)
    yield marker
    for name in [name for name in sys.modules if name.startswith("fedtta_test_plugin_package")]:
        del sys.modules[name]


def refused(name: str, use: object = resolve) -> str:
    with pytest.raises(ConfigError) as caught:
        use("adapter", name, ADAPTERS)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["tented", "", "Entropy", "bn_stats", "entropy ", "os.path", "os:", "os:a b", "os:a.b"]
)
def test_an_unknown_name_is_refused_with_those_allowed(name: str) -> None:
    for use in (check_name, resolve):
        assert "source, bn-stats, entropy" in refused(name, use)


@pytest.mark.parametrize(
    ("kind", "known", "allowed"),
    [
        ("head", {"a": "", "b": ""}, "a, b, or package.module:Class of your own (see `fedtta list`)"),
        ("model", {"a": ""}, "a, or package.module:function of your own (see `fedtta list`)"),
        ("stream", {}, "package.module:function of your own"),
    ],
)
def test_what_is_allowed_is_said_as_what_it_is(kind: str, known: dict[str, str], allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_name(kind, "mine", known)
    assert str(caught.value) == f"{kind} = 'mine': unknown; allowed: {allowed}"


@pytest.mark.parametrize(
    "permitted", [None, "", "other", "fedtta_test_plugin", "fedtta_test_plugin_package.module", "*"]
)
def test_a_plugin_is_not_imported_without_consent(
    plugin: Path, monkeypatch: pytest.MonkeyPatch, permitted: str | None
) -> None:
    if permitted is not None:
        monkeypatch.setenv(PLUGIN_VARIABLE, permitted)
    text = refused(PLUGIN)
    assert f"{PLUGIN_VARIABLE}=fedtta_test_plugin_package" in text
    assert permitted is None or permitted in text
    assert not plugin.exists()


@pytest.mark.parametrize("permitted", ["fedtta_test_plugin_package", "other, fedtta_test_plugin_package ,"])
def test_a_plugin_is_imported_with_consent(plugin: Path, monkeypatch: pytest.MonkeyPatch, permitted: str) -> None:
    monkeypatch.setenv(PLUGIN_VARIABLE, permitted)
    assert check_name("adapter", PLUGIN, ADAPTERS) == PLUGIN
    assert not plugin.exists()  # checking a name imports nothing
    assert resolve("adapter", PLUGIN, ADAPTERS).__name__ == "Mine"
    assert plugin.exists()


@pytest.mark.parametrize("name", ["fedtta_test_plugin_package.none:Mine", "fedtta_test_plugin_package.module:Other"])
def test_a_plugin_that_is_not_there(plugin: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(PLUGIN_VARIABLE, "fedtta_test_plugin_package")
    assert "cannot be imported" in refused(name)


def test_what_a_plugin_meets_in_our_code_is_said_with_its_name(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGIN_VARIABLE, "fedtta_test_plugin_package")
    (plugin.parent / "fedtta_test_plugin_package" / "module.py").write_text(
        "from fedtta_flwr.adaptation.optimizer import Optimizer\n\n\n"
        "class Mine:\n    def __init__(self):\n        Optimizer([], 'sgd', learning_rate=0.1)\n"
    )
    with pytest.raises(ConfigError) as caught:
        make("adapter", PLUGIN, ADAPTERS, object)
    assert str(caught.value) == (
        f"adapter = '{PLUGIN}': optimizer: parameters of one dtype are needed, found no parameter"
    )


EXITS = "raise SystemExit({code})"
CALLED = "def Mine():\n    raise SystemExit({code})"


@pytest.mark.parametrize("source", [EXITS, CALLED])
def test_a_plugin_does_not_end_the_process_unless_a_signal_does(
    plugin: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv(PLUGIN_VARIABLE, "fedtta_test_plugin_package")
    module = plugin.parent / "fedtta_test_plugin_package" / "module.py"

    def use() -> None:
        call("stream", PLUGIN, resolve("stream", PLUGIN, {}))

    module.write_text(source.format(code=0))  # as a script does that is imported
    with pytest.raises(ConfigError, match=rf"^stream = '{PLUGIN}': .*SystemExit: 0") as caught:
        use()
    assert "\n" not in str(caught.value)
    sys.modules.pop("fedtta_test_plugin_package.module", None)
    module.write_text(source.format(code="143 "))  # as our handler of SIGTERM does, wherever it finds us
    with pytest.raises(SystemExit) as ended:
        use()
    assert ended.value.code == 143


def test_an_empty_module_is_never_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGIN_VARIABLE, ",,")
    refused(":Mine")


def test_names_can_be_had_without_torch_or_flower() -> None:
    code = "import sys; import fedtta_flwr.resolve as _; sys.exit(bool({'torch', 'flwr'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
