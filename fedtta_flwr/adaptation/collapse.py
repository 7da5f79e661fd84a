"""Collapse: a model that learns from its own predictions can end with one class for all images.

No label is needed to see it. Where all is well the mean prediction is spread over the classes that are met, however
sure each prediction is; of a model that has collapsed it has next to no entropy. A stream that shows one class for some
hundred images looks the same, so what follows from it is up to who runs the federation.
"""

import math

import torch
from torch import Tensor

#: samples; the weight of older ones falls by a factor e for each such number
WINDOW = 200
#: an evenness below it is a collapse: one of ten classes has more than 91 % of the mean prediction
COLLAPSED = 0.2


def no_predictions(classes: int, device: torch.device) -> Tensor:
    """Return the sums [K + 1] of before the first prediction."""
    return torch.zeros(classes + 1, device=device)


def predicted(sums: Tensor, logits: Tensor) -> Tensor:
    """Return the sums after another batch.

    Parameters
    ----------
    sums : Tensor [K + 1]
        Of predictions, and of samples; the older, the less their weight.
    logits : Tensor [B, K]
        Those of a sample that are not all finite count for nothing.
    """
    p = logits.softmax(dim=1)
    known = p.isfinite().all(dim=1, keepdim=True)
    batch = torch.cat([torch.where(known, p, 0.0), known.to(p)], dim=1).sum(dim=0)
    share = (batch[-1] / WINDOW).clamp(max=1.0)
    return (1 - share) * sums + batch / batch[-1].clamp(min=WINDOW)


def evenness(sums: Tensor) -> float | None:
    """Return the entropy of the mean prediction, from 0 (one class) to 1 (all classes alike); None of few samples."""
    total = float(sums[-1])
    if total < 0.5:  # with fewer than some 0.7 * WINDOW samples a few sure predictions are no collapse
        return None
    mean = sums[:-1].double() / total
    return min(1.0, max(0.0, -float(torch.xlogy(mean, mean).sum()) / math.log(len(mean))))


def has_collapsed(sums: Tensor) -> bool:
    """Return whether hardly anything but one class is predicted."""
    found = evenness(sums)
    return found is not None and found < COLLAPSED
