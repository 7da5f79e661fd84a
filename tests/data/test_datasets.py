"""Every data set from a small or sparse copy of its layout, and the faults of each."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data import datasets, folders, recent
from fedtta_flwr.data.build import check_data
from fedtta_flwr.data.corruptions import corrupt
from fedtta_flwr.data.datasets import DATASETS, Corruptible, open_test_set
from fedtta_flwr.data.zenodo import MANIFEST
from fedtta_flwr.errors import ConfigError, DataError, FedTTAError

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
RNG = np.random.default_rng(0)


def refused(*words: str, name: str, folder: Path | str, **options: Any) -> None:
    def read() -> None:
        test_set = open_test_set(name, str(folder), 0, **options)
        if isinstance(test_set, Corruptible):
            test_set.check()
        test_set.images("fog", 5)[np.array([0])]

    with pytest.raises(FedTTAError) as caught:
        read()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def sparse(path: Path, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """An array of zeros that takes no room on disk."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)


# ------------------------------------------------------------------------------------------------ names and options


def test_every_name_but_the_live_one_opens_something() -> None:
    assert set(datasets._OPEN) == set(DATASETS) - {"live"}


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    refused("cifar", "digits", name="cifar", folder="")
    refused("data-dir", "needs none", name="digits", folder=tmp_path)
    refused("data-dir is empty", "cifar10-c", name="cifar10-c", folder="")
    refused("no such folder", "/no/such", name="folder", folder="/no/such")
    refused("image-size = 64", "folder", name="digits", folder="", image_size=64)
    refused("classes = 11", "digits has 10", name="digits", folder="", classes=11)


# ---------------------------------------------------------------------------------------------------- made on the fly


class Counting:
    """Images that remember which of them were read."""

    def __init__(self, images: Any) -> None:
        self.images, self.read = images, list[int]()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: Any) -> Any:
        self.read += list(map(int, rows))
        return self.images[rows]


def test_only_what_is_asked_for_is_corrupted_and_only_once() -> None:
    clean = Counting(RNG.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8))
    test_set = Corruptible(clean, np.zeros(50, np.int64), 10, seed=3)
    rows = np.array([41, 7, 7, 20])
    got = test_set.images("glass_blur", 4)[rows]
    whole = corrupt(clean.images, "glass_blur", 4, seed=3)  # all at once, in order
    np.testing.assert_array_equal(got, whole[rows])
    assert sorted(clean.read) == [7, 20, 41]
    np.testing.assert_array_equal(test_set.images("glass_blur", 4)[np.array([7, 8])], whole[[7, 8]])
    assert sorted(clean.read) == [7, 8, 20, 41]
    assert test_set.images("glass_blur", 4)[np.empty(0, np.int64)].shape == (0, 32, 32, 3)
    assert len(test_set.images("glass_blur", 4)) == 50


def test_room_is_taken_for_what_is_corrupted_and_not_for_all() -> None:
    clean = np.broadcast_to(RNG.integers(0, 256, (512, 512, 3), dtype=np.uint8), (2_000_000, 512, 512, 3))  # 1.5 TB
    got = Corruptible(clean, np.zeros(len(clean), np.int64), 10, seed=3).images("contrast", 4)[np.array([1_999_999])]
    assert got.shape == (1, 512, 512, 3)


def test_of_what_is_corrupted_the_latest_is_kept_and_all_comes_out_the_same_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recent, "ROOM", 5 * 32 * 32 * 3)  # five images
    clean = Counting(RNG.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8))
    test_set = Corruptible(clean, np.zeros(50, np.int64), 10, seed=3)
    fog, glass = (corrupt(clean.images, name, 4, seed=3) for name in ("fog", "glass_blur"))
    for name, whole, rows in (
        ("fog", fog, [0, 1, 2]),
        ("glass_blur", glass, [0, 1, 2]),  # the first fog is gone with these
        ("fog", fog, [2, 1]),
        ("fog", fog, [0, 1, 2]),
        ("glass_blur", glass, list(range(10))),  # more than there is room for
    ):
        np.testing.assert_array_equal(test_set.images(name, 4)[np.array(rows)], whole[rows])
    assert clean.read == [0, 1, 2, 0, 1, 2, 0, *range(3, 10)]


