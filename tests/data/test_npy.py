"""Faults in .npy files: each is one line that names the file, what was found and what was expected."""

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr.data.npy import map_array, read_labels
from fedtta_flwr.errors import DataError

SHAPE = (6, 4, 4, 3)


def images() -> Any:
    return np.arange(np.prod(SHAPE), dtype=np.int64).reshape(SHAPE).astype(np.uint8)


def fault(path: Path, *words: str, shape: Any = SHAPE, dtype: str = "uint8") -> None:
    with pytest.raises(DataError) as caught:
        map_array(path, dtype=dtype, shape=shape, remedy="do this")
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    assert "do this" in text
    for word in words:
        assert word in text


def test_a_file_is_mapped_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", images())
    mapped = map_array(tmp_path / "x.npy", dtype="uint8", shape=(None, 4, 4, 3), remedy="")
    np.testing.assert_array_equal(mapped, images())
    base = mapped
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        mapped[0, 0, 0, 0] = 1


def test_absent(tmp_path: Path) -> None:
    fault(tmp_path / "x.npy", "no such file", "uint8", "(6, 4, 4, 3)")


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.npy").mkdir()
    fault(tmp_path / "x.npy", "cannot be read")


@pytest.mark.parametrize("page", [b"<!DOCTYPE html><html>404</html>", b"\n <html><body>log in</body></html>"])
def test_a_web_page(tmp_path: Path, page: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(page)
    fault(tmp_path / "x.npy", "web page", "expected a .npy file")


@pytest.mark.parametrize("content", [b"", b"\x93NUM", b"PK\x03\x04" + bytes(100), b"\x93NUMPY\x01\x00\xff\xff{'descr"])
def test_no_npy_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    fault(tmp_path / "x.npy", "no readable .npy header", "uint8")


@pytest.mark.parametrize("cut", [1, 100])
def test_truncated_by_so_many_bytes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.npy"
    np.save(path, images())
    path.write_bytes(path.read_bytes()[:-cut])
    fault(path, f"{cut} bytes short")


def test_longer_than_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, images())
    path.write_bytes(path.read_bytes() + b"xy")
    fault(path, "2 bytes longer")


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "int8"])
def test_another_dtype(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "x.npy", images().astype(dtype))
    fault(tmp_path / "x.npy", dtype, "expected uint8")


@pytest.mark.parametrize("shape", [(5, 4, 4, 3), (6, 3, 4, 4), (6, 48), (288,)])
def test_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "x.npy", np.zeros(shape, np.uint8))
    fault(tmp_path / "x.npy", str(shape).replace(",)", ")"), "expected uint8 of shape (6, 4, 4, 3)")


def test_fortran_order_would_be_read_in_another_order(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.asfortranarray(images()))
    fault(tmp_path / "x.npy", "in Fortran order", "numpy.ascontiguousarray")


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickled_objects_are_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    array = np.empty(2, object)
    array[:] = [Touch(marker), 1]
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    fault(tmp_path / "x.npy", "pickled objects", "never read", shape=(2,))
    assert not marker.exists()
    pickle.loads(pickle.dumps(Touch(marker)))
    assert marker.exists()  # the trap works


def test_empty(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((0, 4, 4, 3), np.uint8))
    fault(tmp_path / "x.npy", "empty", shape=(None, 4, 4, 3))


@pytest.mark.parametrize(("labels", "words"), [
    ([0, 1, 2], ["int64 of shape (3)", "(4)"]),
    ([0, 1, 2, 10], ["label 10 at 3", "0 to 9"]),
    ([0, -1, 2, 3], ["label -1 at 1", "0 to 9"]),
    ([0.0, 1.0, 2.0, 3.0], ["float64", "integer"]),
])  # fmt: skip
def test_labels(tmp_path: Path, labels: list[float], words: list[str]) -> None:
    path = tmp_path / "labels.npy"
    np.save(path, np.array(labels))
    with pytest.raises(DataError) as caught:
        read_labels(path, count=4, classes=10, remedy="do this")
    assert "\n" not in str(caught.value)
    for word in [str(path), "do this", *words]:
        assert word in str(caught.value)


def test_labels_of_any_integer_dtype_become_int64(tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.array([3, 0, 9], np.uint8))
    labels = read_labels(tmp_path / "l.npy", count=3, classes=10, remedy="")
    assert labels.dtype == np.int64
    assert labels.tolist() == [3, 0, 9]


def test_a_damaged_header_is_no_other_error_whatever_its_bytes_mean(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((4, 3), np.uint8))
    content = bytearray(path.read_bytes())
    for at in range(10, 70):
        for byte in b" )('\x00\xff":
            damaged = content.copy()
            damaged[at] = byte
            path.write_bytes(damaged)
            with suppress(DataError):  # and nothing else
                map_array(path, dtype="uint8", shape=(4, 3), remedy="write it anew")
