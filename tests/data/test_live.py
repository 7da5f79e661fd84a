"""Images that arrive in a folder: order, what is skipped, what is written, and whole runs without labels."""

import csv
import errno
import logging
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.build import build_stream, check_data, open_data
from fedtta_flwr.data.folders import ImageTree, read_image
from fedtta_flwr.data.live import LiveStream, live_folders
from fedtta_flwr.errors import ConfigError, DataError, FedTTAError
from fedtta_flwr.models.source import embedded_checkpoint

LIVE: dict[str, Any] = {
    "dataset": "live",
    "classes": 10,
    "rounds": 3,
    "live-wait": 0.0,
    "num-clients": 1,
    "checkpoint": str(embedded_checkpoint()),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What is logged; Flower's logger does not propagate."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def arrive(folder: Path, name: str, grey: int, when: int) -> None:
    Image.new("RGB", (40, 50), (grey, grey, grey)).save(folder / name)
    os.utime(folder / name, ns=(when, when))


def lie(path: Path, content: bytes = b"<html>") -> None:
    """Write what has been there for some time."""
    path.write_bytes(content)
    os.utime(path, ns=(1000, 1000))


def stream(folder: Path, batch_size: int = 4, slots: int = 9, wait: float = 0.0) -> LiveStream:
    return LiveStream(folder, folder, batch_size=batch_size, image_size=32, slots=slots, wait=wait)


def greys(x: torch.Tensor) -> list[int]:
    return [round(float(image.mean()) * 255) for image in x]


def sure_of(classes: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes, dtype=torch.int64), 10).float() * 0.75


def table(path: Path) -> list[list[str]]:
    with path.open(newline="", errors="surrogateescape") as file:
        return list(csv.reader(file))


def test_images_come_in_the_order_of_their_arrival(folder: Path) -> None:
    for name, grey, when in [("c.png", 10, 3000), ("b.png", 20, 1000), ("a.jpg", 30, 2000), ("0.bmp", 40, 3000)]:
        arrive(folder, name, grey, when)
    own = stream(folder, batch_size=3)
    x, labels = own.batch(0)
    assert labels is None
    assert x.shape == (3, 3, 32, 32)
    assert x.dtype == torch.float32
    assert greys(x) == [20, 30, 40]  # 0.bmp before c.png: the same time, so the name decides
    own.predicted(0, sure_of([1, 1, 1]), version=1)
    x, _ = own.batch(1)
    assert greys(x) == [10]
    own.predicted(1, sure_of([1]), version=1)
    assert own.batch(2)[0].shape == (0, 3, 32, 32)
    assert (len(own), own.domains[0]) == (9, "live")


def test_predictions_are_appended_and_remembered(folder: Path) -> None:
    for i in range(3):
        arrive(folder, f"{i}.png", i, i)
    own = stream(folder, batch_size=2)
    own.batch(0)
    own.predicted(0, sure_of([7, 1]), version=5)
    assert table(folder / "predictions.csv") == [
        ["file", "class", "probability", "model_version"],
        ["0.png", "7", "0.750000", "5"],
        ["1.png", "1", "0.750000", "5"],
    ]
    again = stream(folder, batch_size=2)  # another process
    assert greys(again.batch(0)[0]) == [2]
    again.predicted(0, sure_of([3]), version=6)
    assert own.batch(1)[0].shape[0] == 0  # it reads what the other one wrote
    assert table(folder / "predictions.csv")[-1] == ["2.png", "3", "0.750000", "6"]


def test_a_visit_that_failed_gets_its_images_again(folder: Path) -> None:
    for i in range(4):
        arrive(folder, f"{i}.png", i, i)
    own = stream(folder, batch_size=2)
    assert greys(own.batch(0)[0]) == [0, 1]
    assert greys(own.batch(0)[0]) == [0, 1]  # the same slot, or, where no visit had come about, a later one
    assert greys(own.batch(4)[0]) == [0, 1]
    own.predicted(4, sure_of([7, 1]), version=5)
    assert greys(own.batch(5)[0]) == [2, 3]


