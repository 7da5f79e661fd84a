"""Networks and heads that images of another form do not fit are named before any client is asked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models import build
from fedtta_flwr.models.checkpoints import save
from fedtta_flwr.server import check_inputs

HEADS = {"task": "tgfl", "num-clients": 2, "tgfl.train-rounds": 1}


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, Any]:
    """The keys of a run on images that are wider than high."""
    draw = np.random.default_rng(0)
    np.save(tmp_path / "images.npy", draw.integers(0, 256, (120, 32, 40, 3), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(120) % 4)
    save(build("cnn", 4), tmp_path / "cnn.safetensors", {"architecture": "cnn", "classes": "4"})
    return {"dataset": "arrays", "data-dir": str(tmp_path), "corruptions": "none", "device": "cpu"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"adapter": "entropy", "model": "cnn"}, r"model = 'cnn': for images \[1, 3, 32, 40\] it raised RuntimeError"),
        (
            HEADS | {"model": "cnn"},
            r"model = 'cnn': for images \[1, 3, 32, 40\] without its last nn\.Linear, .* it rais",
        ),
        (HEADS | {"head": "ttt"}, r"head = 'ttt': learns from rotated images, which must be square; found 32 x 40"),
    ],
)
def test_what_does_not_fit_the_images(arrays: dict[str, Any], keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    if "task" not in keys:
        keys |= {"checkpoint": str(tmp_path / "cnn.safetensors")}
    with pytest.raises(ConfigError, match=rf"^{words}") as caught:
        check_inputs(RunConfig.from_flat(arrays | keys))
    assert "\n" not in str(caught.value)


def test_two_clients_with_two_heads_need_no_groups(arrays: dict[str, Any]) -> None:
    check_inputs(RunConfig.from_flat(arrays | HEADS))
