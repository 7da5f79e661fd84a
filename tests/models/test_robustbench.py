"""The bridge to the zoo: with a stand-in for the package, and with the package where installed."""

import importlib.util
import sys
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.models.convert import convert
from fedtta_flwr.models.robustbench import load_robustbench

installed = pytest.mark.skipif(
    importlib.util.find_spec("robustbench") is None, reason="the extra robustbench is not installed"
)


class Net(nn.Module):
    """A network in the zoo's style: its own normalisation, one convolution, a linear layer."""

    mu: Tensor
    sigma: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mu", torch.full((1, 3, 1, 1), 0.5))
        self.register_buffer("sigma", torch.full((1, 3, 1, 1), 0.25))
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mu) / self.sigma
        return self.fc(self.conv(x).relu().mean(dim=(2, 3)))  # type: ignore[no-any-return]


class Plain(Net):
    """The same without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        del self.mu, self.sigma

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().mean(dim=(2, 3)))  # type: ignore[no-any-return]


class Scaled(Plain):
    """Does something after its linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a stand-in in the place of robustbench, with the zoo's names and its way of loading."""

    class BenchmarkDataset(Enum):
        cifar_10 = "cifar10"

    class ThreatModel(Enum):
        corruptions = "corruptions"

    entries: dict[str, Any] = {net.__name__: {"model": net, "gdrive_id": "abc"} for net in (Net, Plain, Scaled)}
    entries["Deck"] = {"model": Net, "gdrive_id": ["a", "b"]}
    utils = ModuleType("robustbench.utils")

    def load_model(name: str, model_dir: Path, dataset: str, threat_model: str) -> nn.Module:
        model: nn.Module = entries[name]["model"]()
        model.load_state_dict(torch.load(model_dir / dataset / threat_model / f"{name}.pt"))
        return model.eval()

    def download_gdrive_new(gdrive_id: str, path: Path) -> None:
        raise ConnectionError(f"no network for {gdrive_id}")

    utils.all_models = {BenchmarkDataset.cifar_10: {ThreatModel.corruptions: entries}}  # type: ignore[attr-defined]
    utils.load_model, utils.download_gdrive_new = load_model, download_gdrive_new  # type: ignore[attr-defined]
    enums = ModuleType("robustbench.model_zoo.enums")
    enums.BenchmarkDataset, enums.ThreatModel = BenchmarkDataset, ThreatModel  # type: ignore[attr-defined]
    for name in ("robustbench", "robustbench.model_zoo", "pyautoattack", "pyautoattack.state"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "robustbench.utils", utils)
    monkeypatch.setitem(sys.modules, "robustbench.model_zoo.enums", enums)
    for name in ("autoattack", "autoattack.state"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    yield
    assert sys.modules.pop("autoattack") is sys.modules["pyautoattack"]
    assert sys.modules.pop("autoattack.state") is sys.modules["pyautoattack.state"]


def put(model: nn.Module, folder: Path, dataset: str = "cifar10", name: str | None = None) -> Path:
    """Save a network where the zoo keeps it."""
    path = folder / dataset / "corruptions" / f"{name or type(model).__name__}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return path


@pytest.mark.usefixtures("zoo")
def test_normalisation_and_head_are_taken_out_exactly(tmp_path: Path) -> None:
    net, x = Net().eval(), torch.rand(4, 3, 32, 32)
    put(net, tmp_path)
    model = load_robustbench("robustbench:Net", "cifar10", model_dir=tmp_path)
    assert torch.equal(model(x), net(x))
    assert torch.equal(model.head(model.features(x)), net(x))
    assert model.features(x).shape == (4, 8)
    assert next(iter(model.named_children()))[0] == "normalize"
    assert model.normalize.mean.flatten().tolist() == [0.5] * 3
    legacy = load_robustbench("Net", "cifar10", model_dir=tmp_path, legacy_no_norm=True)
    torch.testing.assert_close(legacy(x), net(x * 0.25 + 0.5))


@pytest.mark.usefixtures("zoo")
def test_a_network_without_normalisation(tmp_path: Path) -> None:
    net, x = Plain().eval(), torch.rand(4, 3, 32, 32)
    put(net, tmp_path)
    assert torch.equal(load_robustbench("Plain", "cifar10", model_dir=tmp_path)(x), net(x))
    with pytest.raises(ConfigError, match="no input normalisation that can be removed"):
        load_robustbench("Plain", "cifar10", model_dir=tmp_path, legacy_no_norm=True)


@pytest.mark.usefixtures("zoo")
def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = put(Plain(), tmp_path, name="Net")
    with pytest.raises(CheckpointError, match="does not fit RobustBench model Net") as caught:
        load_robustbench("Net", "cifar10", model_dir=tmp_path)
    assert "\n" not in str(caught.value)
    path.write_text("<!DOCTYPE html>")
    with pytest.raises(CheckpointError, match="web page"):
        load_robustbench("Net", "cifar10", model_dir=tmp_path)
    put(Scaled(), tmp_path)
    with pytest.raises(CheckpointError, match="linear layer"):
        load_robustbench("Scaled", "cifar10", model_dir=tmp_path)


@pytest.mark.usefixtures("zoo")
def test_an_absent_file_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_robustbench("Net", "cifar10", model_dir=tmp_path)
    text = str(caught.value)
    assert str(tmp_path / "cifar10" / "corruptions" / "Net.pt") in text
    assert "ConnectionError" in text
    assert "id=abc" in text
    assert "\n" not in text


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize(
    ("name", "dataset", "threat", "said"),
    [
        ("Other", "cifar10", "corruptions", "allowed: Net, Plain, Scaled"),
        ("Net", "cifar11", "corruptions", "no models for cifar11"),
        ("Net", "cifar10", "L3", "no models for cifar10, L3"),
        ("Deck", "cifar10", "corruptions", "is an ensemble"),
    ],
)
def test_what_the_zoo_lacks(name: str, dataset: str, threat: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_robustbench(name, dataset, threat)


def test_the_extra_is_named_when_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "robustbench", None)  # makes the import fail
    monkeypatch.setitem(sys.modules, "robustbench.utils", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[robustbench\]'") as caught:
        load_robustbench("robustbench:Standard", "cifar10")
    assert "\n" not in str(caught.value)


@installed
@pytest.mark.parametrize(
    ("name", "dataset", "classes", "architecture", "half"),
    [
        ("Standard", "cifar10", 10, "wrn-28-10", False),
        ("Hendrycks2020AugMix_WRN", "cifar100", 100, "wrn-40-2", True),
        ("Hendrycks2020AugMix_ResNeXt", "cifar100", 100, "resnext29-32x4d", True),
    ],
)
def test_the_real_zoo_agrees_with_our_networks(
    name: str, dataset: str, classes: int, architecture: str, half: bool, tmp_path: Path
) -> None:
    """Random weights in the zoo's architecture, loaded by the zoo and converted to ours."""
    with pytest.raises(CheckpointError, match="no such file"):
        load_robustbench(name, dataset, model_dir=tmp_path)
    utils = sys.modules["robustbench.utils"]
    datasets = {d.value: models for d, models in utils.all_models.items()}
    threats = {t.value: models for t, models in datasets[dataset].items()}
    net = threats["corruptions"][name]["model"]().eval()
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = net(x)
        # As published: in a wrapper's names and without the normalisation's buffers.
        state = OrderedDict(
            (f"module.{key}", value) for key, value in net.state_dict().items() if key not in ("mu", "sigma")
        )
        path = tmp_path / dataset / "corruptions" / f"{name}.pt"
        torch.save({"state_dict": state}, path)
        assert torch.equal(load_robustbench(name, dataset, model_dir=tmp_path)(x), expected)
        statistics = [0.5] * 3 if half else [0.0] * 3, [0.5] * 3 if half else [1.0] * 3
        ours, _ = convert(
            path,
            architecture=architecture,
            classes=classes,
            mean=statistics[0],
            std=statistics[1],
        )
        torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-4)
