"""Arrays in .npy files: mapped into memory, never unpickled, and checked before the first use."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.errors import DataError

_PAGE = (b"<!doctype", b"<html", b"<?xml")


def map_array(path: Path, *, dtype: str, shape: Sequence[int | None], remedy: str) -> NDArray[Any]:
    """Map a .npy file read-only, so that reading some rows copies those rows and no more.

    Parameters
    ----------
    path : Path
        The file.
    dtype : {"uint8", "integer"}
        What its elements must be.
    shape : sequence of int or None
        What its shape must be; None where any length is allowed: N, then H, W.
    remedy : str
        What the user can do, for the error.

    Returns
    -------
    ndarray
        A read-only view of the file.

    Raises
    ------
    DataError
        The file is absent, no .npy file (a web page, say), holds pickled objects, is longer or shorter than its
        header says, or has another dtype or shape. One line: path, found, expected, remedy.
    """
    expected = f"{'an integer dtype' if dtype == 'integer' else dtype} of shape {_spelled(shape)}"
    found_shape, found, size = _header(path, f"expected a .npy file, {expected}; {remedy}")
    if found.hasobject:
        raise DataError(
            f"{path}: holds pickled objects, which could run code and are never read; expected {expected}; {remedy}"
        )
    missing = size + math.prod(found_shape) * found.itemsize - path.stat().st_size
    if missing:
        state = f"{missing} bytes short of" if missing > 0 else f"{-missing} bytes longer than"
        raise DataError(f"{path}: {state} what its header says ({found} {_spelled(found_shape)}); {remedy}")
    same = len(found_shape) == len(shape) and all(
        want in (None, have) for have, want in zip(found_shape, shape, strict=True)
    )
    if not same or (found != np.uint8 if dtype == "uint8" else found.kind not in "iu"):
        raise DataError(f"{path}: {found} of shape {_spelled(found_shape)}, expected {expected}; {remedy}")
    if math.prod(found_shape) == 0:
        raise DataError(f"{path}: empty, shape {_spelled(found_shape)}; {remedy}")
    mapped: NDArray[Any] = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    return mapped


def read_labels(path: Path, *, count: int, classes: int | None, remedy: str) -> NDArray[np.int64]:
    """Read `count` labels in 0 to `classes` - 1 (any from 0 if None) into memory.

    Raises
    ------
    DataError
        As `map_array`; or a label is out of range.
    """
    labels = map_array(path, dtype="integer", shape=(count,), remedy=remedy).astype(np.int64)
    check_labels(path, labels, classes, remedy)
    return labels


def check_labels(path: Path, labels: NDArray[np.int64], classes: int | None, remedy: str) -> None:
    """Refuse labels outside of 0 to `classes` - 1.

    Raises
    ------
    DataError
        Naming the first such label.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= (classes if classes is not None else np.inf)))
    if len(wrong):
        allowed = "0 or more" if classes is None else f"0 to {classes - 1}"
        raise DataError(f"{path}: label {labels[wrong[0]]} at {wrong[0]}, expected {allowed}; {remedy}")


def _header(path: Path, expectation: str) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, dtype and position of the first element."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
            if start.lstrip().lower().startswith(_PAGE):
                raise DataError(f"{path}: is a web page, {expectation}; download the file itself, not its page")
            file.seek(0)
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran, dtype = read(file)
            if fortran and len(shape) > 1:
                raise DataError(f"{path}: in Fortran order, {expectation}, from numpy.ascontiguousarray")
            return shape, dtype, file.tell()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file, {expectation}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), {expectation}") from None
    except DataError:
        raise
    except Exception:  # a damaged header raises whatever its bytes happen to mean
        raise DataError(f"{path}: begins with {start[:8]!r}, no readable .npy header; {expectation}") from None


def _spelled(shape: Sequence[int | None]) -> str:
    return "(" + ", ".join("NHW"[axis] if length is None else str(length) for axis, length in enumerate(shape)) + ")"
