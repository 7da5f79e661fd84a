import pytest
import torch

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.digits import test_part as digits_test_part
from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.models import source
from fedtta_flwr.models.checkpoints import load


def accuracy(model: torch.nn.Module) -> float:
    images, labels = digits_test_part()
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    with torch.inference_mode():
        return 100 * (model(x).argmax(dim=1).numpy() == labels).mean()


def test_the_shipped_checkpoint_is_found_small_and_good(monkeypatch):
    monkeypatch.setattr(source, "train_digits", lambda *_, **__: pytest.fail("trained although it ships"))
    path = source.embedded_checkpoint()
    assert path.name == source.EMBEDDED_FILE
    assert path.stat().st_size < 500_000
    assert accuracy(load(path)) > 97


def test_another_file_of_that_name_is_not_taken(monkeypatch, tmp_path):
    other = tmp_path / source.EMBEDDED_FILE
    other.write_bytes(source.embedded_checkpoint().read_bytes() + b" ")
    real = source._candidates()
    monkeypatch.setattr(source, "_candidates", lambda: [other, *real])
    assert source.embedded_checkpoint() in real


def test_where_it_does_not_ship_it_is_trained_once_and_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(source, "_candidates", list)
    said: list[str] = []
    path = source.embedded_checkpoint(said.append)
    assert path.parent == tmp_path / "fedtta"
    assert len(said) == 1
    made = path.stat().st_mtime_ns
    assert accuracy(load(path, architecture="resnet8", classes=10)) > 95
    assert source.embedded_checkpoint(said.append) == path
    assert path.stat().st_mtime_ns == made
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_training_is_reproducible_and_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for name in ("a", "b"):
        source.train_digits(tmp_path / name, "resnet8", epochs=1, seed=3)
    assert torch.equal(torch.rand(3), expected)
    a, b = load(tmp_path / "a").state_dict(), load(tmp_path / "b").state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"model": "resnet20"}, ConfigError, ["checkpoint is empty", "resnet20"]),
        ({"checkpoint": "/nowhere/x.safetensors"}, CheckpointError, ["/nowhere/x.safetensors"]),
    ],
)
def test_no_source_model(overrides, error, words):
    with pytest.raises(error) as caught:
        source.load_source(RunConfig.from_flat(overrides), 10)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_a_checkpoint_of_another_architecture_or_of_other_classes_is_refused():
    config = RunConfig.from_flat({"checkpoint": str(source.embedded_checkpoint()), "model": "resnet20"})
    with pytest.raises(CheckpointError, match="resnet8"):
        source.load_source(config, 10)
    config = RunConfig.from_flat({"checkpoint": str(source.embedded_checkpoint())})
    with pytest.raises(CheckpointError, match="10"):
        source.load_source(config, 100)
