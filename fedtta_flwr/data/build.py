"""From a run config to data and streams: cut from a data set, arriving live, or from a function of the user's own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.btgfl import Benchmark
from fedtta_flwr.data.cifar import read_torchvision
from fedtta_flwr.data.contracts import ClientStream, TestSet
from fedtta_flwr.data.datasets import RESIZED, Corruptible, check_files, open_test_set
from fedtta_flwr.data.digits import all_parts
from fedtta_flwr.data.live import LiveStream, hosted, live_folders
from fedtta_flwr.data.streams import make_stream
from fedtta_flwr.errors import ConfigError, in_words
from fedtta_flwr.paths import expanded
from fedtta_flwr.resolve import call, resolve

if TYPE_CHECKING:
    from torch import Tensor

LIVE = "live"


@dataclass
class NoTestSet:
    """In place of a data set where streams come from elsewhere: only the number of classes is known.

    Attributes
    ----------
    classes : int
        Number of classes K.
    """

    classes: int
    labels: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def images(self, corruption: str, severity: int) -> NDArray[np.uint8]:
        """Return no images."""
        return np.empty((0, 32, 32, 3), np.uint8)


def open_data(config: RunConfig) -> TestSet:
    """Open what a run's streams are cut from.

    Raises
    ------
    ConfigError, DataError
        As `open_test_set`; or ``classes`` is missing.
    """
    if config.dataset == LIVE:
        return NoTestSet(config.classes)
    if config.stream:
        if config.classes < 2:
            raise ConfigError(
                f"stream = {config.stream!r}: nothing else says how many classes; set classes to 2 or more"
            )
        return NoTestSet(config.classes)
    return open_test_set(
        config.dataset, config.data_dir, config.seed, image_size=config.image_size, classes=config.classes
    )


def build_stream(
    config: RunConfig, client: str, data: TestSet, node_config: Mapping[str, object] | None = None
) -> ClientStream:
    """Return one client's stream.

    Parameters
    ----------
    config : RunConfig
        The run's config.
    client : str
        Name of the client.
    data : TestSet
        What `open_data` returned.
    node_config : mapping, optional
        The node's own settings: ``live-dir`` and ``predictions-dir`` (`live_folders`).

    Raises
    ------
    ConfigError, DataError
        As `make_stream`, `live_folders`; or the own function cannot be imported, is not allowed, or fails.
    """
    if config.dataset == LIVE:
        node_config = node_config or {}
        watched, output = live_folders(config, client, node_config)
        return LiveStream(
            watched,
            output,
            batch_size=config.batch_size,
            image_size=config.image_size,
            slots=config.rounds * config.aggregate_every,
            wait=config.live_wait / hosted(config, node_config),  # one after the other they must not be late
        )
    if config.stream:
        return _own_stream(config, client)
    return make_stream(config, client, data)


def check_data(config: RunConfig) -> TestSet:
    """Open the data, cut one stream, and read one image of everything that the run will read.

    Whatever is absent or damaged is found before anybody is asked. What lies only on the clients' machines (a live
    folder) is left to them.

    Raises
    ------
    ConfigError, DataError
        As `open_data` and `build_stream`, and whatever a data set says when it is read.
    """
    data = open_data(config)
    if config.dataset == LIVE:
        return data
    build_stream(config, config.client_names()[0], data)
    check_files(data)
    if not config.stream:
        severities = range(1, config.severity + 1) if config.severity_schedule == "gradual" else [config.severity]
        for corruption in config.corruption_names():
            for severity in severities:
                data.images(corruption, severity)[np.array([0])]
    return data


def image_form(config: RunConfig, data: TestSet) -> tuple[int, int] | None:
    """Return height and width of a run's images; None where a function of the user's own makes them."""
    if config.stream:
        return None
    if config.dataset == LIVE:
        return config.image_size, config.image_size
    # Not the clean ones, which not every set has.
    _, height, width, _ = data.images(config.corruption_names()[0], config.severity)[np.array([0])].shape
    return height, width


def open_benchmark(config: RunConfig) -> Benchmark:
    """Open all labelled images of a data set, and naturally shifted ones if any are named, and share them out.

    All of the digits, the training part of CIFAR-10 and CIFAR-100, and whatever else a data set consists of.

    Raises
    ------
    ConfigError, DataError
        As `open_test_set` and `Benchmark`.
    """
    if config.dataset == "digits" and not config.data_dir:
        data: TestSet = Corruptible(*all_parts(), 10, config.seed)
    elif config.dataset in ("cifar10", "cifar100") and config.data_dir:
        classes = int(config.dataset.removeprefix("cifar"))
        images, labels, _ = read_torchvision(classes, expanded("data-dir", config.data_dir), train=True)
        data = Corruptible(images, labels, classes, config.seed)
    else:
        data = open_test_set(
            config.dataset, config.data_dir, config.seed, image_size=config.image_size, classes=config.classes
        )
    natural = None
    if name := config.tgfl.natural_dataset:
        if not config.tgfl.natural_dir:
            raise ConfigError(
                f"tgfl.natural-dir is empty: tgfl.natural-dataset = {name!r} needs the folder that holds it; set it, "
                f"or tgfl.natural-dataset to ''"
            )
        size = config.image_size if name in RESIZED else 32
        natural = open_test_set(
            name, config.tgfl.natural_dir, config.seed, image_size=size, classes=data.classes if name == "arrays" else 0
        )
    return Benchmark(config, data, natural)


def _own_stream(config: RunConfig, client: str) -> ClientStream:
    stream: ClientStream = call("stream", config.stream, resolve("stream", config.stream, {}), config, client)
    try:
        if lacks := [part for part in ("__len__", "domains", "batch") if not hasattr(stream, part)]:
            raise ConfigError(
                f"stream = {config.stream!r}: returned {type(stream).__name__}, without {lacks[0]}; expected an object "
                f"with __len__, domains and batch (fedtta_flwr.data.contracts.ClientStream)"
            )
        length, domains = len(stream), len(stream.domains)
    except ConfigError:
        raise
    except Exception as error:  # it is the user's code: whatever it raises is theirs to read, in one line
        raise ConfigError(f"stream = {config.stream!r}: {in_words(error)}") from error
    if length != domains:
        raise ConfigError(f"stream = {config.stream!r}: {length} slots but {domains} domains; expected as many")
    if not all(isinstance(name, str) for name in stream.domains):
        raise ConfigError(f"stream = {config.stream!r}: its domains are no names; allowed: strings")
    return stream


def own_batch(key: str, stream: ClientStream, slot: int, classes: int) -> tuple["Tensor", NDArray[np.int64] | None]:
    """Return a slot of a stream of the user's own.

    Parameters
    ----------
    key : str
        ``package.module:function``.
    stream : ClientStream
        What the function has made.
    slot : int
        Which.
    classes : int
        K.

    Returns
    -------
    tuple
        As `ClientStream.batch`.

    Raises
    ------
    ConfigError
        If it raises, or returns something else.
    """
    import torch

    from fedtta_flwr.models.checkpoints import dtype_and_shape

    returned = call("stream", key, stream.batch, slot)
    fault = f"stream = {key!r}: slot {slot}:"
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise ConfigError(f"{fault} returned {type(returned).__name__}, expected images and labels (or None)")
    x, y = returned
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32 or x.dim() != 4 or x.shape[1] != 3:
        found = dtype_and_shape(x) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ConfigError(f"{fault} images are {found}, expected a tensor, float32 [B, 3, H, W]")
    if y is None:
        return x, None
    if not (isinstance(y, np.ndarray) and y.dtype.kind in "iu" and y.shape == (len(x),)):
        found = f"{y.dtype} {list(y.shape)}" if isinstance(y, np.ndarray) else type(y).__name__
        raise ConfigError(f"{fault} labels are {found}, expected a numpy array of integers [{len(x)}], or None")
    if y.size and not (y.min() >= 0 and y.max() < classes):
        raise ConfigError(f"{fault} labels from {y.min()} to {y.max()}, expected 0 to {classes - 1}")
    return x, y.astype(np.int64)
