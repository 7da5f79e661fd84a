"""What a stream of the user's own returns is looked at before anything is computed with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta_flwr.data.build import own_batch
from fedtta_flwr.errors import ConfigError

X, Y = torch.zeros(4, 3, 8, 8), np.arange(4)
KEY = f"{__name__}:stream"


class Slots:
    domains = ("fog",)

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def __len__(self) -> int:
        return 1

    def batch(self, slot: int) -> Any:
        if isinstance(self.returned, Exception):
            raise self.returned
        return self.returned


@pytest.mark.parametrize("labels", [None, Y, Y.astype(np.uint8), Y[:0]])
def test_what_is_right_passes(labels: Any) -> None:
    images = X if labels is None else X[: len(labels)]
    x, y = own_batch(KEY, Slots((images, labels)), 0, 4)
    assert x is images
    if labels is None:
        assert y is None
    else:
        assert y is not None
        assert y.dtype == np.int64
        np.testing.assert_array_equal(y, labels)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType, expected images and labels"),
        ({"x": X}, "returned dict, expected images and labels"),
        ((X.numpy(), Y), r"images are ndarray, expected a tensor, float32 \[B, 3, H, W\]"),
        ((X.double(), Y), r"images are float64 \[4, 3, 8, 8\], expected"),
        ((X[:, :1], Y), r"images are float32 \[4, 1, 8, 8\], expected"),
        ((X.permute(0, 2, 3, 1), Y), r"images are float32 \[4, 8, 8, 3\], expected"),
        ((X[0], Y), r"images are float32 \[3, 8, 8\], expected"),
        ((X, torch.arange(4)), r"labels are Tensor, expected a numpy array of integers \[4\], or None"),
        ((X, [0, 1, 2, 3]), "labels are list, expected"),
        ((X, Y / 1), r"labels are float64 \[4\], expected"),
        ((X, Y[:3]), r"labels are int64 \[3\], expected"),
        ((X, Y + 1), "labels from 1 to 4, expected 0 to 3"),
        ((X, Y - 1), "labels from -1 to 2, expected 0 to 3"),
    ],
)
def test_what_is_wrong_is_named(returned: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^stream = '{KEY}': slot 0: {words}") as caught:
        own_batch(KEY, Slots(returned), 0, 4)
    assert "\n" not in str(caught.value)


def test_what_it_raises_is_named_with_its_line() -> None:
    with pytest.raises(
        ConfigError, match=rf"^stream = '{KEY}': .* raised OSError: 17\.png .*\(test_own_batch\.py, line"
    ):
        own_batch(KEY, Slots(OSError("17.png is broken")), 0, 4)


ONE_BAD = """
import numpy as np
import torch

class Slots:
    domains = ("fog",) * 3
    def __init__(self, bad): self.bad = bad
    def __len__(self): return 3
    def batch(self, slot):
        if self.bad and slot == 1:
            raise OSError("17.png is broken")
        return torch.rand(4, 3, 32, 32), np.arange(4)

def stream(config, client): return Slots(client == "client-00")
"""


def test_a_stream_that_fails_is_its_clients_alone(
    run_local: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_bad.py").write_text(ONE_BAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", "one_bad")
    run = run_local(stream="one_bad:stream", classes=10)
    assert run.summary["finished"]
    assert list(run.summary["screened"]) == ["client-00"]
    assert "17.png is broken" in run.lines()[1]["screened"]["client-00"]
