"""The accuracy of a network on every corruption of a set: what a rebuilt set is judged by."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np

from fedtta_flwr.data.contracts import TestSet, to_tensor
from fedtta_flwr.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

#: column of the reference -> (batch size, whether BatchNorm normalises with the batch's own statistics)
MODES = {"none": (250, False), "bn200": (200, True)}


def accuracies(
    data: TestSet,
    model: "nn.Module",
    corruptions: Sequence[str],
    severity: int,
    column: str = "none",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Return corruption -> accuracy in per cent over all images, in data set order.

    Parameters
    ----------
    data : TestSet
        Images of N rows.
    model : nn.Module
        In eval mode; maps [B, 3, H, W] in [0, 1] to logits; left as it was.
    corruptions : sequence of str
        Names; "clean" stands for the images without corruption.
    severity : int
        1 to 5.
    column : {"none", "bn200"}
        Running statistics, or those of batches of 200.
    progress : callable
        Receives (images seen, images in all).

    Raises
    ------
    ConfigError
        There is no such column.
    """
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    if column not in MODES:
        raise ConfigError(f"column {column!r}: unknown; allowed: {', '.join(MODES)}")
    batch, adaptive = MODES[column]
    if adaptive:
        model = deepcopy(model)
        for m in model.modules():
            if isinstance(m, _BatchNorm):
                m.train()
    count, seen = len(data.labels), 0
    result: dict[str, float] = {}
    for name in corruptions:
        images = data.images("none" if name == "clean" else name, severity)
        correct = 0
        for start in range(0, count, batch):
            rows = np.arange(start, min(start + batch, count))
            x = to_tensor(images[rows])
            with torch.no_grad():
                predicted = model(x).argmax(dim=1).numpy()
            correct += int((predicted == data.labels[rows]).sum())
            seen += len(rows)
            progress(seen, count * len(corruptions))
        result[name] = 100 * correct / count
    return result
