"""Unlabelled images that arrive in a folder while the run goes on.

What has been predicted stands in ``predictions.csv``; an image is new as long as it does not. So no place in the stream
has to be remembered anywhere else, and a client that was restarted goes on where it stopped.
"""

import os
import time
from collections.abc import Container, Mapping
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.contracts import to_tensor
from fedtta_flwr.data.folders import read_image
from fedtta_flwr.data.growing_csv import GrowingCsv
from fedtta_flwr.errors import ConfigError, DataError, few
from fedtta_flwr.paths import expanded
from fedtta_flwr.resolve import names_in

if TYPE_CHECKING:
    from torch import Tensor

PREDICTIONS, SKIPPED = "predictions.csv", "skipped.csv"
PREDICTIONS_HEADER = ("file", "class", "probability", "model_version")
SKIPPED_HEADER = ("file", "reason", "bytes", "modified_ns")
POLL = 0.1  # seconds between two looks at the folder while waiting for a full batch
MANY = 10  # batches of new images that wait: more come than are predicted
FRESH = 2_000_000_000  # nanoseconds: a file that changed so lately and is no image is probably still being written


class LiveStream:
    """The images of one folder in the order of their arrival: modification time, then name.

    Every file needs a name of its own: one that is overwritten after its prediction is not seen again. Sub-folders and
    names that begin with a dot are passed over. A file that is not an image, or not complete yet, is named in the log
    and in ``skipped.csv`` once it is two seconds old; when it changes it is looked at again. One that cannot be read is
    named in the log once, and tried again at every look.

    What cannot be written to these tables is kept in memory. A visit may be a process of its own: images whose rows it
    could not write until its end are new again at the next one.

    Parameters
    ----------
    folder : Path
        The folder to watch.
    output : Path
        Where ``predictions.csv`` and ``skipped.csv`` are kept.
    batch_size : int
        Images of a slot at most.
    image_size : int
        Pixels a side to which images are resized.
    slots : int
        How often the client will be asked; nobody knows how many images will come.
    wait : float
        Seconds to wait for a full batch.

    Raises
    ------
    DataError
        A folder is absent or cannot be read, or a table in it is damaged or of something else.
    """

    def __init__(
        self, folder: Path, output: Path, *, batch_size: int, image_size: int, slots: int, wait: float
    ) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; make the folder in which this client's images will arrive")
        self.domains: tuple[str, ...] = ("live",) * slots
        self._folder = folder
        self._batch_size, self._image_size, self._wait = batch_size, image_size, wait
        self._predicted = GrowingCsv(output / PREDICTIONS, PREDICTIONS_HEADER, key=("file",))
        self._skipped = GrowingCsv(output / SKIPPED, SKIPPED_HEADER, key=("file", "bytes", "modified_ns"))
        self._handed_out: dict[int, list[str]] = {}  # the latest slot's, until they are predicted
        self._told: set[str] = set()  # names of those that cannot be read
        self._most_waiting = MANY * batch_size  # beyond which the log says so

    def __len__(self) -> int:
        """Return the number of slots, some of which may turn out to be empty."""
        return len(self.domains)

    def batch(self, slot: int) -> tuple["Tensor", None]:
        """Return the oldest new images [B, 3, S, S] in [0, 1], 0 <= B <= batch size, and no labels.

        Images whose prediction has not come by then are new again: a visit has failed half-way.
        """
        self._predicted.append(())  # there may be room again, also where no image comes
        deadline = time.monotonic() + self._wait
        images: dict[str, NDArray[np.uint8]] = {}
        while True:
            self._collect(images)
            remaining = deadline - time.monotonic()
            if len(images) >= self._batch_size or remaining <= 0:
                break
            time.sleep(min(POLL, remaining))
        self._handed_out = {slot: list(images)}
        size = self._image_size
        pixels = np.stack(list(images.values())) if images else np.empty((0, size, size, 3), np.uint8)
        return to_tensor(pixels), None

    def predicted(self, slot: int, probabilities: "Tensor", version: int) -> None:
        """Append a slot's predictions to ``predictions.csv``.

        Parameters
        ----------
        slot : int
            The one that `batch` gave last.
        probabilities : Tensor
            [B, K], rows sum to 1.
        version : int
            Of the model: the round that it adapted in.
        """
        names = self._handed_out.pop(slot, [])
        best = probabilities.max(dim=1)
        rows = zip(names, best.indices.tolist(), best.values.tolist(), strict=True)
        self._predicted.append([(name, str(k), f"{p:.6f}", str(version)) for name, k, p in rows])

    def _collect(self, images: dict[str, NDArray[np.uint8]]) -> None:
        """Add new images until the batch is full; note what is no image, and say what cannot be read."""
        skipped = self._skipped.keys()
        arrivals, unreadable = self._arrivals(images)
        rows: list[tuple[str, str, str, str]] = []
        new = [
            (name, bytes_, modified)
            for name, bytes_, modified in arrivals
            if (name, str(bytes_), str(modified)) not in skipped
        ]
        waiting = len(new)
        for name, bytes_, modified in new:
            if len(images) >= self._batch_size:
                break
            waiting -= 1
            try:
                images[name] = read_image(self._folder / name, self._image_size)
            except FileNotFoundError:
                continue  # removed or renamed since the listing
            except OSError as error:  # it says nothing about the content: no row, so the next look tries again
                unreadable[name] = str(error.strerror)
            except ValueError as error:
                if not 0 <= time.time_ns() - modified < FRESH:  # a time to come is that of another clock
                    rows.append((name, str(error), str(bytes_), str(modified)))
        self._skipped.append(rows)
        self._warn("skipped", {row[0]: row[1] for row in rows})
        self._warn("cannot be read now", {name: unreadable[name] for name in unreadable if name not in self._told})
        self._told |= unreadable.keys()
        if waiting > self._most_waiting:
            self._most_waiting = 2 * waiting
            self._warn_behind(waiting)

    def _warn_behind(self, waiting: int) -> None:
        from flwr.common.logger import log

        fault = f"{waiting} new images wait, {waiting // self._batch_size} batches: more come than are predicted"
        remedy = "make batch-size or aggregate-every larger, or rounds shorter"
        log(WARNING, "%s: %s; batch-size = %d: %s", self._folder, fault, self._batch_size, remedy)

    def _warn(self, what: str, reasons: Mapping[str, str]) -> None:
        from flwr.common.logger import log

        from fedtta_flwr.records import printable

        if reasons:  # who lets images arrive also names them, in one line of this log and no more
            named = few([printable(f"{name} ({reason})") for name, reason in reasons.items()])
            log(WARNING, "%s: %s: %s", self._folder, what, named)

    def _arrivals(self, images: Container[str]) -> tuple[list[tuple[str, int, int]], dict[str, str]]:
        """Return (name, bytes, modification time) of other files in the order of arrival, and why some cannot be read.

        Those that are predicted are passed over by their names: a look at each would cost more, ten times a second.
        """
        found, unreadable, predicted = [], {}, self._predicted.keys()
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name in (PREDICTIONS, SKIPPED):
                        continue
                    if entry.name in images or (entry.name,) in predicted:
                        continue
                    try:
                        if entry.is_file():
                            about = entry.stat()
                            found.append((about.st_mtime_ns, entry.name, about.st_size))
                    except FileNotFoundError:
                        continue  # removed between the listing and the look at it
                    except OSError as error:  # a link in a circle, say: the others are to go on
                        unreadable[entry.name] = str(error.strerror)
        except OSError as error:
            raise DataError(f"{self._folder}: cannot be read ({error.strerror}); check the watched folder") from None
        return [(name, size, modified) for modified, name, size in sorted(found)], unreadable


