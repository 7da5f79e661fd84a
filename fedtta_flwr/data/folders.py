"""Images in files: a tree with a folder for each class, and single files that may be anything."""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.data.recent import Recent
from fedtta_flwr.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

#: what Pillow may open: formats that its own code decodes (not, for example, PostScript, which runs a program)
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
MOST_PIXELS = 50_000_000  # of an image; half a megabyte of PNG can be a gigabyte of pixels
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0  # of a TIFF
#: usual names of a data set's parts; a folder of nothing else is one too high, and would be read as so many classes
PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}


class ImageTree:
    """Images under one folder, a sub-folder for each class; an image is read when it is asked for, and kept (`Recent`).

    Classes are the sub-folders in the order of their names, as in torchvision's ``ImageFolder``; so are the files of
    a class. Files and folders whose names begin with a dot are passed over.

    Parameters
    ----------
    folder : Path
        The tree's root.
    size : int
        Pixels a side to which images are resized.

    Raises
    ------
    DataError
        There are fewer than two classes, their names are those of a data set's parts, one is empty, or something
        cannot be read, if only since it is a link to nothing.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._size = size
        self._read: Recent[int] = Recent()
        try:
            entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
            classes = [entry for entry in entries if entry.is_dir()]
        except OSError as error:
            raise _unreadable(folder, error) from None
        for entry in entries:
            _check_link(entry)
        if len(classes) < 2:
            raise DataError(f"{folder}: {len(classes)} sub-folders, expected one for each of two classes or more")
        self.class_names = [entry.name for entry in classes]
        if {name.lower() for name in self.class_names} <= PARTS:
            raise DataError(
                f"{folder}: {', '.join(self.class_names)} are parts of a data set, expected a sub-folder for each "
                f"class; name one of them, e.g. {classes[0]}"
            )
        self._root, self._files = folder, list[Path]()
        counts = []
        for entry in classes:
            files = _files_below(entry)
            if not files:
                raise DataError(f"{entry}: no images, expected one or more; add some or remove the folder")
            self._files += files
            counts.append(len(files))
        self.labels: NDArray[np.int64] = np.repeat(np.arange(len(classes), dtype=np.int64), counts)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._files)

    def check(self) -> None:
        """Look at every file's header.

        Raises
        ------
        DataError
            One is not an image, or cannot be read.
        """
        for path in self._files:
            _check_is_image(path)

    @property
    def names(self) -> list[str]:
        """The files' paths below the folder, in the order of the images."""
        return [path.relative_to(self._root).as_posix() for path in self._files]

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """Return the images [B, size, size, 3] at these positions.

        Raises
        ------
        DataError
            A file is damaged, or cannot be read.
        """
        if not len(rows):
            return np.empty((0, self._size, self._size, 3), np.uint8)
        return self._read.take(rows.tolist(), lambda lacking: map(self._read_one, lacking))

    def _read_one(self, row: int) -> NDArray[np.uint8]:
        path = self._files[row]
        try:
            return read_image(path, self._size)
        except ValueError as error:
            expected = "an image of 8 or 16 bits a channel"
            raise DataError(f"{path}: {error}, expected {expected}; remove or replace it") from None
        except OSError as error:
            raise _unreadable(path, error) from None


def _files_below(folder: Path) -> list[Path]:
    """Return the files of a folder and all below it, also through links, but for those that are hidden."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error)

    found = []
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in folders):
            if path.is_symlink() and Path(place).resolve().is_relative_to(path.resolve()):
                raise DataError(f"{path}: a link to a folder that holds it, expected images; remove it")
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            _check_link(path)
            if path.is_file():
                found.append(path)
    return sorted(found)


def _check_link(path: Path) -> None:
    """Refuse a link to nothing: if it were left out, all rows behind it would be others."""
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path}: a link to nothing; fetch what it stands for, or remove it")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}); see to its rights or its disk")


def read_image(path: Path, size: int) -> NDArray[np.uint8]:
    """Return a file's image [size, size, 3], RGB, resized (bilinear) without keeping its proportions.

    Raises
    ------
    ValueError
        It is not an image of `FORMATS`, is damaged, cut off or too large, or its range is not known; the text says
        which, in a few words.
    OSError
        It cannot be read, which says nothing about what is in it.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=FORMATS) as image:
            mode, pixels = image.mode, image.width * image.height
            if mode == "I" and image.format == "PPM":
                mode = "I;16"  # whatever its largest value is, Pillow has brought it to 16 bits
            if pixels <= MOST_PIXELS:
                whole = _from_16_bits(image) if mode.startswith("I;16") else image  # which Pillow would cut off at 255
                small = whole.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    except UnidentifiedImageError:
        raise ValueError(f"not an image ({_size_of(path)} bytes)") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        if _is_outside(error):
            raise
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise ValueError(f"damaged or not yet complete ({reason})") from None
    if pixels > MOST_PIXELS:
        raise ValueError(f"of {pixels:,} pixels, more than {MOST_PIXELS:,}")
    if mode in ("I", "F"):
        raise ValueError("32 bits a channel")
    return np.asarray(small)


def _from_16_bits(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    wide = np.asarray(image).astype(np.uint16, copy=False)
    values = (wide // 257 + (wide % 257 > 128)).astype(np.uint8)  # the nearest: 257 is odd
    inverted = getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO  # Pillow sees to it at 8 bits alone
    return Image.fromarray(255 - values if inverted else values)


def _check_is_image(path: Path) -> None:
    """Read a file's header only."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=FORMATS):
            pass
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if _is_outside(error):
            raise _unreadable(path, error) from None
        raise DataError(
            f"{path}: not an image ({_size_of(path)} bytes), expected one of {', '.join(FORMATS)}; remove it"
        ) from None


def _is_outside(error: Exception) -> TypeGuard[OSError]:
    """Return whether an error says nothing about what is in the file."""
    # Pillow's own have no number; EINVAL is a seek to where a damaged header points.
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