def test_a_prediction_that_was_cut_off_counts_as_not_made(folder: Path) -> None:
    arrive(folder, "0.png", 9, 0)
    arrive(folder, "1.png", 8, 1)
    (folder / "predictions.csv").write_bytes(b"file,class,probability,model_version\n0.png,1,0.5,1\n1.pn")
    own = stream(folder)
    assert greys(own.batch(0)[0]) == [8]
    own.predicted(0, sure_of([4]), version=2)
    assert table(folder / "predictions.csv")[-1] == ["1.png", "4", "0.750000", "2"]
    assert stream(folder).batch(0)[0].shape[0] == 0


def test_names_of_all_kinds_survive_the_csv(folder: Path) -> None:
    names = ["a,b.png", 'say "x".png', "ü ñ.png", "line\nbreak.png", "Icon\r", os.fsdecode(b"\xe9.png")]
    for i, name in enumerate(names):
        arrive(folder, "0.png", 10, i)
        (folder / "0.png").rename(folder / name)
    own = stream(folder, batch_size=9)
    own.batch(0)
    own.predicted(0, sure_of([0, 1, 2, 3, 4, 5]), version=1)
    assert [row[0] for row in table(folder / "predictions.csv")[1:]] == names
    assert stream(folder).batch(0)[0].shape[0] == 0


def test_what_is_no_image_is_skipped_once_with_a_line(folder: Path, warnings: list[str]) -> None:
    arrive(folder, "good.png", 50, 0)
    lie(folder / "notes.txt", b"hello")
    lie(folder / "page.jpg")
    lie(folder / ".hidden.png", b"")
    (folder / "sub").mkdir()
    own = stream(folder)
    for slot in range(3):
        own.batch(slot)
        own.predicted(slot, sure_of([1] if slot == 0 else []), version=slot)
    rows = table(folder / "skipped.csv")
    assert rows[0] == ["file", "reason", "bytes", "modified_ns"]
    assert sorted(row[0] for row in rows[1:]) == ["notes.txt", "page.jpg"]
    assert "not an image (6 bytes)" in rows[1][1] + rows[2][1]
    about = "notes.txt (not an image (5 bytes)), page.jpg (not an image (6 bytes))"
    assert warnings == [f"{folder}: skipped: {about}"]
    stream(folder).batch(0)
    assert len(table(folder / "skipped.csv")) == 3


FORGED = "x\x1b[2J\nINFO : all is well\udce9.txt"


def test_a_name_is_no_line_of_the_log(folder: Path, warnings: list[str]) -> None:
    lie(folder / FORGED)
    stream(folder).batch(0)
    assert warnings == [f"{folder}: skipped: x [2J INFO : all is well .txt (not an image (6 bytes))"]


