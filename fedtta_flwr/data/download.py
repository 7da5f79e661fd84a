"""Fetching CIFAR-10-C and CIFAR-100-C from Zenodo: resumable, checked, unpacked safely."""

import hashlib
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from fedtta_flwr.data.datasets import open_test_set
from fedtta_flwr.data.zenodo import RECORDS
from fedtta_flwr.errors import ConfigError, DataError
from fedtta_flwr.files import locked

BASE_URL = "https://zenodo.org"
BASE_VARIABLE = "FEDTTA_ZENODO_URL"
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 20
Progress = Callable[[int, int | None], None]


def fetch(
    name: str,
    folder: Path,
    *,
    base_url: str | None = None,
    md5: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Download, check and unpack a data set; what is there already is kept.

    The archive is loaded into ``<archive>.part``, where a later call goes on, and removed once it is unpacked.

    Parameters
    ----------
    name : {"cifar10-c", "cifar100-c"}
        The data set.
    folder : Path
        It becomes ``folder/CIFAR-10-C`` (or ``CIFAR-100-C``).
    base_url : str, optional
        Of a mirror; by default the environment variable FEDTTA_ZENODO_URL, else Zenodo itself.
    md5 : str, optional
        Of the archive, for a mirror of something else; by default that of the published one.
    progress : callable
        Receives (bytes there, bytes in all or None).

    Returns
    -------
    Path
        The folder with the arrays.

    Raises
    ------
    ConfigError
        There is no such set, the URL is not http(s), or another download writes to the folder.
    DataError
        There is no network, the archive is not the published one, or the folder cannot be written.
    """
    if name not in RECORDS:
        raise ConfigError(f"data get {name!r}: unknown; allowed: {', '.join(RECORDS)}")
    record, archive, published, inner = RECORDS[name]
    target, part = folder / inner, folder / f"{archive}.part"
    if target.is_dir():
        open_test_set(name, str(target), 0)
        return target
    base = (base_url or os.environ.get(BASE_VARIABLE) or BASE_URL).rstrip("/")
    if not base.startswith(("https://", "http://")):
        raise ConfigError(f"base URL {base!r}: allowed: one that begins with https:// or http://")
    offline = (
        f"without a network put {archive} of https://zenodo.org/records/{record} (labels.npy and <corruption>.npy, "
        f"uint8 (50000, 32, 32, 3)) unpacked into {target}, or rebuild the set from the clean images: fedtta data "
        f"corrupt --dataset {name.removesuffix('-c')} --data-dir IN --output {target}"
    )
    try:
        with locked(folder, f"--data-dir {folder}", "download"):
            if not target.is_dir():  # another download may just have ended
                _download(f"{base}/records/{record}/files/{archive}?download=1", part, progress)
                _check(part, md5 or published)
                _unpack(part, target)
                part.unlink()
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"{name}: cannot be loaded from {base} ({str(reason)[:100]}); {offline}") from None
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); it needs 6 GB while unpacking") from None
    open_test_set(name, str(target), 0)
    return target


def _download(url: str, part: Path, progress: Progress) -> None:
    """Load what is missing of a file."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedtta"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is missing, or what is there is longer: the checksum will tell
            return
        raise
    with answer:
        resumed = answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(f"bytes {have}-")
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file:
            progress(have, total)
            while block := answer.read(BLOCK):
                file.write(block)
                have += len(block)
                progress(have, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke after {have} of {total} bytes; run the command again to go on")


def _check(part: Path, md5: str) -> None:
    with part.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        size = part.stat().st_size
        part.unlink()  # to resume it would never end well
        raise DataError(f"{part}: MD5 {found} ({size} bytes), expected {md5}; it was removed, run the command again")


def _unpack(archive: Path, target: Path) -> None:
    """Unpack the folder of the same name as `target`, which appears whole or not at all."""
    beside = target.with_name(f".{target.name}.tmp")  # of nobody else: the folder is locked
    shutil.rmtree(beside, ignore_errors=True)  # what a kill has left
    try:
        beside.mkdir()
        with tarfile.open(archive) as tar:
            for member in tar:
                _take_out(tar, member, beside)
        if not (beside / target.name).is_dir():
            raise DataError(f"{archive}: has no folder {target.name}; remove the file and run the command again")
        (beside / target.name).replace(target)
    except tarfile.TarError as error:
        raise DataError(f"{archive}: cannot be unpacked ({error}); remove it and run the command again") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _take_out(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a plain file of an archive into a folder; Python 3.11.2, which Debian 12 has, lacks tarfile's filter."""
    path = PurePosixPath(member.name)
    if member.isdir():
        return
    content = tar.extractfile(member) if member.isfile() else None
    if content is None or path.is_absolute() or ".." in path.parts:
        raise tarfile.TarError(f"{member.name!r} is no plain file in it")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    with content, (folder / path).open("wb") as file:
        shutil.copyfileobj(content, file)