def hosted(config: RunConfig, node_config: Mapping[str, object]) -> int:
    """Return how many clients a node hosts; all of the run's, if it does not say."""
    return len(names_in(str(node_config.get("clients", ""))) or config.client_names())


def live_folders(config: RunConfig, client: str, node_config: Mapping[str, object]) -> tuple[Path, Path]:
    """Return the folder that a client watches and the one for its predictions.

    Node-config ``live-dir``, else the run's ``data-dir``, is the folder; where several clients are hosted, each has
    the sub-folder of its own name. Node-config ``predictions-dir`` (with the same sub-folders) is the other; without
    it predictions are kept beside the images.

    Raises
    ------
    ConfigError
        Neither is set.
    DataError
        Several clients would watch one folder.
    """
    root = str(node_config.get("live-dir") or config.data_dir)
    if not root:
        raise ConfigError("dataset = 'live': no folder to watch; set node-config live-dir = \"DIR\" or data-dir")
    folder = expanded("live-dir" if node_config.get("live-dir") else "data-dir", root)
    several = hosted(config, node_config) > 1
    if several and folder.is_dir() and not (folder / client).is_dir():
        raise DataError(f"{folder}: no sub-folder {client}; where several clients are hosted each needs its own")
    watched = folder / client if (folder / client).is_dir() else folder
    output = node_config.get("predictions-dir")
    if not output:
        return watched, watched
    place = expanded("predictions-dir", str(output))
    return watched, place / client if several else place