def test_nor_of_an_error(folder: Path) -> None:
    for name in "ab":
        (folder / name).mkdir()
        lie(folder / name / FORGED)
    with pytest.raises(DataError) as caught:
        ImageTree(folder, 32).check()
    assert str(caught.value).startswith(rf"{folder}/a/x\x1b[2J\nINFO : all is well\udce9.txt: not an image")


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.bmp"])
def test_a_file_still_being_written_is_taken_when_it_is_complete(folder: Path, name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / name)
    whole = (folder / name).read_bytes()
    lie(folder / name, whole[: len(whole) // 2])
    own = stream(folder)
    assert own.batch(0)[0].shape[0] == 0
    assert "not yet complete" in table(folder / "skipped.csv")[1][1]
    (folder / name).write_bytes(whole)
    assert own.batch(1)[0].shape[0] == 1


def test_a_file_that_is_no_image_gets_no_row_until_it_is_some_seconds_old(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, now = stream(folder), time.time_ns()
    (folder / "video.mp4").write_bytes(b"grows")
    (folder / "ahead.mp4").write_bytes(b"of our clock")
    os.utime(folder / "video.mp4", ns=(now, now))
    os.utime(folder / "ahead.mp4", ns=(now + 10**13, now + 10**13))
    monkeypatch.setattr("fedtta_flwr.data.live.time.time_ns", lambda: now + 1_900_000_000)
    own.batch(0)
    assert [row[0] for row in table(folder / "skipped.csv")[1:]] == ["ahead.mp4"]
    monkeypatch.setattr("fedtta_flwr.data.live.time.time_ns", lambda: now + 2_100_000_000)
    own.batch(1)
    assert [row[0] for row in table(folder / "skipped.csv")[1:]] == ["ahead.mp4", "video.mp4"]


def test_many_foreign_files_are_one_line_and_one_write(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):
        lie(folder / f"{i:02}.json")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    stream(folder).batch(0)
    assert len(table(folder / "skipped.csv")) == 21
    assert len(synced) == 1
    assert len(warnings) == 1
    assert warnings[0].endswith("02.json (not an image (6 bytes)) and 17 more")


def test_a_client_that_falls_behind_says_so_and_again_when_twice_as_many_wait(
    folder: Path, warnings: list[str]
) -> None:
    for i in range(22):
        arrive(folder, f"{i:02}.png", i, i)
    own = stream(folder, batch_size=2)
    own.batch(0)
    assert warnings == []  # 20 wait, ten batches
    arrive(folder, "22.png", 22, 22)
    for slot in (1, 2):  # the visit fails: all are new again
        own.batch(slot)
    assert warnings == [
        f"{folder}: 21 new images wait, 10 batches: more come than are predicted; batch-size = 2: make batch-size or "
        f"aggregate-every larger, or rounds shorter"
    ]
    for i in range(23, 44):
        arrive(folder, f"{i:02}.png", i, i)
    own.batch(3)
    assert len(warnings) == 1  # 42
    arrive(folder, "44.png", 44, 44)
    own.batch(4)
    assert len(warnings) == 2
    assert "43 new images" in warnings[1]
    own.predicted(4, sure_of([1, 2]), version=1)
    own.batch(5)
    assert len(warnings) == 2  # they become fewer


def test_an_entry_that_cannot_be_looked_at_is_named_once_and_keeps_no_other_back(
    folder: Path, warnings: list[str]
) -> None:
    (folder / "circle.png").symlink_to("circle.png")
    arrive(folder, "good.png", 50, 0)
    (folder / "through.png").symlink_to("good.png/x")
    own = stream(folder)
    assert greys(own.batch(0)[0]) == [50]
    own.predicted(0, sure_of([1]), version=1)
    (folder / "good.png").unlink()
    (folder / "good.png").symlink_to("good.png")  # predicted: nobody looks at it any more
    own.batch(1)
    assert len(warnings) == 1
    assert "cannot be read now: " in warnings[0]
    assert "circle.png (Too many levels of symbolic links)" in warnings[0]
    assert "through.png (Not a directory)" in warnings[0]
    assert not (folder / "skipped.csv").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE, errno.ENOENT])
def test_an_image_that_cannot_be_read_now_is_read_later(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    arrive(folder, "0.png", 50, 0)

    def fails(*arguments: Any, **how: Any) -> Any:
        raise OSError(number, os.strerror(number))

    own = stream(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", fails)
        assert [len(own.batch(slot)[0]) for slot in range(2)] == [0, 0]
    told = f"{folder}: cannot be read now: 0.png ({os.strerror(number)})"
    assert warnings == ([] if number == errno.ENOENT else [told])
    assert not (folder / "skipped.csv").exists()
    assert greys(own.batch(2)[0]) == [50]


def test_a_header_that_points_to_nowhere_is_damage(folder: Path) -> None:
    (folder / "0.tif").write_bytes(b"II" + struct.pack("<HHHQ", 43, 8, 0, 2**62))  # where no seek can go
    with pytest.raises(ValueError, match=r"damaged .*Invalid argument"):
        read_image(folder / "0.tif", 32)


def test_an_image_of_too_many_pixels_is_said_to_be_large_and_not_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(folder, "0.png", 50, 0)
    monkeypatch.setattr("fedtta_flwr.data.folders.MOST_PIXELS", 1_999)
    with pytest.raises(ValueError, match=r"^of 2,000 pixels, more than 1,999$"):
        read_image(folder / "0.png", 32)


@pytest.mark.parametrize("at", ["tree", "image"])
def test_what_a_tree_may_not_read_is_no_fault_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        arrive(tmp_path / name, "0.png", 50, 0)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    where = "pathlib.Path.iterdir" if at == "tree" else "PIL.Image.open"
    monkeypatch.setattr(where, denied)  # as root everything may be read
    with pytest.raises(DataError, match=r": cannot be read \(Permission denied\); see to its rights") as caught:
        ImageTree(tmp_path, 32).check()
    assert str(caught.value).startswith(f"{tmp_path if at == 'tree' else tmp_path / 'cat' / '0.png'}:")


def test_an_image_of_a_tree_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        arrive(tmp_path / name, "0.png", 50, 0)
    tree = ImageTree(tmp_path, 32)
    (tmp_path / "dog" / "0.png").unlink()
    with pytest.raises(DataError, match=r"dog/0\.png: cannot be read \(No such file or directory\); see to"):
        tree[np.array([0, 1])]


def test_a_full_disk_loses_no_prediction_and_predicts_nothing_twice(
    folder: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(folder, "0.png", 10, 0)
    lie(folder / "1.json")
    own = stream(folder)
    with monkeypatch.context() as patch:
        patch.setattr("fedtta_flwr.data.growing_csv.append", full)
        assert greys(own.batch(0)[0]) == [10]
        own.predicted(0, sure_of([7]), version=1)
        assert len(own.batch(1)[0]) == 0
        assert greys(stream(folder).batch(0)[0]) == [10]  # another process cannot know
    assert sum("predictions.csv cannot be written (No space left on device)" in line for line in warnings) == 1
    assert len(own.batch(2)[0]) == 0
    assert table(folder / "predictions.csv")[1:] == [["0.png", "7", "0.750000", "1"]]
    assert [row[0] for row in table(folder / "skipped.csv")[1:]] == ["1.json"]


def full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_format_that_would_run_a_program_is_no_image(folder: Path) -> None:
    Image.new("RGB", (40, 40)).save(folder / "x.eps")
    lie(folder / "x.eps", (folder / "x.eps").read_bytes())
    assert stream(folder).batch(0)[0].shape[0] == 0
    assert table(folder / "skipped.csv")[1][0] == "x.eps"


def test_it_waits_for_a_full_batch_and_not_longer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrive(folder, "0.png", 1, 0)
    own = stream(folder, batch_size=2, wait=30.0)
    monkeypatch.setattr("fedtta_flwr.data.live.time.sleep", lambda seconds: arrive(folder, "1.png", 2, 1))
    assert greys(own.batch(0)[0]) == [1, 2]


def test_a_damaged_table_is_named(folder: Path) -> None:
    lines = "".join(f"{i:06d}.png,1,0.5,1\n" for i in range(10_000))
    (folder / "predictions.csv").write_text(f'file,class,probability,model_version\n"{lines}')
    with pytest.raises(DataError, match=r"predictions\.csv: damaged \(field larger.*\); mend it"):
        stream(folder)


def test_a_table_of_something_else_is_not_touched(folder: Path) -> None:
    (folder / "predictions.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"predictions\.csv: begins with .*move it away"):
        stream(folder)


# ------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": 0}, "set rounds"),
        ({"classes": 0}, "set classes"),
        ({"stream": "a:b"}, "one of both"),
        ({"live-wait": 3600.0}, "round-timeout"),
    ],
)
def test_what_a_live_run_needs(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_flat(LIVE | change)


def test_whose_folder(tmp_path: Path) -> None:
    one = RunConfig.from_flat(LIVE | {"data-dir": str(tmp_path)})
    two = RunConfig.from_flat(LIVE | {"num-clients": 2})
    assert live_folders(one, "client-00", {}) == (tmp_path, tmp_path)
    node = {"clients": "client-01", "live-dir": str(tmp_path), "predictions-dir": str(tmp_path / "out")}
    assert live_folders(two, "client-01", node) == (tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="live-dir"):
        live_folders(two, "client-01", {})
    both = {"clients": "client-00,client-01", "live-dir": str(tmp_path)}
    with pytest.raises(DataError, match="no sub-folder client-01"):
        live_folders(two, "client-01", both)
    (tmp_path / "client-01").mkdir()
    assert live_folders(two, "client-01", both) == (tmp_path / "client-01", tmp_path / "client-01")
    with pytest.raises(DataError, match="no such folder"):
        stream(tmp_path / "absent")


def test_clients_of_one_node_divide_the_time_to_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"camera-{i}" for i in range(3)]
    for name in names:
        (folder / name).mkdir()
    config = RunConfig.from_flat(LIVE | {"clients": ",".join(names), "num-clients": 3, "live-wait": 6.0})
    slept: list[float] = []
    monkeypatch.setattr("fedtta_flwr.data.live.time.monotonic", lambda: sum(slept))
    monkeypatch.setattr("fedtta_flwr.data.live.time.sleep", slept.append)
    for hosted in (names, names[:2], names[:1]):
        slept.clear()
        node = {"clients": ",".join(hosted), "live-dir": str(folder)}
        for name in hosted:
            build_stream(config, name, open_data(config), node).batch(0)
        assert sum(slept) == pytest.approx(6.0)


def test_the_server_needs_no_folder() -> None:
    config = RunConfig.from_flat(LIVE | {"data-dir": "/on/the/client/only"})
    assert check_data(config).classes == 10


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("strategy", ["fedctta", "fedavg-ft"])  # fedavg-ft needs every batch twice
def test_a_run_without_labels_has_no_accuracy_and_predicts_everything(
    run_local: Any, tmp_path: Path, strategy: str
) -> None:
    for client, number in (("client-00", 5), ("client-01", 0)):
        (tmp_path / client).mkdir()
        for i in range(number):
            arrive(tmp_path / client, f"{i}.png", 40 * i, i)
    run = run_local(**LIVE | {"strategy": strategy, "num-clients": 2, "batch-size": 2, "data-dir": str(tmp_path)})
    assert run.summary["accuracy"] == {}
    assert run.summary["finished"] is True
    assert run.summary["screened"] == {}
    assert [line["samples"] for line in run.lines()] == [2, 2, 1]
    assert [line["clients"] for line in run.lines()] == [1, 1, 1]
    assert all(line["accuracy"] == {} for line in run.lines())
    rows = table(tmp_path / "client-00" / "predictions.csv")[1:]
    assert [row[0] for row in rows] == ["0.png", "1.png", "2.png", "3.png", "4.png"]
    assert [row[3] for row in rows] == ["1", "1", "2", "2", "3"]
    assert all(0 < float(row[2]) <= 1 and row[1].isdigit() for row in rows)
    assert not (tmp_path / "client-01" / "predictions.csv").exists()


class Endless:
    """Two slots without labels; the second comes only when the first has been predicted."""

    domains = ("live", "live")

    def __init__(self) -> None:
        self.known: list[int] = []

    def __len__(self) -> int:
        return 2

    def batch(self, slot: int) -> tuple[Tensor, None]:
        assert self.known == list(range(slot)), "the visit asks for a batch before it has told of the last one"
        return torch.full((3, 3, 32, 32), 0.5), None

    def predicted(self, slot: int, probabilities: Tensor, version: int) -> None:
        assert probabilities.shape == (3, 10)
        self.known.append(slot)


def endless(config: RunConfig, client: str) -> Endless:
    return Endless()


def test_a_prediction_does_not_wait_for_the_next_batch(run_local: Any, allowed: str) -> None:
    own = {"stream": f"{allowed}:endless", "classes": 10, "num-clients": 1, "aggregate-every": 2}
    assert [line["samples"] for line in run_local(**own).lines()] == [6]


def test_a_full_disk_ends_no_run(run_local: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(3):
        arrive(tmp_path, f"{i}.png", 40 * i, i)
    monkeypatch.setattr("fedtta_flwr.data.growing_csv.append", full)
    run = run_local(**LIVE | {"data-dir": str(tmp_path), "batch-size": 1})
    assert run.summary["finished"] is True
    assert [line["samples"] for line in run.lines()] == [1, 1, 1]


def test_a_run_in_which_nothing_arrives_ends_well(run_local: Any, tmp_path: Path) -> None:
    run = run_local(**LIVE | {"data-dir": str(tmp_path), "aggregate-every": 2})
    assert run.summary["finished"] is True
    assert [line["samples"] for line in run.lines()] == [0, 0, 0]


# ------------------------------------------------------------------------------------------------ a stream of one's own


class HalfLabelled:
    """Slot 0 has no labels, slot 1 has, slot 2 is empty."""

    domains = ("dark", "day", "night")

    def __len__(self) -> int:
        return 3

    def batch(self, slot: int) -> Any:
        x = torch.full((0 if slot == 2 else 2, 3, 32, 32), 0.5)
        return x, None if slot == 0 else np.zeros(len(x), np.int64)


def half_labelled(config: RunConfig, client: str) -> HalfLabelled:
    return HalfLabelled()


def wrong(config: RunConfig, client: str) -> HalfLabelled:
    raise KeyError("no camera")


def nothing(config: RunConfig, client: str) -> None:
    """Forget to return it."""


def batches(config: RunConfig, client: str) -> list[Any]:
    return []


def short(config: RunConfig, client: str) -> HalfLabelled:
    made = HalfLabelled()
    made.domains = ("dark",)
    return made


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of this module, which the operator allows."""
    import sys

    monkeypatch.setitem(sys.modules, "my_streams", sys.modules[__name__])
    monkeypatch.setenv("FEDTTA_PLUGINS", "my_streams")
    return "my_streams"


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("strategy", ["fedctta", "fedavg-ft"])
def test_only_labelled_samples_are_scored_under_their_own_domain(
    run_local: Any, allowed: str, every: int, strategy: str
) -> None:
    run = run_local(
        **{
            "strategy": strategy,
            "stream": f"{allowed}:half_labelled",
            "classes": 10,
            "num-clients": 2,
            "aggregate-every": every,
        }
    )
    for score in ("source", "local", "pre", "tta", "post"):
        assert set(run.summary["accuracy"][score]["per_corruption"]) == {"day"}
    assert sum(line["samples"] for line in run.lines()) == 8


def test_an_own_stream_needs_the_operators_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTTA_PLUGINS", raising=False)
    config = RunConfig.from_flat({"stream": "my_streams:half_labelled", "classes": 10})
    with pytest.raises(ConfigError, match="FEDTTA_PLUGINS=my_streams"):
        check_data(config)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"stream": "{}:wrong"}, "no camera"),
        ({"stream": "{}:nothing"}, "returned NoneType, without __len__; expected an object with __len__, domains and"),
        ({"stream": "{}:batches"}, "returned list, without domains; expected"),
        ({"stream": "{}:short"}, "3 slots but 1 domains"),
        ({"stream": "{}:absent"}, "cannot be imported"),
        ({"stream": "{}:half_labelled", "classes": 0}, "set classes"),
    ],
)
def test_faults_of_an_own_stream(allowed: str, overrides: dict[str, Any], words: str) -> None:
    overrides = {"classes": 10} | overrides | {"stream": overrides["stream"].format(allowed)}
    config = RunConfig.from_flat(overrides)
    with pytest.raises(FedTTAError, match=words) as caught:
        build_stream(config, "client-00", open_data(config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a", "a:", ":b", "a b:c", "a:b:c", "../a:b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="my_module:my_stream"):
        RunConfig.from_flat({"stream": name})
