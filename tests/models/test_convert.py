"""Foreign checkpoints: real ones keep their accuracy, dangerous and unfitting ones are refused."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.errors import CheckpointError
from fedtta_flwr.models import build
from fedtta_flwr.models.checkpoints import load, save
from fedtta_flwr.models.convert import convert

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data at {SHARED}")

AKAMASTER = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CHENYAOFO_10 = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
CHENYAOFO_100 = ((0.5070, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761))
REAL: dict[str, tuple[str, int, Any]] = {
    "akamaster_resnet20-12fca82f.th": ("resnet20-a", 10, AKAMASTER),
    "akamaster_resnet56-4bfd9763.th": ("resnet56-a", 10, AKAMASTER),
    "chenyaofo_cifar10_resnet20.pth": ("resnet20", 10, CHENYAOFO_10),
    "chenyaofo_cifar10_resnet56.pth": ("resnet56", 10, CHENYAOFO_10),
    "chenyaofo_cifar100_resnet20.pth": ("resnet20", 100, CHENYAOFO_100),
    "chenyaofo_cifar100_resnet56.pth": ("resnet56", 100, CHENYAOFO_100),
}


def converted(path: Path, architecture: str = "resnet8", classes: int = 10) -> Any:
    return convert(path, architecture=architecture, classes=classes, mean=[0.5] * 3, std=[0.2] * 3)


def refused(path: Path, architecture: str = "resnet8", classes: int = 10) -> str:
    """Convert, expect an error, and return its text, which is one line and names the path."""
    with pytest.raises(CheckpointError) as caught:
        converted(path, architecture, classes)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def foreign(architecture: str = "resnet8", classes: int = 10) -> dict[str, Tensor]:
    """A state dict as others write it: no normalisation, the last layer called fc."""
    state = build(architecture, classes).state_dict()
    return {re.sub("^head", "fc", key): value for key, value in state.items() if not key.startswith("normalize")}


@needs_data
@pytest.mark.parametrize("name", REAL)
def test_real_files(name: str, tmp_path: Path) -> None:
    architecture, classes, (mean, std) = REAL[name]
    path = SHARED / "checkpoints" / name
    model, renames = convert(path, architecture=architecture, classes=classes, mean=mean, std=std)
    last = "linear" if "akamaster" in name else "fc"
    assert (f"{last}.weight", "head.weight") in renames
    assert (("module.*", "*") in renames) == ("akamaster" in name)
    assert (("best_prec1", "(not a weight)") in renames) == ("akamaster" in name)
    save(model, tmp_path / "m", {"architecture": architecture, "classes": str(classes)})
    assert torch.equal(load(tmp_path / "m").get_parameter("head.bias"), model.get_parameter("head.bias"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Tensor]:
    """The first 1,000 CIFAR-10 test images [1000, 3, 32, 32] in [0, 1] and their labels."""
    folder = tmp_path_factory.mktemp("cifar10")
    subprocess.run([sys.executable, SHARED / "unpack.py", folder, "cifar10"], check=True)
    with (folder / "cifar-10-batches-py" / "test_batch").open("rb") as file:
        batch = pickle.load(file, encoding="bytes")
    pixels = torch.from_numpy(batch[b"data"][:1000]).view(-1, 3, 32, 32) / 255
    return pixels, torch.tensor(batch[b"labels"][:1000])


@needs_data
@pytest.mark.parametrize(
    ("name", "accuracy"),
    [("akamaster_resnet20-12fca82f.th", 0.9173), ("chenyaofo_cifar10_resnet20.pth", 0.9260)],
)
def test_real_accuracy(name: str, accuracy: float, images: tuple[Tensor, Tensor]) -> None:
    architecture, classes, (mean, std) = REAL[name]
    model, _ = convert(
        SHARED / "checkpoints" / name,
        architecture=architecture,
        classes=classes,
        mean=mean,
        std=std,
    )
    x, y = images
    with torch.no_grad():
        logits = torch.cat([model(x[i : i + 100]) for i in range(0, len(x), 100)])
    right = int((logits.argmax(1) == y).sum())
    # Published on 10,000 images, here on 1,000 of them: three standard errors of that difference.
    tolerance = 3 * (accuracy * (1 - accuracy) * (1 / 1000 - 1 / 10_000)) ** 0.5
    assert right / 1000 == pytest.approx(accuracy, abs=tolerance)


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "model", "net"])
@pytest.mark.parametrize("prefix", ["", "module.", "module.model.", "model.module.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_and_prefixes(wrapper: str | None, prefix: str, tmp_path: Path) -> None:
    state: Any = {prefix + key: value for key, value in foreign().items()}
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 7}, tmp_path / "m.pt")
    model, renames = converted(tmp_path / "m.pt")
    assert torch.equal(model.head.weight, state[f"{prefix}fc.weight"])
    assert (("epoch", "(not a weight)") in renames) == (wrapper is not None)
    assert model.normalize.std.flatten().tolist() == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in foreign().items()}
    torch.save(state, tmp_path / "m.pt")
    model, renames = converted(tmp_path / "m.pt")
    assert (f"* in {dtype}", "* in torch.float32") in renames
    assert torch.equal(model.head.weight, state["fc.weight"].float())


def test_what_is_missing_is_told_beside_what_is_unknown(tmp_path: Path) -> None:
    torch.save({f"backbone.{key}": value for key, value in foreign().items()}, tmp_path / "m.pt")
    assert re.search(r"[a-z0-9.]+ is missing; 'backbone\.[a-z0-9.]+' is unknown", refused(tmp_path / "m.pt"))


def test_counters_that_old_files_lack_are_separate_zeros(tmp_path: Path) -> None:
    state = {k: v for k, v in foreign().items() if not k.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "m.pt")
    model, renames = converted(tmp_path / "m.pt")
    assert ("(absent)", "*.num_batches_tracked = 0") in renames
    model.train()(torch.rand(2, 3, 32, 32))
    counts = {int(v) for k, v in model.state_dict().items() if k.endswith("num_batches_tracked")}
    assert counts == {1}


@pytest.mark.parametrize(
    ("architecture", "spelling"),
    [
        ("wrn-40-2", [(r"(block\d)\.", r"\1.layer."), ("shortcut", "convShortcut")]),
        (
            "resnext29-32x4d",
            [
                (r"(layer\d\.\d\.)conv1", r"\1conv_reduce"),
                (r"(layer\d\.\d\.)bn1", r"\1bn_reduce"),
                (r"(layer\d\.\d\.)conv2", r"\1conv_conv"),
                (r"(layer\d\.\d\.)bn2", r"\1bn"),
                (r"(layer\d\.\d\.)conv3", r"\1conv_expand"),
                (r"(layer\d\.\d\.)bn3", r"\1bn_expand"),
                (r"^conv1", "conv_1_3x3"),
                (r"^bn1", "bn_1"),
                (r"^layer", "stage_"),
                (r"^fc", "classifier"),
            ],
        ),
    ],
)
def test_published_spellings(architecture: str, spelling: list[tuple[str, str]], tmp_path: Path) -> None:
    state = foreign(architecture)
    other = {}
    for name, value in state.items():
        key = name
        for pattern, replacement in spelling:
            key = re.sub(pattern, replacement, key)
        other[key] = value
    torch.save({"state_dict": other}, tmp_path / "m.pt")
    model, _ = converted(tmp_path / "m.pt", architecture)
    found = model.state_dict()
    assert all(torch.equal(found[re.sub("^fc", "head", key)], state[key]) for key in state)


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_a_pickle_that_runs_code_is_refused_without_running(form: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "m.pt"
    trap = {"state_dict": {**foreign(), "extra": Trap(marker)}}
    if form == "bare":
        path.write_bytes(pickle.dumps(trap, protocol=2))
    else:
        torch.save(trap, path, _use_new_zipfile_serialization=form == "zip")
    assert "refused" in refused(path) or form == "bare"
    with pytest.raises(CheckpointError):
        load(path)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Trap(marker)))
    assert marker.exists()  # so the trap would have worked


def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "m.pt")
    assert "torch.nn.modules.linear.Linear" in refused(tmp_path / "m.pt")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.zeros(1)], "holds a list"),
        ({}, "holds an empty mapping"),
        ({"epoch": 3}, "epoch is a int"),
        ({"weights": {"a": torch.zeros(1)}}, "weights is a dict"),
        ({"a": torch.zeros(3).to_sparse()}, "a is sparse or without values"),
        ({"a": torch.zeros(3, device="meta")}, "a is sparse or without values"),
    ],
)
def test_what_is_no_state_dict(content: object, said: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "m.pt")
    assert said in refused(tmp_path / "m.pt")


@pytest.mark.parametrize("content", [b"no checkpoint", b"PK\x03\x04 damaged", b"\x80\x02", b"<html>"])
def test_damaged_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(content)
    assert "weights_only" not in refused(tmp_path / "m.pt")  # torch's advice is to let the file run code


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "absent.pt")
    assert "is a folder" in refused(tmp_path)


def test_differences_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(foreign(), path)
    assert "layer1.1.conv1.weight is missing" in refused(path, "resnet20")
    assert "head.weight is float32 [10, 64], expected float32 [100, 64]" in refused(path, classes=100)
    torch.save({**foreign(), "aux.weight": torch.zeros(2)}, path)
    assert "'aux.weight' is unknown" in refused(path)
    torch.save({**foreign(), "linear.bias": torch.zeros(10)}, path)
    assert "two tensors would be called head.bias" in refused(path)
    state = foreign()
    state["fc.bias"][0] = float("nan")
    torch.save(state, path)
    assert "NaN or infinite values in head.bias" in refused(path)


def test_a_file_that_says_itself_how_to_normalise_goes_before_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(build("resnet8", 10, mean=[0.1, 0.2, 0.3], std=[0.2] * 3).state_dict(), path)
    assert "holds normalize.mean = 0.1,0.2,0.3, --mean is 0.5,0.5,0.5; allowed: what it holds" in refused(path)
    model, renames = convert(path, architecture="resnet8", classes=10, mean=[0.1, 0.2, 0.3], std=[0.2] * 3)
    assert renames == []
    assert model.normalize.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
