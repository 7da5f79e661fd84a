"""Rebuilding in the published layout: content, resumption, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta_flwr.data import rebuild as module
from fedtta_flwr.data.corruptions import corrupt
from fedtta_flwr.data.rebuild import rebuild
from fedtta_flwr.data.zenodo import MANIFEST
from fedtta_flwr.errors import ConfigError, DataError
from fedtta_flwr.files import write_json

N = 12
IMAGES = np.random.default_rng(0).integers(0, 256, (N, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(N) % 10
CHEAP = ("contrast", "impulse_noise")


def build(
    output: Path, corruptions: tuple[str, ...] = CHEAP, severities: Any = range(1, 6), **options: Any
) -> list[str]:
    return rebuild(IMAGES, LABELS, output, dataset="cifar10", corruptions=corruptions, severities=severities, **options)


def files(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("workers", [1, 2])
def test_severity_s_stands_in_block_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(module, "CHUNK", 5)  # does not divide N
    told: list[tuple[int, int]] = []
    assert build(tmp_path / "o", seed=4, workers=workers, progress=lambda *at: told.append(at)) == list(CHEAP)
    for name in CHEAP:
        array = np.load(tmp_path / "o" / f"{name}.npy")
        assert array.shape == (5 * N, 32, 32, 3)
        assert array.dtype == np.uint8
        for s in range(1, 6):
            np.testing.assert_array_equal(array[(s - 1) * N : s * N], corrupt(IMAGES, name, s, seed=4))
    assert np.load(tmp_path / "o" / "labels.npy").tolist() == LABELS.tolist() * 5
    assert set(files(tmp_path / "o")) == {"labels.npy", *(f"{name}.npy" for name in CHEAP), MANIFEST}
    assert told[-1] == (N * 10, N * 10)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_what_is_finished_is_kept_and_the_rest_is_made(tmp_path: Path) -> None:
    build(tmp_path, ("contrast",), [5])
    before = files(tmp_path)
    assert build(tmp_path, CHEAP, [5]) == ["impulse_noise"]
    assert files(tmp_path)["contrast.npy"] == before["contrast.npy"]
    assert build(tmp_path, ("contrast",), [2]) == ["contrast"]
    array = np.load(tmp_path / "contrast.npy")
    np.testing.assert_array_equal(array[4 * N :], corrupt(IMAGES, "contrast", 5, seed=0))
    np.testing.assert_array_equal(array[N : 2 * N], corrupt(IMAGES, "contrast", 2, seed=0))
    assert not array[:N].any()
    assert json.loads((tmp_path / MANIFEST).read_text())["corruptions"] == {"contrast": [2, 5], "impulse_noise": [5]}
    assert build(tmp_path, CHEAP, [5]) == []


def test_a_build_that_was_broken_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(task: Any) -> int:
        if task.corruption == "impulse_noise":
            raise KeyboardInterrupt
        return original(task)

    original = module._fill
    monkeypatch.setattr(module, "_fill", stop)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path)
    assert (tmp_path / "contrast.npy").exists()
    assert not (tmp_path / "impulse_noise.npy").exists()
    monkeypatch.setattr(module, "_fill", original)
    assert build(tmp_path) == ["impulse_noise"]
    assert not any(name.startswith(".") for name in files(tmp_path))


def test_a_file_that_is_there_but_not_listed_yet_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill, or a full disk, between the two: the folder stays this command's."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", fails_at(2))
        with pytest.raises(DataError, match=r"what is finished is kept"):
            build(tmp_path, ("contrast", "fog"), [5])
    assert (tmp_path / "contrast.npy").exists()
    assert build(tmp_path, ("fog",), [5]) == ["fog"]
    assert build(tmp_path, ("contrast", "fog"), [5]) == ["contrast"]
    assert build(tmp_path, ("contrast", "fog"), [5]) == []
    np.save(tmp_path / "snow.npy", np.zeros(1))
    with pytest.raises(DataError, match=r"snow.npy: not made by this command"):
        build(tmp_path, ("snow",), [5])


def fails_at(call: int) -> Callable[..., None]:
    calls = iter(range(1, 100))

    def write(path: Path, content: Any) -> None:
        if next(calls) == call:
            raise OSError(28, "No space left on device")
        write_json(path, content)

    return write


def test_a_finished_file_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    build(tmp_path, ("contrast",))
    path = tmp_path / "contrast.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert build(tmp_path, ("contrast",)) == ["contrast"]
    assert path.read_bytes() == whole


def test_another_build_or_other_files_are_not_touched(tmp_path: Path) -> None:
    build(tmp_path / "a", ("contrast",), [1])
    with pytest.raises(ConfigError, match="seed = 0, asked for 1"):
        build(tmp_path / "a", ("contrast",), [1], seed=1)
    (tmp_path / "b").mkdir()
    np.save(tmp_path / "b" / "fog.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"fog\.npy: not made by this command"):
        build(tmp_path / "b", ("contrast",))
    np.save(tmp_path / "a" / "impulse_noise.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"impulse_noise\.npy: not made by this command"):
        build(tmp_path / "a", CHEAP, [1])
    assert np.load(tmp_path / "a" / "impulse_noise.npy").tolist() == [0, 0, 0]


def test_a_bad_name_or_absent_photographs_are_found_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_fill", lambda task: pytest.fail("work was begun"))
    with pytest.raises(DataError, match="haze"):
        build(tmp_path / "o", ("contrast", "haze"))
    with pytest.raises(DataError, match="frost"):
        build(tmp_path / "o", ("contrast", "frost"), frost_dir=tmp_path)
    assert not (tmp_path / "o").exists()


def test_a_full_disk_is_one_line_and_leaves_no_wrong_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(task: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_fill", full)
    with pytest.raises(DataError, match=r"No space left on device.*what is finished is kept") as caught:
        build(tmp_path / "o", ("contrast",))
    assert "\n" not in str(caught.value)
    assert set(files(tmp_path / "o")) <= {"labels.npy", ".contrast.npy.part", MANIFEST}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"^--output .*/o: cannot be made: Not a directory"):
        build(tmp_path / "file" / "o", ("contrast",))


def test_two_do_not_write_to_one_folder(tmp_path: Path) -> None:
    def at_once(done: int, total: int) -> None:
        with pytest.raises(ConfigError, match=r"^--output .*: another rebuild writes there"):
            build(tmp_path / "o", ("contrast",), [1])

    assert build(tmp_path / "o", ("contrast",), [5], progress=at_once) == ["contrast"]
    assert not np.load(tmp_path / "o" / "contrast.npy")[:N].any()


def test_what_a_kill_has_left_is_no_build_of_somebody_elses(tmp_path: Path) -> None:
    def kill(done: int, total: int) -> None:
        for path in tmp_path.iterdir():
            (tmp_path.parent / "left").mkdir(exist_ok=True)
            (tmp_path.parent / "left" / path.name).write_bytes(path.read_bytes())

    build(tmp_path, ("contrast",), [5], progress=kill)
    assert ".clean.npy.part" in files(tmp_path.parent / "left")
    assert build(tmp_path.parent / "left", ("contrast",), [5]) == ["contrast"]
    assert files(tmp_path.parent / "left").keys() == files(tmp_path).keys()


def test_the_same_images_in_another_order_are_another_build(tmp_path: Path) -> None:
    """CIFAR-100 comes in two orders, with labels for each: arrays of one beside labels of the other fit nobody."""
    build(tmp_path, ("contrast",), [5])
    before = files(tmp_path)

    def backwards() -> None:
        rebuild(IMAGES[::-1], LABELS[::-1], tmp_path, dataset="cifar10", corruptions=CHEAP, severities=[5])

    with pytest.raises(ConfigError, match="built from other images"):
        backwards()
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    del manifest["clean"]  # as earlier versions wrote it
    write_json(tmp_path / MANIFEST, manifest)
    with pytest.raises(ConfigError, match="other labels than those of the images now"):
        backwards()
    assert files(tmp_path)["labels.npy"] == before["labels.npy"]
    assert build(tmp_path, CHEAP, [5]) == ["impulse_noise"]