# ------------------------------------------------------------------------------------------------------------ Zenodo


@pytest.fixture
def zenodo(tmp_path: Path) -> Path:
    """CIFAR-10-C with one corruption, whose first pixel tells severity and row."""
    labels = np.arange(10_000) % 10
    np.save(tmp_path / "labels.npy", np.tile(labels, 5).astype(np.uint8))
    fog = sparse(tmp_path / "fog.npy", (50_000, 32, 32, 3))
    for severity in range(1, 6):
        for row in (0, 1234, 9999):
            fog[(severity - 1) * 10_000 + row, 0, 0] = [severity, row // 256, row % 256]
    fog.flush()
    return tmp_path


def test_the_published_layout(zenodo: Path) -> None:
    test_set = open_test_set("cifar10-c", str(zenodo), 0)
    assert (test_set.classes, len(test_set.labels), test_set.labels.dtype) == (10, 10_000, np.int64)
    for severity in range(1, 6):
        images = test_set.images("fog", severity)
        assert len(images) == 10_000
        pixels = images[np.array([9999, 0, 1234])][:, 0, 0].tolist()
        assert pixels == [[severity, 39, 15], [severity, 0, 0], [severity, 4, 210]]


def test_reading_a_batch_copies_the_batch_alone(zenodo: Path) -> None:
    import tracemalloc

    test_set = open_test_set("cifar10-c", str(zenodo), 0)
    tracemalloc.start()
    try:
        batch = test_set.images("fog", 5)[np.arange(10)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batch.nbytes == 30_720
    assert peak < 200_000  # the file has 153,600,128


def test_the_folder_that_the_archive_makes_may_be_in_data_dir(zenodo: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    inner = outer / "CIFAR-10-C"
    inner.mkdir()
    for name in ("labels.npy", "fog.npy"):
        (zenodo / name).rename(inner / name)
    assert len(open_test_set("cifar10-c", str(outer), 0).images("fog", 1)) == 10_000


def test_faults_of_the_published_layout(zenodo: Path) -> None:
    with pytest.raises(DataError, match=r"snow\.npy: no such file.*fedtta data get cifar10-c"):
        open_test_set("cifar10-c", str(zenodo), 0).images("snow", 5)
    with pytest.raises(DataError, match=r"holds no clean images.*cifar10"):
        open_test_set("cifar10-c", str(zenodo), 0).images("none", 5)
    sparse(zenodo / "frost.npy", (10_000, 32, 32, 3)).flush()
    with pytest.raises(DataError, match=r"frost\.npy.*\(10000, 32, 32, 3\), expected .*\(50000, 32, 32, 3\)"):
        open_test_set("cifar10-c", str(zenodo), 0).images("frost", 5)
    labels = np.load(zenodo / "labels.npy")
    np.save(zenodo / "labels.npy", np.concatenate([labels[:-1], [0]]))
    refused("labels.npy", "different labels", name="cifar10-c", folder=zenodo)
    np.save(zenodo / "labels.npy", labels[:10_000])
    refused("labels.npy", "(10000)", "(50000)", name="cifar10-c", folder=zenodo)
    np.save(zenodo / "labels.npy", np.tile(np.arange(10_000) % 100, 5).astype(np.uint8))
    refused("labels.npy", "label 10 at 10", "0 to 9", name="cifar10-c", folder=zenodo)
    assert open_test_set("cifar100-c", str(zenodo), 0).classes == 100


def test_a_rebuilt_set_says_which_severities_it_has(zenodo: Path) -> None:
    (zenodo / MANIFEST).write_text(json.dumps({"corruptions": {"fog": [2, 5]}}))
    test_set = open_test_set("cifar10-c", str(zenodo), 0)
    assert len(test_set.images("fog", 2)) == 10_000
    with pytest.raises(DataError, match=r"fog was not rebuilt at severity 4 \(there: 2, 5\); run .*--severities 4 "):
        test_set.images("fog", 4)
    (zenodo / MANIFEST).write_text("{")
    refused(MANIFEST, "JSON", name="cifar10-c", folder=zenodo)


def test_every_severity_that_a_run_will_read_is_looked_for_before_it(zenodo: Path) -> None:
    (zenodo / MANIFEST).write_text(json.dumps({"corruptions": {"fog": [2, 5]}}))
    flat = {"dataset": "cifar10-c", "data-dir": str(zenodo), "corruptions": "fog"}
    check_data(RunConfig.from_flat(flat))
    with pytest.raises(DataError, match="fog was not rebuilt at severity 1"):
        check_data(RunConfig.from_flat(flat | {"severity-schedule": "gradual"}))


# ------------------------------------------------------------------------------------------------- clean CIFAR sets


def test_cifar10_through_torchvision(cifar: Path) -> None:
    test_set = open_test_set("cifar10", str(cifar), 0)
    assert test_set.classes == 10
    packed = np.load(SHARED / "cifar10_test" / "labels.npy")  # an independent copy
    np.testing.assert_array_equal(test_set.labels, packed)
    strip = np.asarray(Image.open(SHARED / "cifar10_test" / "00.webp").convert("RGB"))
    np.testing.assert_array_equal(test_set.images("none", 5)[np.array([1])][0], strip[:32, 32:64])
    one = test_set.images("contrast", 5)[np.array([9876])]
    clean = test_set.images("none", 5)[np.array([9876])]
    np.testing.assert_array_equal(one, corrupt(clean, "contrast", 5, seed=0, indices=[9876]))


def test_a_changed_batch_is_refused_before_it_is_unpickled(cifar: Path, tmp_path: Path) -> None:
    shutil.copytree(cifar / "cifar-10-batches-py", tmp_path / "cifar-10-batches-py", copy_function=shutil.copy)
    batch = tmp_path / "cifar-10-batches-py" / "test_batch"
    content = bytearray(batch.read_bytes())
    content[1000] ^= 1
    batch.chmod(0o644)
    batch.write_bytes(content)
    refused(str(batch), "not the official file", "MD5", name="cifar10", folder=tmp_path)
    batch.unlink()
    refused(str(batch), "no such file", name="cifar10", folder=tmp_path)
    refused("cifar-100-python", "no such file", name="cifar100", folder=tmp_path)


def test_cifar100_from_the_archive(cifar: Path) -> None:
    test_set = open_test_set("cifar100", str(cifar), 0)
    assert (test_set.classes, len(test_set.labels)) == (100, 10_000)
    assert np.bincount(test_set.labels).tolist() == [100] * 100


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<html>", "no readable archive"),
        (b"PK\x03\x04abc", "no readable archive"),
        ({"images": np.zeros((9, 32, 32, 3), np.uint8), "labels": np.zeros(9, np.uint8)}, "(9, 32, 32, 3)"),
        ({"labels": np.zeros(10_000, np.uint8)}, "images"),
        ({"images": np.zeros((10_000, 32, 32, 3), np.uint8), "labels": np.full(10_000, 100)}, "label 100"),
    ],
)
def test_faults_of_the_archive(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "cifar100_test.npz"
    path.write_bytes(content) if isinstance(content, bytes) else np.savez(path, **content)
    refused(str(path), words, name="cifar100", folder=tmp_path)


def test_an_archive_that_is_damaged_within_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cifar100_test.npz"
    noise = RNG.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8)
    np.savez_compressed(path, images=np.tile(noise, (100, 1, 1, 1)), labels=np.zeros(10_000, np.uint8))
    whole = path.read_bytes()
    for at in range(1_000, len(whole), len(whole) // 20):
        path.write_bytes(whole[:at] + bytes(20) + whole[at + 20 :])
        refused(str(path), "no readable archive", name="cifar100", folder=tmp_path)


def test_cifar10_1(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (2000, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "cifar10.1_v6_data.npy", images)
    np.save(tmp_path / "cifar10.1_v6_labels.npy", (np.arange(2000) % 10).astype(np.int32))
    test_set = open_test_set("cifar10.1", str(tmp_path), 0)
    assert (test_set.classes, len(test_set.labels)) == (10, 2000)
    np.testing.assert_array_equal(test_set.images("none", 1)[np.array([5, 1999])], images[[5, 1999]])
    np.save(tmp_path / "cifar10.1_v6_data.npy", images[:1999])
    refused("cifar10.1_v6_data.npy", "(1999, 32, 32, 3)", name="cifar10.1", folder=tmp_path)


# ----------------------------------------------------------------------------------------------------- the user's own


def test_arrays(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (7, 40, 40, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", np.array([0, 1, 2, 0, 1, 2, 2]))
    test_set = open_test_set("arrays", str(tmp_path), 5)
    assert test_set.classes == 3
    np.testing.assert_array_equal(test_set.images("fog", 3)[np.array([6])], corrupt(images, "fog", 3, seed=5)[6:])
    assert open_test_set("arrays", str(tmp_path), 0, classes=8).classes == 8
    refused("label 2", "0 to 1", name="arrays", folder=tmp_path, classes=2)
    np.save(tmp_path / "labels.npy", np.array([0, 1]))
    refused("labels.npy", "(2)", "(7)", name="arrays", folder=tmp_path)


def test_faults_of_arrays_say_which_file_and_what_to_do(tmp_path: Path) -> None:
    labels = np.array([0, 1, 2, 0, 1, 2, 2])
    np.save(tmp_path / "labels.npy", labels)
    for side in ((24, 24), (32, 48)):
        np.save(tmp_path / "images.npy", np.zeros((7, *side, 3), np.uint8))
        words = (f"{tmp_path / 'images.npy'}: images of {side[0]}x{side[1]} pixels", "square", "32", "resize", "'none'")
        refused(*words, name="arrays", folder=tmp_path)
        clean = open_test_set("arrays", str(tmp_path), 0).images("none", 5)  # as they are
        assert clean[np.array([0, 6])].shape == (2, *side, 3)
    np.save(tmp_path / "images.npy", np.zeros((7, 3, 32, 32), np.uint8))
    refused("uint8 of shape (7, 3, 32, 32), expected uint8 of shape (N, H, W, 3)", name="arrays", folder=tmp_path)
    np.save(tmp_path / "images.npy", np.zeros((7, 32, 32, 3), np.uint8))
    for wrong, classes, words in (
        (-1, 0, "label -1 at 3, expected 0 or more"),
        (10, 10, "label 10 at 3, expected 0 to 9"),
    ):
        np.save(tmp_path / "labels.npy", np.where(np.arange(7) == 3, wrong, labels))
        refused(f"{words}; number the classes from 0, and set", name="arrays", folder=tmp_path, classes=classes)


def tree(root: Path) -> None:
    for name, colour in (("zebra", (0, 0, 255)), ("ant", (255, 0, 0)), ("bee", (0, 255, 0))):
        (root / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (50 + i, 40), colour).save(root / name / f"{i}.{'png' if i else 'jpg'}")


def test_a_tree_of_images(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "ant" / ".DS_Store").write_bytes(b"x")
    test_set = open_test_set("folder", str(tmp_path), 0, image_size=48)
    assert test_set.classes == 3
    assert test_set.labels.tolist() == [0, 0, 1, 1, 2, 2]
    images = test_set.images("none", 1)[np.array([5, 0, 2])]
    assert images.shape == (3, 48, 48, 3)
    for image, colour in zip(images, [(0, 0, 255), (255, 0, 0), (0, 255, 0)], strict=True):
        assert np.abs(image.astype(int) - colour).max() <= 2


def test_images_of_16_bits_a_channel_are_those_of_8_and_of_32_are_refused(tmp_path: Path) -> None:
    tree(tmp_path)
    grey = np.linspace(0, 255, 64 * 64).astype(np.uint8).reshape(64, 64)
    for i, (pixels, kind) in enumerate(
        [(grey, "png"), (grey * np.uint16(257), "png"), (grey * np.uint16(257), "tiff")]
    ):
        Image.fromarray(pixels).save(tmp_path / "ant" / f"grey{i}.{kind}")
    (tmp_path / "ant" / "grey3.pgm").write_bytes(b"P5 64 64 65535\n" + (grey * np.uint16(257)).byteswap().tobytes())
    few = (grey.astype(np.uint16) * 16).byteswap().tobytes()  # of 12 bits
    (tmp_path / "ant" / "grey4.pgm").write_bytes(b"P5 64 64 4080\n" + few)
    inverted = {262: 0}  # white is zero; of 8 bits Pillow writes what it will read
    Image.fromarray(grey).save(tmp_path / "ant" / "grey5.tiff", tiffinfo=inverted)
    Image.fromarray((255 - grey) * np.uint16(257)).save(tmp_path / "ant" / "grey6.tiff", tiffinfo=inverted)
    images = open_test_set("folder", str(tmp_path), 0).images("none", 1)[np.arange(2, 9)]
    assert len(np.unique(images[0])) > 100
    assert (images == images[0]).all()
    Image.fromarray((grey / 255).astype(np.float32)).save(tmp_path / "ant" / "real.tiff")
    with pytest.raises(DataError, match=r"real.tiff: 32 bits a channel, expected an image of 8 or 16 bits a channel"):
        open_test_set("folder", str(tmp_path), 0).images("none", 1)[np.array([9])]


def test_a_tree_has_the_order_of_torchvisions_image_folder(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    tree(tmp_path)
    oracle = ImageFolder(str(tmp_path))
    test_set = open_test_set("folder", str(tmp_path), 0)
    assert test_set.labels.tolist() == oracle.targets
    for row, (image, _) in enumerate(oracle):
        small = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(test_set.images("none", 1)[np.array([row])][0], small)


def test_of_a_tree_the_latest_images_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path)
    images = open_test_set("folder", str(tmp_path), 0).images("none", 1)
    rows = np.array([3, 0, 3, 5])
    first = images[rows]
    read, original = [], folders.read_image
    monkeypatch.setattr(folders, "read_image", lambda path, size: read.append(path.name) or original(path, size))
    np.testing.assert_array_equal(images[rows], first)
    assert not read
    monkeypatch.setattr(recent, "ROOM", 2 * first[0].nbytes)
    again = [images[np.array(part)] for part in ([1], [3, 5], [0], [0])]
    np.testing.assert_array_equal(np.concatenate(again[1:]), first[[0, 3, 1, 1]])
    assert len(read) == 3  # 1, for which 3 and 0 had to go; 3, and then 0 once


def test_a_tree_of_a_data_sets_parts_is_one_folder_too_high(tmp_path: Path) -> None:
    for part in ("Test", "train"):
        tree(tmp_path / part)
    refused("Test, train are parts", f"e.g. {tmp_path / 'Test'}", name="folder", folder=tmp_path)
    tree(tmp_path)  # with others beside, they are classes like any
    assert open_test_set("folder", str(tmp_path), 0).classes == 5


def test_faults_of_a_tree(tmp_path: Path) -> None:
    refused("0 sub-folders", name="folder", folder=tmp_path)
    tree(tmp_path)
    (tmp_path / "empty").mkdir()
    refused("empty", "no images", name="folder", folder=tmp_path)
    (tmp_path / "empty" / "page.png").write_bytes(b"<html>")
    refused("page.png", "not an image (6 bytes)", name="folder", folder=tmp_path)
    cut = (tmp_path / "ant" / "0.jpg").read_bytes()[:400]
    (tmp_path / "empty" / "page.png").unlink()
    (tmp_path / "empty").rmdir()
    (tmp_path / "ant" / "0.jpg").write_bytes(cut)
    refused("0.jpg", name="folder", folder=tmp_path)


def test_what_is_hidden_belongs_to_no_class(tmp_path: Path) -> None:
    tree(tmp_path)
    whole = open_test_set("folder", str(tmp_path), 0)
    (tmp_path / "ant" / ".cache").mkdir()
    for path in (".hidden", ".cache/0-copy.jpg", ".cache/notes.txt"):
        (tmp_path / "ant" / path).write_bytes((tmp_path / "ant" / "0.jpg").read_bytes())
    assert len(open_test_set("folder", str(tmp_path), 0).labels) == len(whole.labels)


def test_classes_of_a_tree_must_be_those_that_were_said(tmp_path: Path) -> None:
    tree(tmp_path)
    with pytest.raises(ConfigError, match="classes = 4: folder has 3"):
        open_test_set("folder", str(tmp_path), 0, classes=4)


def test_files_that_cannot_be_seen_are_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row behind one that is left out would be another."""
    tree(tmp_path)
    inner = tmp_path / "ant" / "inner"
    inner.mkdir()
    (inner / "8.jpg").symlink_to(tmp_path / "not-fetched.jpg")
    refused(f"{inner / '8.jpg'}: a link to nothing", name="folder", folder=tmp_path)
    (inner / "8.jpg").unlink()
    (tmp_path / "cow").symlink_to(tmp_path / "not-fetched")
    refused(f"{tmp_path / 'cow'}: a link to nothing", name="folder", folder=tmp_path)
    (tmp_path / "cow").unlink()
    scandir = os.scandir

    def locked(path: Path | str) -> Any:
        if str(path) == str(inner):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    refused(f"{inner}: cannot be read (Permission denied)", name="folder", folder=tmp_path)
    monkeypatch.undo()
    before = len(open_test_set("folder", str(tmp_path), 0).labels)
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    Image.new("RGB", (40, 40)).save(elsewhere / "9.png")
    (inner / "linked").symlink_to(elsewhere)
    assert len(open_test_set("folder", str(tmp_path), 0).labels) == before + 1
    (inner / "round").symlink_to(inner)
    refused(f"{inner / 'round'}: a link to a folder that holds it", name="folder", folder=tmp_path)


def test_small_images_of_a_tree_are_not_corrupted(tmp_path: Path) -> None:
    tree(tmp_path)
    refused("image-size = 16: corruptions need 32 or more", name="folder", folder=tmp_path, image_size=16)
    assert open_test_set("folder", str(tmp_path), 0, image_size=16).images("none", 5)[np.array([0])].shape[1] == 16


def test_a_label_far_beyond_all_images_is_none(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((200, 32, 32, 3), np.uint8))
    labels = np.arange(200)
    np.save(tmp_path / "labels.npy", labels)
    assert open_test_set("arrays", str(tmp_path), 0).classes == 200
    labels[7] = 70_000_000
    np.save(tmp_path / "labels.npy", labels)
    refused("labels.npy: label 70000000 at 7, of 200 images; set `classes`", name="arrays", folder=tmp_path)


def test_labels_of_the_other_cifar_are_refused(zenodo: Path) -> None:
    refused("labels of 10 classes, cifar100-c has 100", name="cifar100-c", folder=zenodo)
    (zenodo / "fedtta-rebuild.json").write_text('{"corruptions": {"fog": null}}')
    refused("no manifest of a rebuilt set", name="cifar10-c", folder=zenodo)


def test_16_bits_become_the_nearest_8(tmp_path: Path) -> None:
    every = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(every).save(tmp_path / "a.png")
    read = folders.read_image(tmp_path / "a.png", 256)[..., 0]
    np.testing.assert_array_equal(read, np.rint(every / 257))
