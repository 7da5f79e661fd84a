"""The five test sets against what their definitions say, sample by sample."""

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.btgfl import SETS, Benchmark
from fedtta_flwr.data.build import open_benchmark
from fedtta_flwr.data.datasets import Corruptible, open_test_set
from fedtta_flwr.errors import ConfigError

CORRUPTIONS = ("contrast", "pixelate", "brightness")
CLASSES = 4
A, B, C, D, E = SETS


def images(samples: int, seed: int) -> Corruptible:
    """Images that show their own position: the first two pixels."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (samples, 32, 32, 3)).astype(np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 1, 0] = np.arange(samples) // 256, np.arange(samples) % 256
    return Corruptible(pixels, rng.integers(0, CLASSES, samples), CLASSES, seed=5)


DATA, NATURAL = images(400, 0), images(90, 1)


def benchmark(natural: bool = True, **overrides: Any) -> Benchmark:
    flat = {
        "task": "tgfl", "num-clients": 6, "corruptions": ",".join(CORRUPTIONS), "severity": 3, "tgfl.dirichlet": 0.3,
    }  # fmt: skip
    return Benchmark(RunConfig.from_flat(flat | overrides), DATA, NATURAL if natural else None)


@pytest.fixture(scope="module")
def made() -> Benchmark:
    return benchmark()


NAMES = [f"client-{i:02d}" for i in range(6)]


def rows_of(made: Benchmark, client: str, name: str, *, natural: bool = False) -> list[int]:
    found = made.samples(client, name)
    return found.rows[(found.versions == "natural") == natural].tolist()


def training_rows(made: Benchmark, client: str) -> list[int]:
    x, _ = made.training(client)
    pixels = (x * 255).round().to(int)
    return (pixels[:, 0, 0, 0] * 256 + pixels[:, 0, 0, 1]).tolist()


def test_three_fifths_train_and_a_fifth_tests(made: Benchmark) -> None:
    trained = [set(training_rows(made, c)) for c in NAMES]
    tested = [set(rows_of(made, c, A)) for c in NAMES]
    everything = [row for part in trained + tested for row in part]
    assert len(everything) == len(set(everything)) <= len(DATA.labels)
    for train, test in zip(trained, tested, strict=True):
        assert len(test) == pytest.approx(len(train) / 3, abs=1)
    assert sum(map(len, trained)) == pytest.approx(0.6 * 400, abs=6)


def test_the_validation_part_is_what_is_left_and_in_no_set_of_the_clients_own(made: Benchmark) -> None:
    for k, client in enumerate(made._names):
        x, y = made.validation(client)
        share = made._shares[k]
        own = {*share} - {*made._training_rows(client)} - {*made.samples(client, A).rows}
        assert len(y) == len(own) > 0
        position = (x[:, 0, 0, 0] * 255).round() * 256 + (x[:, 0, 0, 1] * 255).round()
        assert {*position.long().tolist()} == own
        assert not own & {*made.samples(client, C).rows}


def test_external_samples_are_of_the_others_validation_and_test_parts(made: Benchmark) -> None:
    trained = {row for c in NAMES for row in training_rows(made, c)}
    untrained = set(range(400)) - trained
    held_out = {c: set() for c in NAMES}  # validation and test: what no client's training part has
    own = {c: set(training_rows(made, c)) | set(rows_of(made, c, A)) for c in NAMES}
    for c in NAMES:
        external = rows_of(made, c, C)
        assert set(external) <= untrained
        assert not set(external) & own[c]
        assert len(external) == len(set(external))
        held_out[c] = set(external)
    # A client's own untrained samples are met by the others alone.
    sizes = {c: len(rows_of(made, c, A)) for c in NAMES}
    for c in NAMES:
        others = len(untrained) - 2 * sizes[c]  # validation is as large as the test part, up to one
        assert len(held_out[c]) == pytest.approx(others / 5, abs=2)


@pytest.mark.parametrize(("shifted", "original"), [(B, A), (D, C)])
def test_a_shifted_set_has_every_sample_once_corrupted_and_natural_ones(
    made: Benchmark, shifted: str, original: str
) -> None:
    drawn: Counter[str] = Counter()
    for c in NAMES:
        assert sorted(rows_of(made, c, shifted)) == sorted(rows_of(made, c, original))
        versions = made.samples(c, shifted).versions
        drawn.update(v for v in versions.tolist() if v != "natural")
    assert set(drawn) == set(CORRUPTIONS)
    total = sum(drawn.values())
    for number in drawn.values():  # uniform: within four standard deviations
        assert abs(number - total / 3) < 4 * np.sqrt(total * 2 / 9)


def test_every_natural_image_is_one_clients_by_its_classes(made: Benchmark) -> None:
    shares = {c: rows_of(made, c, B, natural=True) for c in NAMES}
    assert sorted(row for rows in shares.values() for row in rows) == list(range(90))
    # Sizes by the exact rule: a client's share of class k is its share of all samples of class k, up to one image.
    own = {c: Counter(made._data.labels[made._shares[i]].tolist()) for i, c in enumerate(NAMES)}
    for k in range(CLASSES):
        number = int((NATURAL.labels == k).sum())
        total = sum(own[c][k] for c in NAMES)
        for c in NAMES:
            found = sum(1 for row in shares[c] if NATURAL.labels[row] == k)
            assert abs(found - number * own[c][k] / total) < 1


def test_natural_images_of_a_class_that_nobody_has_are_dealt_evenly() -> None:
    few, only = images(400, 0), images(90, 1)
    few.labels, only.labels = np.minimum(few.labels, CLASSES - 2), np.full(90, CLASSES - 1)
    flat = {"task": "tgfl", "num-clients": 6, "corruptions": ",".join(CORRUPTIONS)}
    found = Benchmark(RunConfig.from_flat(flat), few, only)
    assert [len(rows_of(found, c, B, natural=True)) for c in NAMES] == [15] * 6


def test_external_natural_images_are_the_others(made: Benchmark) -> None:
    for c in NAMES:
        mine = set(rows_of(made, c, B, natural=True))
        theirs = rows_of(made, c, D, natural=True)
        assert not mine & set(theirs)
        assert len(theirs) == len(set(theirs)) == (90 - len(mine)) // 5


def test_the_mixed_set_has_equal_quarters(made: Benchmark) -> None:
    for c in NAMES:
        least = min(len(made.samples(c, name)) for name in (A, B, C, D))
        parts = {name: pairs(made, c, name) for name in (A, B, C, D)}
        mixed = pairs(made, c, E)
        assert len(mixed) == 4 * least
        union = Counter(p for name in parts for p in parts[name])
        assert not Counter(mixed) - union
        internal = sum(1 for row, version in mixed if version != "natural" and row in set(rows_of(made, c, A)))
        natural_internal = sum(
            1 for row, version in mixed if version == "natural" and row in set(rows_of(made, c, B, natural=True))
        )
        assert internal + natural_internal == 2 * least
        runs = [version == "none" for _, version in mixed]
        assert any(runs[: least // 2]) or least < 4  # not one quarter after the other
        assert not all(runs[:least])


def pairs(made: Benchmark, client: str, name: str) -> list[tuple[int, str]]:
    found = made.samples(client, name)
    return list(zip(found.rows.tolist(), found.versions.tolist(), strict=True))


def test_loaded_images_are_those_of_the_samples(made: Benchmark) -> None:
    client = NAMES[2]
    x, y = made.test(client, E)
    assert x.shape == (len(made.samples(client, E)), 3, 32, 32)
    for position, (row, version) in enumerate(pairs(made, client, E)):
        source, name = (NATURAL, "none") if version == "natural" else (DATA, version)
        expected = source.images(name, 3)[np.array([row])][0]
        np.testing.assert_array_equal((x[position] * 255).round().permute(1, 2, 0).numpy(), expected)
        assert y[position] == source.labels[row]


def test_nothing_depends_on_who_asks_first() -> None:
    first, second = benchmark(), benchmark()
    late = [pairs(second, c, name) for c in reversed(NAMES) for name in reversed(SETS)]
    early = [pairs(first, c, name) for c in NAMES for name in SETS]
    assert early == late[::-1]


def test_another_seed_is_another_benchmark() -> None:
    assert pairs(benchmark(seed=1), NAMES[0], E) != pairs(benchmark(seed=2), NAMES[0], E)


def test_without_natural_images_a_shifted_set_is_the_corrupted_one() -> None:
    made = benchmark(natural=False)
    assert all("natural" not in made.samples(c, name).versions for c in NAMES for name in SETS)
    assert len(made.samples(NAMES[0], B)) == len(made.samples(NAMES[0], A))


def test_too_few_samples_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"num-clients = 100: 400 samples are too few .* fewer clients"):
        benchmark(**{"num-clients": 100})


def test_classes_that_cannot_be_dealt_evenly_are_a_config_error() -> None:
    data = Corruptible(np.zeros((20_000, 32, 32, 3), np.uint8), np.arange(20_000) % 2, 2, 0)
    config = RunConfig.from_flat({"task": "tgfl", "num-clients": 10})
    with pytest.raises(ConfigError, match=r"20000 samples cannot be dealt .* larger tgfl.dirichlet than 0.1"):
        Benchmark(config, data)


def test_naturally_shifted_images_of_other_classes_are_a_config_error() -> None:
    other = Corruptible(np.zeros((5, 32, 32, 3), np.uint8), np.zeros(5, np.int64), CLASSES + 1, 0)
    config = RunConfig.from_flat({"task": "tgfl", "tgfl.natural-dataset": "arrays", "tgfl.natural-dir": "/x"})
    with pytest.raises(ConfigError, match=r"tgfl.natural-dataset = 'arrays': 5 classes, digits has 4"):
        Benchmark(config, DATA, other)


def test_naturally_shifted_images_of_another_size_are_a_config_error() -> None:
    other = Corruptible(np.zeros((5, 40, 32, 3), np.uint8), np.zeros(5, np.int64), CLASSES, 0)
    config = RunConfig.from_flat({"task": "tgfl", "tgfl.natural-dataset": "arrays", "tgfl.natural-dir": "/x"})
    with pytest.raises(ConfigError, match=r"'arrays': images of 40 x 32, digits has 32 x 32; name a set"):
        Benchmark(config, DATA, other).check()


def test_all_digits_are_shared_out() -> None:
    made = open_benchmark(RunConfig.from_flat({"task": "tgfl", "num-clients": 10}))
    parts = [made.training(client)[1] for client in NAMES]
    assert sum(len(rows) for rows in made._shares) == 1797
    assert made.classes == 10
    for labels in parts:  # at Dir(0.1) a client has few of the ten classes
        assert len(np.unique(labels)) < 9


def test_the_training_part_of_cifar10_and_natural_images_from_arrays(cifar: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.full((30, 32, 32, 3), 7, np.uint8))
    np.save(tmp_path / "labels.npy", np.repeat(np.arange(10), 3))
    flat = {
        "task": "tgfl", "dataset": "cifar10", "data-dir": str(cifar), "tgfl.natural-dataset": "arrays",
        "tgfl.natural-dir": str(tmp_path),
    }  # fmt: skip
    made = open_benchmark(RunConfig.from_flat(flat))
    assert sum(len(rows) for rows in made._shares) == 50_000
    natural = {c: made.samples(c, B).versions == "natural" for c in made._names}
    assert sum(int(where.sum()) for where in natural.values()) == 30
    client = max(natural, key=lambda c: natural[c].sum())
    x, _ = made.test(client, B)
    assert (x[torch.from_numpy(natural[client])] == 7 / 255).all()


def test_images_from_folders_are_brought_to_one_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for part, samples, size in (("own", 20, 20), ("elsewhere", 6, 24)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(samples):
                pixels = rng.integers(0, 256, (size, size, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    flat = {
        "task": "tgfl", "num-clients": 2, "corruptions": "contrast", "tgfl.dirichlet": 10.0, "image-size": 40,
        "dataset": "folder", "data-dir": str(tmp_path / "own"),
        "tgfl.natural-dataset": "folder", "tgfl.natural-dir": str(tmp_path / "elsewhere"),
    }  # fmt: skip
    made = open_benchmark(RunConfig.from_flat(flat))
    made.check()
    x, _ = made.test("client-00", B)
    assert x.shape[1:] == (3, 40, 40)


def test_every_version_is_read_by_the_check() -> None:
    class Counting(Corruptible):
        asked: ClassVar[list[str]] = []

        def images(self, corruption: str, severity: int) -> Any:
            self.asked.append(corruption)
            return super().images(corruption, severity)

    data = Counting(DATA._clean, DATA.labels, CLASSES, 0)
    Benchmark(benchmark()._config, data, NATURAL).check()
    assert set(data.asked) == {"none", *CORRUPTIONS}


def test_naturally_shifted_images_need_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"tgfl.natural-dir is empty: tgfl.natural-dataset = 'cifar10.1' needs"):
        open_benchmark(RunConfig.from_flat({"task": "tgfl", "tgfl.natural-dataset": "cifar10.1"}))


def test_classes_of_natural_folders_have_the_same_names(tmp_path: Path) -> None:
    """Sorted, "apple" comes after "Bike"."""
    sets = []
    for part, names in (("own", "Apple Bike"), ("natural", "apple Bike"), ("same", "Apple Bike")):
        for name in names.split():
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(40):
                Image.new("RGB", (32, 32), (i, 0, 0)).save(tmp_path / part / name / f"{i:02d}.png")
        sets.append(open_test_set("folder", str(tmp_path / part), 0))
    config = RunConfig.from_flat({"task": "tgfl", "num-clients": 2, "tgfl.dirichlet": 10.0})
    Benchmark(config, sets[0], sets[2])
    with pytest.raises(ConfigError, match=r"folder 'Bike' where data-dir has 'Apple'; give the folders of the classes"):
        Benchmark(config, sets[0], sets[1])


def test_the_fingerprint_is_of_what_is_dealt_out(tmp_path: Path) -> None:
    def made(where: str, name: str = "0.png", other: str = "cat") -> str:
        for kind in (other, "dog"):
            for i in range(20):
                (tmp_path / where / kind).mkdir(parents=True, exist_ok=True)
                file = tmp_path / where / kind / (name if i == 0 else f"{i}.png")
                Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(file)
        flat = {"task": "tgfl", "num-clients": 2, "dataset": "folder", "data-dir": str(tmp_path / where)}
        return open_benchmark(RunConfig.from_flat(flat)).fingerprint

    assert made("here") == made("there")
    assert made("old", "caf\udce9.png") != made("here")  # a name that is not UTF-8, as old archives have them
    assert len({made("here"), made("renamed", "00.png"), made("others", other="cow")}) == 3
    plain, natural = (benchmark(natural=natural).fingerprint for natural in (False, True))
    assert len({plain, natural, Benchmark(RunConfig(), images(399, 0)).fingerprint}) == 3
