"""Whole runs on a GPU, and what a client tells there; `tests.pretended_cuda` runs them without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.records import from_arrays, to_arrays
from fedtta_flwr.registry import HEADS, STRATEGIES
from fedtta_flwr.workbench import Workbench, choose_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
#: 720 predictions
SMALL: dict[str, Any] = {
    "num-clients": 4,
    "batch-size": 20,
    "corruptions": "gaussian_noise,contrast,pixelate",
    "slots-per-corruption": 3,
    "shift-length": 3,
    "fedctta.noise-samples": 16,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adapter", ["bn-stats", "tent", "bbn"])
def test_a_run_has_the_accuracies_of_the_cpu(run_local: Callable[..., Any], strategy: str, adapter: str) -> None:
    """Within one point, at torch's defaults: convolutions in TF32, and random views drawn on the GPU."""
    here, there = (
        run_local(**SMALL | {"strategy": strategy, "adapter": adapter, "device": device}).summary
        for device in ("cpu", "cuda")
    )
    assert there["accuracy"].keys() == here["accuracy"].keys() >= {"source", "local", "pre", "tta", "post"}
    for score, expected in here["accuracy"].items():
        assert there["accuracy"][score]["micro"] == pytest.approx(expected["micro"], abs=1.0), score
    assert there["accuracy"]["tta"]["micro"] > 20  # one in ten is by chance
    assert there["rolled_back"] == 0


@pytest.mark.parametrize("head", HEADS)
def test_two_heads_have_the_accuracies_of_the_cpu(run_local: Callable[..., Any], head: str, tmp_path: Path) -> None:
    """Within five points, of 120 images a set: training takes many steps, each of which rounds otherwise."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 240)
    np.save(tmp_path / "labels.npy", labels)
    np.save(
        tmp_path / "images.npy",
        (rng.integers(0, 120, (240, 32, 32, 3)) + 30 * labels[:, None, None, None]).astype("u1"),
    )
    tiny = {
        "task": "tgfl", "head": head, "model": "cnn", "dataset": "arrays", "data-dir": str(tmp_path), "batch-size": 20,
        "num-clients": 4, "tgfl.train-rounds": 2, "tgfl.epochs": 1, "tgfl.learning-rate": 0.05,
    }  # fmt: skip
    here, there = (run_local(**tiny | {"device": device}).summary["accuracy"] for device in ("cpu", "cuda"))
    assert there.keys() == here.keys() >= {"tta"}
    for score, expected in here.items():
        assert there[score]["micro"] == pytest.approx(expected["micro"], abs=5.0), score


def test_the_source_model_has_the_same_fingerprint_everywhere(tiny_config: Callable[..., RunConfig]) -> None:
    """Or the server would refuse a run whose clients have different devices."""
    here, there = (Workbench(tiny_config(device=device)) for device in ("cpu", "cuda"))
    assert there.device.type == "cuda"
    assert here.fingerprint == there.fingerprint


@pytest.mark.parametrize("adapter", ["bn-stats", "roid", "bbn"])
def test_descriptors_are_those_of_the_cpu(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    """The same noise goes in. TF32 off: its ten bits of mantissa would hide an error of a part in a thousand."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = []
    for device in ("cpu", "cuda"):
        bench = Workbench(tiny_config(device=device, adapter=adapter))
        x, _ = bench.stream("client-00").batch(0)
        described = bench.describe("noise-logits", {"samples": 16}, x.to(bench.device))
        assert described is not None
        assert described.device.type == bench.device.type
        found.append(from_arrays(to_arrays({"": described}))[""])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are() -> None:
    count = torch.cuda.device_count()
    assert choose_device(f"cuda:{count - 1}").index == count - 1
    with pytest.raises(ConfigError, match=rf"device = 'cuda:{count}'.*cuda:{count - 1}$") as caught:
        choose_device(f"cuda:{count}")
    assert "\n" not in str(caught.value)
