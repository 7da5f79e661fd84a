"""Reference accuracies that a build of the corruptions is checked against.

They come from an independent build of the recipe on the official CIFAR-10 test images at severity
5 and a ResNet-20 trained on clean CIFAR-10 (akamaster's pytorch_resnet_cifar10, checkpoint
resnet20-12fca82f), in per cent. Column "none" uses the network's running statistics; in "bnB" every
BatchNorm layer normalises with the statistics of the current batch of B images, in data set order.
none and bn200 cover all 10,000 images. So do bn10 and bn50 in the first five rows; in the others
they cover the first 2,500 and 5,000 (standard error about 1.0 and 0.7 points).
"""

from collections.abc import Mapping
from typing import NamedTuple

from fedtta_flwr.data.corruptions import CORRUPTIONS
from fedtta_flwr.errors import DataError

COLUMNS = ("none", "bn10", "bn50", "bn200")

#: Corruption -> column -> accuracy in per cent.
REFERENCE: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(COLUMNS, accuracies, strict=True))
    for name, accuracies in {
        "clean": (91.73, 83.34, 87.69, 88.43),
        "gaussian_noise": (23.71, 53.50, 57.41, 57.83),
        "shot_noise": (30.17, 53.96, 58.18, 58.93),
        "impulse_noise": (23.09, 49.11, 52.62, 53.39),
        "defocus_blur": (58.45, 75.75, 80.86, 82.05),
        "glass_blur": (42.56, 52.32, 56.00, 57.11),
        "motion_blur": (59.38, 72.36, 77.96, 78.84),
        "zoom_blur": (59.17, 74.00, 79.82, 80.58),
        "snow": (68.41, 65.32, 70.36, 71.46),
        "frost": (53.82, 62.92, 67.92, 69.20),
        "fog": (66.02, 70.80, 76.46, 77.36),
        "brightness": (86.88, 78.64, 83.28, 84.60),
        "contrast": (26.60, 72.56, 77.52, 78.64),
        "elastic_transform": (70.12, 65.28, 69.50, 70.77),
        "pixelate": (39.30, 63.68, 69.54, 71.14),
        "jpeg_compression": (70.26, 62.92, 67.10, 68.29),
    }.items()
}

#: How far a faithful build may be from the reference, in points: one corruption, and their mean.
TOLERANCE = 2.0
MEAN_TOLERANCE = 0.7


class Row(NamedTuple):
    """One line of a comparison; accuracies in per cent, the difference in points."""

    name: str
    measured: float
    reference: float
    difference: float
    within: bool


def compare(measured: Mapping[str, float], column: str = "none") -> list[Row]:
    """Compare measured accuracies with the reference.

    Parameters
    ----------
    measured : mapping of str to float
        Corruption (or "clean") -> accuracy in per cent at severity 5.
    column : {"none", "bn10", "bn50", "bn200"}
        How the network normalised.

    Returns
    -------
    list of Row
        One per measured name, in the order of `REFERENCE`, within `TOLERANCE` or not; then, if any
        corruption was measured, "mean": that of the measured corruptions, without "clean", within
        `MEAN_TOLERANCE` or not.

    Raises
    ------
    DataError
        The column or a measured name is not in the reference.
    """
    if column not in COLUMNS:
        raise DataError(f"column: {column!r} is not known: one of {', '.join(COLUMNS)}")
    unknown = [name for name in measured if name not in REFERENCE]
    if unknown:
        raise DataError(f"measured: {unknown[0]!r} has no reference: only {', '.join(REFERENCE)} have one")

    rows = [
        _row(name, measured[name], accuracies[column], TOLERANCE)
        for name, accuracies in REFERENCE.items()
        if name in measured
    ]
    corrupted = [row for row in rows if row.name in CORRUPTIONS]
    if corrupted:
        mean = sum(row.measured for row in corrupted) / len(corrupted)
        reference = sum(row.reference for row in corrupted) / len(corrupted)
        rows.append(_row("mean", mean, reference, MEAN_TOLERANCE))
    return rows


def _row(name: str, measured: float, reference: float, tolerance: float) -> Row:
    difference = measured - reference
    return Row(name, measured, reference, difference, abs(difference) <= tolerance)
