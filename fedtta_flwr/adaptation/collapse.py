"""Collapse: a model that learns from its own predictions can end with one class for all images.

No label is needed to see it: a model that has collapsed predicts one class for nearly all images, where otherwise all
classes that are met have a share. How sure it is does not count: of a covered lens a model may make all but nothing,
the same each time. The same is seen of a source model that fails from the start, and of a stream that shows one class
for some hundred images, so what follows from it is up to who runs the federation.
"""

import torch
from torch import Tensor

#: predictions that a share is of, or those of one batch if they are more; older ones are forgotten by and by
WINDOW = 200
#: a larger share of one class in the predictions is a collapse
COLLAPSED = 0.95


def no_predictions(classes: int, device: torch.device) -> Tensor:
    """Return the sums [K + 2] of before the first prediction."""
    return torch.zeros(classes + 2, device=device)


def predicted(sums: Tensor, logits: Tensor) -> Tensor:
    """Return the sums after another batch.

    Parameters
    ----------
    sums : Tensor [K + 2]
        Of predictions by class and of all, the older the less their weight; last whether a collapse was ever absent.
    logits : Tensor [B, K]
        Those of a sample that are no prediction, NaN or infinite, count for nothing.
    """
    largest, classes = logits.max(dim=1, keepdim=True)
    known = largest.isfinite()
    by_class = (classes == torch.arange(logits.shape[1], device=logits.device)) & known
    batch = torch.cat([by_class, known], dim=1).sum(dim=0).to(sums)
    share = (batch[-1] / WINDOW).clamp(max=1.0)
    means = (1 - share) * sums[:-1] + batch / batch[-1].clamp(min=WINDOW)
    enough, collapsed = _judge(means)
    return torch.cat([means, torch.maximum(sums[-1:], (enough & ~collapsed).to(means)[None])])


def largest_share(sums: Tensor) -> float | None:
    """Return the share of one class in the predictions, from 1/K to 1; None of few samples."""
    means = sums[:-1].cpu()
    enough, _ = _judge(means)
    return min(1.0, float(means[:-1].max() / means[-1])) if enough else None


def has_collapsed(sums: Tensor) -> bool:
    """Return whether a model that once predicted more has come to predict hardly anything but one class.

    Of one that has never predicted anything else since it was the source model, it would be no use to begin anew.
    """
    _, collapsed = _judge(sums[:-1])
    return bool(collapsed & (sums[-1] > 0))


def _judge(means: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether there are enough samples, some 0.7 * `WINDOW`, and if so whether one class has nearly all."""
    enough = means[-1] >= 0.5
    return enough, enough & (means[:-1].max() > COLLAPSED * means[-1])
