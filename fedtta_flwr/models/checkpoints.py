"""Checkpoints: one safetensors file that says which network it holds and can run no code.

The file's metadata name the ``architecture`` (a key of `fedtta_flwr.models.MODELS`), the number of
``classes`` and the ``format`` of this package, beside whatever the writer adds.
"""

import hashlib
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor, nn

from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.files import write_atomically
from fedtta_flwr.models import build
from fedtta_flwr.models.base import Classifier

FORMAT = "fedtta-1"
SHOWN = 3  # how many differing tensors an error lists
ANOTHER = "give another file (docs/data.md, Source models, tells how to train one)"


def save(model: Classifier, path: str | Path, metadata: Mapping[str, str]) -> None:
    """Write a checkpoint, completely or not at all.

    Parameters
    ----------
    model : Classifier
        Made by `fedtta_flwr.models.build`; may be on any device.
    path : path
        The file to write or replace; its folder is made when absent.
    metadata : mapping of str to str
        At least ``architecture`` and ``classes``; ``format`` is added.

    Raises
    ------
    ValueError
        When ``architecture`` or ``classes`` is absent.
    CheckpointError
        When the file cannot be written.
    """
    path = Path(path)
    if missing := {"architecture", "classes"} - metadata.keys():
        raise ValueError(f"checkpoint metadata lack {', '.join(sorted(missing))}")
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    content = serialise(tensors, {**metadata, "format": FORMAT})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
    except OSError as error:
        raise CheckpointError(
            f"{path}: checkpoint of {len(content)} bytes cannot be written ({error.strerror}); choose another path"
        ) from error


def load(path: str | Path, *, architecture: str | None = None, classes: int | None = None) -> Classifier:
    """Build the network that a checkpoint names and fill it, strictly.

    The global random state stays as it is.

    Parameters
    ----------
    path : path
        A file that `save` wrote.
    architecture : str, optional
        Refuse any other architecture.
    classes : int, optional
        Refuse any other number of classes.

    Returns
    -------
    Classifier
        On the CPU, in eval mode, float32.

    Raises
    ------
    CheckpointError
        The file is absent, damaged, of another kind, for another network, or not finite.
    """
    path = Path(path)
    metadata, tensors = _read_ours(path)
    found = metadata.get("architecture", "?")
    if architecture is not None and found != architecture:
        raise CheckpointError(f"{path}: holds architecture {found!r}, expected {architecture}; {ANOTHER}")
    if classes is not None and metadata["classes"] != str(classes):
        raise CheckpointError(
            f"{path}: made for {metadata['classes']} classes, expected {classes}; {ANOTHER}, or set classes = "
            f"{metadata['classes']} if the data set leaves that open"
        )
    statistics = {
        key: tensors[f"normalize.{key}"].flatten().tolist() for key in ("mean", "std") if f"normalize.{key}" in tensors
    }
    try:
        # Not on the meta device: drawing weights there imports torch's compiler, which costs seconds.
        with torch.random.fork_rng(devices=[]):
            model = build(found, int(metadata["classes"]), **statistics)
    except (ConfigError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; {ANOTHER}") from error
    fill(model, tensors, path)
    return model


def fill(model: nn.Module, tensors: Mapping[str, Tensor], path: Path, *, tied: bool = False) -> None:
    """Put ``tensors`` in the place of the model's, strictly.

    Parameters
    ----------
    model : nn.Module
        Changed in place; its own tensors, which may be on the meta device, are replaced.
    tensors : mapping of str to Tensor
        Exactly the keys, shapes and dtypes of ``model.state_dict()``, all finite.
    path : Path
        Where they come from, for the error.
    tied : bool
        Whether names may share a tensor, and go on to: values are copied, and a constant that is not finite may stay.

    Raises
    ------
    CheckpointError
        Naming the first few tensors that differ.
    """
    expected = model.state_dict()
    missing = [f"{key} is missing" for key in expected if key not in tensors]
    unknown = [f"{key!r} is unknown" for key in tensors if key not in expected]
    # In turn: a missing name is told beside one that may be meant by it.
    differences = [text for pair in zip_longest(missing, unknown) for text in pair if text is not None]
    differences += [
        f"{key} is {dtype_and_shape(tensors[key])}, expected {dtype_and_shape(value)}"
        for key, value in expected.items()
        if key in tensors and dtype_and_shape(tensors[key]) != dtype_and_shape(value)
    ]
    if differences:
        raise CheckpointError(
            f"{path}: does not fit the architecture: {_first(differences)}; name the right "
            "architecture and number of classes, or give another file"
        )
    # A constant of the architecture, such as the -inf of a mask, may be what it is.
    finite = {
        key: bool(value.isfinite().all()) or (tied and torch.equal(value, expected[key]))
        for key, value in tensors.items()
    }
    if bad := [key for key, good in finite.items() if not good]:
        raise CheckpointError(f"{path}: NaN or infinite values in {_first(bad)}; {ANOTHER}")
    model.load_state_dict(tensors, assign=not tied)


def file_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits.

    Raises
    ------
    CheckpointError
        When the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {ANOTHER}") from error


def first_bytes(path: Path, number: int = 64) -> bytes:
    """Return the beginning of a checkpoint file of any kind.

    Raises
    ------
    CheckpointError
        When there is no such file, it is a folder, empty, unreadable, or a web page.
    """
    try:
        with path.open("rb") as file:
            head = file.read(number)
    except IsADirectoryError:
        raise CheckpointError(f"{path}: is a folder, expected a checkpoint file; name a file in it") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; check the path, or {ANOTHER}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {ANOTHER}") from error
    if not head:
        raise CheckpointError(f"{path}: is empty (0 bytes), expected a checkpoint; fetch it again")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(f"{path}: is a web page, expected a checkpoint; download the file itself, not its page")
    return head


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of any safetensors file.

    Raises
    ------
    CheckpointError
        When the file is absent, damaged or of another kind.
    """
    return _read(path, "write it with safetensors.torch.save_model(model, PATH)")[1]


def _read_ours(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file of this package."""
    metadata, tensors = _read(path, "convert it with `fedtta source convert`")
    if metadata.get("format") != FORMAT or not {"architecture", "classes"} <= metadata.keys():
        raise CheckpointError(
            f"{path}: metadata are {', '.join(sorted(metadata))[:80] or 'absent'}, expected format "
            f"{FORMAT}, architecture and classes; convert the original with `fedtta source convert`"
        )
    return metadata, tensors


def _read(path: Path, cure: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file; `cure` is what to do with a pickle."""
    head = first_bytes(path)
    # A safetensors file begins with the length of its JSON header, 8 bytes, and the JSON itself.
    if head[8:9] != b"{":
        _refuse(path, head, cure)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: what safetensors returns may be a view of the file, which others may replace.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: damaged safetensors file of {path.stat().st_size} bytes ({error}); copy or download it again"
        ) from error
    return metadata, tensors


def _refuse(path: Path, head: bytes, cure: str) -> NoReturn:
    """Say what a file is that is not safetensors."""
    if head.startswith(b"PK\x03\x04") or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"):
        raise CheckpointError(f"{path}: is a pickle of torch.save, which could run code, expected safetensors; {cure}")
    raise CheckpointError(f"{path}: begins with {head[:8]!r}, expected a safetensors file; {ANOTHER}")


def dtype_and_shape(tensor: Tensor) -> str:
    """Return in words what a tensor is, e.g. ``float32 [10, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _first(items: list[str]) -> str:
    more = len(items) - SHOWN
    return "; ".join(items[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
