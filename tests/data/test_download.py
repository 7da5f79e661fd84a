"""Fetching from a server on this machine: whole, broken off, damaged, hostile, absent."""

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr.data import download
from fedtta_flwr.data.download import fetch
from fedtta_flwr.data.zenodo import RECORDS
from fedtta_flwr.errors import ConfigError, DataError


def archive(**extra: bytes) -> bytes:
    """An archive of the published shape, with labels alone; what is empty is a link to the outside."""
    labels = io.BytesIO()
    np.save(labels, np.tile(np.arange(10_000) % 10, 5).astype(np.uint8))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in {"CIFAR-10-C/labels.npy": labels.getvalue(), **extra}.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            if not content:
                about.type, about.linkname = tarfile.SYMTYPE, "../../elsewhere"
            tar.addfile(about, io.BytesIO(content))
    return packed.getvalue()


class Server:
    """Serves one file; counts requests; may ignore ranges or break off."""

    def __init__(self) -> None:
        self.content = archive()
        self.requests: list[tuple[str, str | None]] = []
        self.break_after: int | None = None
        self.ranges = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.requests.append((request.path, asked))
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        if start >= len(self.content):
            request.send_error(416)
            return
        body = self.content[start:]
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(body)))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        request.end_headers()
        request.wfile.write(body[: self.break_after])

    @property
    def md5(self) -> str:
        return hashlib.md5(self.content).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    own = Server()
    yield own
    own.http.shutdown()
    own.http.server_close()


def test_a_set_is_fetched_checked_and_unpacked(server: Server, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    folder = fetch(
        "cifar10-c", tmp_path / "new", base_url=server.url, md5=server.md5, progress=lambda *at: told.append(at)
    )
    assert folder == tmp_path / "new" / "CIFAR-10-C"
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["CIFAR-10-C"]  # no archive, nothing half-made
    assert [p.name for p in folder.iterdir()] == ["labels.npy"]
    assert server.requests == [("/records/2535967/files/CIFAR-10-C.tar?download=1", None)]
    assert told[-1] == (len(server.content), len(server.content))
    fetch("cifar10-c", tmp_path / "new", base_url=server.url)
    assert len(server.requests) == 1  # what is there is kept


def test_what_broke_off_is_resumed(server: Server, tmp_path: Path) -> None:
    server.break_after = 1234
    with pytest.raises(DataError, match=r"broke after 1234 of .* bytes; run the command again"):
        fetch("cifar10-c", tmp_path, base_url=server.url, md5=server.md5)
    assert (tmp_path / "CIFAR-10-C.tar.part").read_bytes() == server.content[:1234]
    server.break_after = None
    fetch("cifar10-c", tmp_path, base_url=server.url, md5=server.md5)
    assert [asked for _, asked in server.requests] == [None, "bytes=1234-"]


def test_a_server_that_knows_no_ranges_sends_all_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "CIFAR-10-C.tar.part").write_bytes(server.content[:1000])
    server.ranges = False
    assert fetch("cifar10-c", tmp_path, base_url=server.url, md5=server.md5).is_dir()


def test_what_a_kill_has_left_of_unpacking_goes(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".CIFAR-10-C.tmp" / "CIFAR-10-C").mkdir(parents=True)
    (tmp_path / ".CIFAR-10-C.tmp" / "CIFAR-10-C" / "half.npy").write_bytes(b"half")
    folder = fetch("cifar10-c", tmp_path, base_url=server.url, md5=server.md5)
    assert [path.name for path in folder.iterdir()] == ["labels.npy"]
    assert list(tmp_path.iterdir()) == [folder]


def test_two_do_not_load_into_one_folder(server: Server, tmp_path: Path) -> None:
    def at_once(done: int, total: int | None) -> None:
        with pytest.raises(ConfigError, match=r"^--data-dir .*: another download writes there; wait for its end"):
            fetch("cifar10-c", tmp_path, base_url=server.url, md5=server.md5)

    assert fetch("cifar10-c", tmp_path, base_url=server.url, md5=server.md5, progress=at_once).is_dir()
    assert len(server.requests) == 1


def test_a_part_that_is_complete_is_not_loaded_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "CIFAR-10-C.tar.part").write_bytes(server.content)
    assert fetch("cifar10-c", tmp_path, base_url=server.url, md5=server.md5).is_dir()


def test_another_archive_than_the_published_is_refused_and_removed(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"MD5 {server.md5}.*expected 56bf5dcef84df0e2308c6dcbcbbd8499"):
        fetch("cifar10-c", tmp_path, base_url=server.url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "content"), [("../../evil", b"x"), ("{}/evil", b"x"), ("CIFAR-10-C/evil", b"")])
def test_an_archive_may_not_write_elsewhere(server: Server, tmp_path: Path, name: str, content: bytes) -> None:
    server.content = archive(**{name.format(tmp_path): content})
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch("cifar10-c", tmp_path / "a" / "b", base_url=server.url, md5=server.md5)
    assert not any(p.name == "evil" for p in tmp_path.rglob("*"))
    assert not (tmp_path / "a" / "b" / "CIFAR-10-C").exists()


def test_no_archive_at_all(server: Server, tmp_path: Path) -> None:
    server.content = b"<html>not today</html>"
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch("cifar10-c", tmp_path, base_url=server.url, md5=server.md5)


def test_the_address_may_stand_in_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTTA_ZENODO_URL", server.url + "/")
    assert fetch("cifar10-c", tmp_path, md5=server.md5).is_dir()


@pytest.mark.parametrize("name", RECORDS)
def test_without_a_network_the_way_out_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        fetch(name, tmp_path, base_url="http://127.0.0.1:9")
    text = str(caught.value)
    assert "\n" not in text
    record, _, _, inner = RECORDS[name]
    for word in (str(record), "labels.npy", "(50000, 32, 32, 3)", str(tmp_path / inner), "fedtta data corrupt"):
        assert word in text


def test_a_silent_server_does_not_hold_us_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DataError, match="timed out"):
        fetch("cifar10-c", tmp_path, base_url=f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_only_known_sets_and_web_addresses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cifar10-c, cifar100-c"):
        fetch("imagenet-c", tmp_path)
    with pytest.raises(ConfigError, match="https://"):
        fetch("cifar10-c", tmp_path, base_url="file:///etc")
