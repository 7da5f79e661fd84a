"""BTGFL, the benchmark of test-time generalised federated learning: what each client trains on, and five test sets.

==========================  =========================================================================================
test set                    samples of client i
==========================  =========================================================================================
``A-original-internal``     its own test part, a fifth of its samples
``B-shifted-internal``      A again, each image under a corruption drawn for it; and its share of naturally shifted
                            images, dealt out class by class in proportion to the clients' samples of the class
``C-original-external``     of all other clients' validation and test parts, one in N - 1
``D-shifted-external``      C again, made as B is, with one in N - 1 of the other clients' naturally shifted images
``E-mixed``                 as many of each of A to D as the smallest has, in one stream
==========================  =========================================================================================

References
----------
BTFL (KDD 2025), section 5.1; the split is FedTHE's (ICLR 2023, arXiv 2205.10920), section 5. Where the text has half
of B naturally shifted, here, as in the published code, it is as many as there are; that code's E is smaller.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.data.balanced import Indices, balanced_dirichlet
from fedtta_flwr.data.contracts import TestSet, to_tensor
from fedtta_flwr.data.datasets import CLEAN, check_files
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.seeding import numpy_rng

if TYPE_CHECKING:
    from torch import Tensor

    from fedtta_flwr.config import RunConfig

INTERNAL, SHIFTED_INTERNAL, EXTERNAL, SHIFTED_EXTERNAL, MIXED = SETS = (
    "A-original-internal",
    "B-shifted-internal",
    "C-original-external",
    "D-shifted-external",
    "E-mixed",
)
NATURAL = "natural"
TRAIN = 0.6  # of a client's samples; the others are validation and test, half each


@dataclass(frozen=True)
class Samples:
    """Samples by position, each in a version of its own.

    Attributes
    ----------
    rows : ndarray of int64
        [N], positions in the data set; of a naturally shifted image, in the set of those.
    versions : ndarray of str
        [N]: ``none``, a corruption, or ``natural``.
    """

    rows: Indices
    versions: NDArray[np.str_]

    def __len__(self) -> int:
        """Return N."""
        return len(self.rows)

    def take(self, positions: Indices) -> "Samples":
        """Return some of the samples, in this order."""
        return Samples(self.rows[positions], self.versions[positions])


class Benchmark:
    """The parts of all clients, a pure function of the run config and the labels.

    Parameters
    ----------
    config : RunConfig
        Of it count the clients, seed, severity, corruptions and the table ``tgfl``.
    data : TestSet
        All labelled images that there are; the clients share them.
    natural : TestSet, optional
        Images of the same classes from elsewhere (CIFAR-10.1).

    Raises
    ------
    ConfigError
        There are too few samples for so many clients, or the naturally shifted images have other classes.
    """

    def __init__(self, config: "RunConfig", data: TestSet, natural: TestSet | None = None) -> None:
        self.classes = data.classes
        self._config, self._data, self._natural = config, data, natural
        self._names = config.client_names()
        clients = len(self._names)
        if natural is not None and natural.classes != data.classes:
            raise ConfigError(
                f"tgfl.natural-dataset = {config.tgfl.natural_dataset!r}: {natural.classes} classes, {config.dataset} "
                f"has {data.classes}; name a set of the same ones"
            )
        theirs, own = (getattr(one, "class_names", ()) for one in (natural, data))
        if unlike := [pair for pair in zip(theirs, own, strict=False) if pair[0] != pair[1]]:
            raise ConfigError(
                f"tgfl.natural-dir = {config.tgfl.natural_dir!r}: folder {unlike[0][0]!r} where data-dir has "
                f"{unlike[0][1]!r}; give the folders of the classes the same names in both"
            )
        try:
            shares = balanced_dirichlet(
                data.labels, alpha=config.tgfl.dirichlet, clients=clients, classes=data.classes, seed=config.seed
            )
        except ValueError as error:
            raise ConfigError(
                f"num-clients = {clients}: {error}; allowed: fewer clients, or a larger tgfl.dirichlet than "
                f"{config.tgfl.dirichlet:g}"
            ) from None
        if min(map(len, shares)) < 5:
            raise ConfigError(
                f"num-clients = {clients}: {len(data.labels)} samples are too few for a training, a validation and a "
                f"test part of each; allowed: fewer clients"
            )
        self._shares = shares
        # A deal is in random order already.
        self._cuts = [(int(TRAIN * len(own)), (int(TRAIN * len(own)) + len(own)) // 2) for own in shares]
        self._natural_shares = self._deal_natural()
        self._sets: dict[tuple[str, str], Samples] = {}

    @property
    def fingerprint(self) -> str:
        """Return a short hash of what is dealt out: labels, and names of classes and files where there are any.

        Where nodes hold different images, one's training part would be another's test set.
        """
        digest = hashlib.sha256()
        for data in (self._data, self._natural):
            names = getattr(data.images(CLEAN, self._config.severity), "names", ()) if data is not None else ()
            digest.update("\0".join([*getattr(data, "class_names", ()), *names, ""]).encode(errors="surrogateescape"))
            digest.update(b"" if data is None else data.labels.tobytes())
        return digest.hexdigest()[:16]

    def training(self, client: str) -> tuple["Tensor", NDArray[np.int64]]:
        """Return a client's training part: images [N, 3, H, W] in [0, 1] and labels [N]."""
        return self.load(_versions(self._training_rows(client)))

    def validation(self, client: str) -> tuple["Tensor", NDArray[np.int64]]:
        """Return a client's validation part, as `training`: on it a method may be tuned."""
        i = self._names.index(client)
        return self.load(_versions(self._shares[i][slice(*self._cuts[i])]))

    def training_size(self, client: str) -> int:
        """Return how many N are."""
        return len(self._training_rows(client))

    def test(self, client: str, name: str) -> tuple["Tensor", NDArray[np.int64]]:
        """Return one of a client's five test sets: images [N, 3, H, W] in [0, 1] and labels [N]."""
        return self.load(self.samples(client, name))

    def samples(self, client: str, name: str) -> Samples:
        """Return what one of a client's test sets consists of, in its order."""
        if (client, name) not in self._sets:
            made = self._make(self._names.index(client), name)
            order = numpy_rng(self._config.seed, client, "order", name).permutation(len(made))
            self._sets[client, name] = made.take(order)
        return self._sets[client, name]

    def load(self, samples: Samples) -> tuple["Tensor", NDArray[np.int64]]:
        """Return images [N, 3, H, W] in [0, 1] and labels [N] of some samples."""
        labels = np.empty(len(samples), dtype=np.int64)
        pixels: NDArray[np.uint8] | None = None
        for version in np.unique(samples.versions):
            where = samples.versions == version
            source, name = (self._natural, CLEAN) if version == NATURAL else (self._data, str(version))
            if source is None:
                raise ValueError("naturally shifted samples without a set of them")
            part = source.images(name, self._config.severity)[samples.rows[where]]
            pixels = np.empty((len(samples), *part.shape[1:]), np.uint8) if pixels is None else pixels
            pixels[where], labels[where] = part, source.labels[samples.rows[where]]
        if pixels is None:
            pixels = self._data.images(CLEAN, self._config.severity)[samples.rows]
        return to_tensor(pixels), labels

    def check(self) -> None:
        """Read one image of everything that is read later.

        Raises
        ------
        ConfigError, DataError
            Whatever the data set says when it is read; or naturally shifted images have another size.
        """
        for data in (self._data, self._natural):
            check_files(data)
        if self._natural is not None:
            one, sets = np.zeros(1, np.int64), (self._natural, self._data)
            sizes = [images.images(CLEAN, self._config.severity)[one].shape[1:3] for images in sets]
            if sizes[0] != sizes[1]:
                found, allowed = ("{} x {}".format(*size) for size in sizes)
                raise ConfigError(
                    f"tgfl.natural-dataset = {self._config.tgfl.natural_dataset!r}: images of {found}, "
                    f"{self._config.dataset} has {allowed}; name a set of the same size"
                )
        versions = np.array([CLEAN, *self._config.corruption_names(), *([NATURAL] if self._natural else [])])
        self.load(Samples(np.zeros(len(versions), np.int64), versions))

    def _training_rows(self, client: str) -> Indices:
        i = self._names.index(client)
        return self._shares[i][: self._cuts[i][0]]

    def _make(self, i: int, name: str) -> Samples:
        client = self._names[i]
        if name == MIXED:
            rng = numpy_rng(self._config.seed, client, name)
            parts = [self.samples(client, part) for part in SETS if part != MIXED]
            least = min(map(len, parts))
            return _join(*(part.take(rng.permutation(len(part))[:least]) for part in parts))
        if name == INTERNAL:
            return _versions(self._shares[i][self._cuts[i][1] :])
        if name == SHIFTED_INTERNAL:
            return self._shifted(client, name, INTERNAL, self._natural_shares[i])
        others = [j for j in range(len(self._names)) if j != i]
        if name == EXTERNAL:
            return _versions(self._one_in(client, name, [self._shares[j][self._cuts[j][0] :] for j in others]))
        return self._shifted(
            client, name, EXTERNAL, self._one_in(client, NATURAL, [self._natural_shares[j] for j in others])
        )

    def _one_in(self, client: str, purpose: str, parts: list[Indices]) -> Indices:
        """Return as many of the other clients' samples as one of them has on average, drawn from all."""
        pool = np.concatenate(parts)
        chosen = numpy_rng(self._config.seed, client, purpose).permutation(len(pool))[: len(pool) // len(parts)]
        return pool[chosen]

    def _shifted(self, client: str, name: str, original: str, natural: Indices) -> Samples:
        rows = self.samples(client, original).rows
        drawn = numpy_rng(self._config.seed, client, "corruption", name).choice(
            np.array(self._config.corruption_names()), size=len(rows)
        )
        return _join(Samples(rows, drawn), _versions(natural, NATURAL))

    def _deal_natural(self) -> list[Indices]:
        """Deal every naturally shifted image to one client, class by class by the clients' samples of the class.

        Those of a class that nobody has a sample of are dealt evenly.
        """
        hands: list[list[Indices]] = [[] for _ in self._shares]
        if self._natural is not None:
            rng = numpy_rng(self._config.seed, "natural shift")
            histograms = np.stack([np.bincount(self._data.labels[s], minlength=self.classes) for s in self._shares])
            for k in range(self.classes):
                own = rng.permutation(np.flatnonzero(self._natural.labels == k))
                shares = histograms[:, k] if histograms[:, k].any() else np.ones(len(hands), np.int64)
                ends = np.cumsum(shares)[:-1] * len(own) // shares.sum()  # whole numbers: nothing is rounded away
                for hand, dealt in zip(hands, np.split(own, ends), strict=True):
                    hand.append(dealt)
        return [np.concatenate([np.empty(0, np.int64), *hand]) for hand in hands]


def _versions(rows: Indices, version: str = CLEAN) -> Samples:
    return Samples(rows, np.full(len(rows), version))


def _join(*parts: Samples) -> Samples:
    return Samples(np.concatenate([part.rows for part in parts]), np.concatenate([part.versions for part in parts]))
