"""The five frost photographs, which the project does not carry."""

import functools
import importlib.metadata
import os
from pathlib import Path

import numpy as np
from PIL import Image

from fedtta_flwr.data._recipe import Images
from fedtta_flwr.errors import DataError
from fedtta_flwr.paths import expanded

FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
PACKAGE = "imagecorruptions-imaug"
VARIABLE = "FEDTTA_FROST_DIR"


def frost_photographs(frost_dir: Path | None, side: int) -> tuple[Images, ...]:
    """Return the photographs at 0.2 of their size.

    Parameters
    ----------
    frost_dir : Path or None
        Their folder. None: the folder that the environment variable FEDTTA_FROST_DIR names, else
        the one inside the installed distribution imagecorruptions-imaug, whose code is not
        imported.
    side : int
        Pixels; every photograph is larger than this on both axes.

    Returns
    -------
    tuple of five ndarrays of uint8, shape (H, W, 3)
        RGB, read once per process and folder.

    Raises
    ------
    DataError
        A photograph is absent, unreadable or too small.
    """
    folder = frost_dir or _folder_from_environment() or _folder_in_package()
    if folder is None:
        raise DataError(
            f"frost: no photographs found: install {PACKAGE} (pip install {PACKAGE}), "
            f"or name a folder with {', '.join(FILES)} by {VARIABLE}, or by --frost-dir of `fedtta data corrupt`"
        )
    photographs = tuple(_photograph(Path(folder) / name) for name in FILES)
    limit = min(min(photograph.shape[:2]) for photograph in photographs)
    if side >= limit:
        raise DataError(f"frost: images of {side} pixels are larger than the photographs allow: below {limit}")
    return photographs


def _folder_from_environment() -> Path | None:
    value = os.environ.get(VARIABLE)
    return expanded(VARIABLE, value) if value else None


def _folder_in_package() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()).parent for file in files if file.name == FILES[0]), None)


@functools.cache
def _photograph(path: Path) -> Images:
    try:
        with Image.open(path) as photograph:
            pixels = np.asarray(photograph.convert("RGB"))
    except OSError as error:
        raise DataError(f"frost: cannot read the photograph {path}: {error}") from error
    # The published bilinear resize to exactly 1/5, without smoothing, falls on every fifth pixel.
    return pixels[2::5, 2::5]
