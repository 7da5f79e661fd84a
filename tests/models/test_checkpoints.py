"""Checkpoints: what was saved comes back; every damaged file is one line that says what to do."""

import hashlib
import json
import os
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedtta_flwr.errors import CheckpointError
from fedtta_flwr.models import build
from fedtta_flwr.models.checkpoints import file_hash, load, save

METADATA = {"architecture": "resnet8", "classes": "10", "source": "digits"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "new folder" / "resnet8.safetensors"
    save(build("resnet8", 10, mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6]), path, METADATA)
    return path


def refused(path: Path, **expected: object) -> str:
    """Load, expect an error, and return its text, which is one line and names the path."""
    with pytest.raises(CheckpointError) as caught:
        load(path, **expected)  # type: ignore[arg-type]
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert ";" in text  # what is wrong; what to do
    return text


@pytest.mark.parametrize("name", ["resnet20-gn", "resnet8-fedtsa", "cct-4", "cnn", "wrn-40-2"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = build(name, 5, mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    save(model, tmp_path / "m.safetensors", {"architecture": name, "classes": "5"})
    before = torch.get_rng_state()
    again = load(tmp_path / "m.safetensors", architecture=name, classes=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert not again.training
    assert all(p.requires_grad and p.is_leaf for p in again.parameters())
    state, found = model.state_dict(), again.state_dict()
    assert list(state) == list(found)
    assert all(torch.equal(state[key], found[key]) for key in state)
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(model(x), again(x))


def test_a_loaded_model_does_not_depend_on_the_file(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file.read_bytes())
    model = load(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(model.head.weight, load(file).head.weight)  # type: ignore[arg-type]


def test_saving_is_atomic(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file.read_bytes())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(build("resnet8", 10), path, METADATA)
    assert path.read_bytes() == file.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.safetensors"]


def test_saving_needs_metadata(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="classes"):
        save(build("resnet8", 10), tmp_path / "m", {"architecture": "resnet8"})


def test_hash(file: Path, tmp_path: Path) -> None:
    assert file_hash(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(CheckpointError, match="cannot be read"):
        file_hash(tmp_path / "absent")


def test_absent_folder_and_empty(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "absent.safetensors")
    assert "is a folder" in refused(tmp_path)
    (tmp_path / "empty").touch()
    assert "0 bytes" in refused(tmp_path / "empty")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html>Sign in</html>", "web page"),
        (b"\n <html><body>404</body></html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "expected a safetensors file"),
        (b"x", "expected a safetensors file"),
    ],
)
def test_other_files(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    assert said in refused(tmp_path / "m")


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_are_recognised(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = build("resnet8", 10)
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=zipped)
    assert "fedtta source convert" in refused(path)


@pytest.mark.parametrize("kept", [9, 100, 5000, -1])
def test_truncated(kept: int, file: Path, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(file.read_bytes()[:kept])
    assert "damaged" in refused(tmp_path / "m")


@settings(max_examples=100, deadline=None)
@given(place=st.integers(0, 6000), byte=st.integers(0, 255))
def test_no_flipped_byte_raises_anything_else(place: int, byte: int, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[place] = byte
    broken = file.with_name("broken.safetensors")
    broken.write_bytes(content)
    message = ""
    try:
        load(broken)
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message


def test_metadata(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    state = {key: value.clone() for key, value in load(file).state_dict().items()}
    save_file(state, path)
    assert "metadata are absent" in refused(path)
    for key, value, said in [
        ("format", "other-2", "expected format fedtta-1"),
        ("architecture", "resnet9", "'resnet9' is not known"),
        ("classes", "ten", "'ten'"),
    ]:
        save_file(state, path, {**METADATA, "format": "fedtta-1", key: value})
        assert said in refused(path)


def test_another_network_than_asked(file: Path) -> None:
    assert "holds architecture 'resnet8', expected cnn" in refused(file, architecture="cnn")
    text = refused(file, classes=100)
    assert "made for 10 classes, expected 100; give another file (docs/data.md, Source models, tells how" in text
    assert "source train" not in text  # it trains on ten digits


def test_differing_tensors_are_counted_and_the_first_named(file: Path, tmp_path: Path) -> None:
    path, metadata = tmp_path / "m", {**METADATA, "format": "fedtta-1"}
    state = {key: value.clone() for key, value in load(file).state_dict().items()}
    save_file(state, path, {**metadata, "architecture": "resnet20"})
    text = refused(path)
    assert "layer1.1.conv1.weight is missing" in text
    assert re.search(r"and \d+ more", text)
    save_file({**state, "fc.weight": torch.zeros(1)}, path, metadata)
    assert "'fc.weight' is unknown" in refused(path)
    save_file({**state, "head.bias": torch.zeros(11)}, path, metadata)
    assert "head.bias is float32 [11], expected float32 [10]" in refused(path)
    save_file({**state, "head.bias": torch.zeros(10).half()}, path, metadata)
    assert "float16" in refused(path)
    del state["normalize.mean"]
    save_file(state, path, metadata)
    assert "normalize.mean is missing" in refused(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value: float, file: Path, tmp_path: Path) -> None:
    model = load(file)
    with torch.no_grad():
        model.get_parameter("head.bias")[3] = value
    save(model, tmp_path / "m", METADATA)
    assert "head.bias" in refused(tmp_path / "m")


def test_a_header_that_lies_about_its_length(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    (tmp_path / "m").write_bytes(struct.pack("<Q", 2**62) + content[8:])
    assert "damaged" in refused(tmp_path / "m")


def test_the_file_names_what_it_holds(file: Path) -> None:
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    header = json.loads(file.read_bytes()[8 : 8 + length])
    assert header["__metadata__"] == {**METADATA, "format": "fedtta-1"}
