"""A picture of who sees what when: clients x slots by corruption, and the classes of every client."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.build import build_stream, open_data
from fedtta_flwr.data.contracts import ClientStream
from fedtta_flwr.data.streams import Stream
from fedtta_flwr.errors import ConfigError, DataError, install
from fedtta_flwr.files import write_atomically

NAMED = 40  # clients, at most, whose names are written out
WRITTEN = 400  # cells, at most, whose counts are written out


def draw_streams(config: RunConfig, path: Path) -> None:
    """Draw the streams of a run config into a PNG file.

    Parameters
    ----------
    config : RunConfig
        The run's config.
    path : Path
        The file to write or replace.

    Raises
    ------
    ConfigError
        matplotlib is not installed, or the streams cannot be known beforehand.
    DataError
        As `open_data`.
    """
    if config.dataset == "live":
        raise ConfigError("dataset = 'live': what will arrive cannot be drawn; allowed: every other data set")
    if config.task == "tgfl":
        raise ConfigError("task = 'tgfl': two heads have test sets, no streams to draw (docs/two-heads.md)")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"`fedtta data show` needs the extra plots: {install('plots')}") from None
    data = open_data(config)
    streams = {client: build_stream(config, client, data) for client in config.client_names()}
    counts = _class_counts(streams, data.classes)
    names = list(streams)
    height = 2.6 + 0.22 * min(len(names), NAMED)
    figure = Figure(figsize=(15, height), dpi=120, layout="constrained")
    slots, classes = figure.subplots(1, 2, width_ratios=[2.2, 1], sharey=True)
    _draw_slots(slots, config, list(streams.values()))
    _draw_classes(classes, figure, counts)
    slots.set_yticks(range(len(names)), names) if len(names) <= NAMED else slots.set_ylabel("client")
    figure.suptitle(_title(config))
    image = BytesIO()
    figure.savefig(image, format="png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(image.getvalue()))
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); name a file in a folder that can be") from None


def _class_counts(streams: Mapping[str, ClientStream], classes: int) -> NDArray[np.int64] | None:
    """Count every client's samples of each class [N, K]; None where only reading all images would tell."""
    counts = np.zeros((len(streams), classes), dtype=np.int64)
    for i, stream in enumerate(streams.values()):
        if not isinstance(stream, Stream):
            return None
        rows = np.concatenate(stream.rows) if stream.rows else np.empty(0, np.int64)
        counts[i] = np.bincount(stream.source.labels[rows], minlength=classes)
    return counts


def _draw_slots(axes: Any, config: RunConfig, streams: Sequence[ClientStream]) -> None:
    from matplotlib.patches import Patch

    domains = list(dict.fromkeys(domain for stream in streams for domain in stream.domains))
    order = [name for name in config.corruption_names() if name in domains]
    domains = order + [name for name in domains if name not in order]
    colours = dict(zip(domains, _palette(len(domains)), strict=True))
    pixels = np.ones((len(streams), max(map(len, streams)), 3))
    for i, stream in enumerate(streams):
        for slot, domain in enumerate(stream.domains):
            severities = stream.severities if isinstance(stream, Stream) else ()
            strength = 0.25 + 0.75 * severities[slot] / config.severity if severities else 1.0
            pixels[i, slot] = 1 - strength * (1 - np.array(colours[domain]))  # the milder, the paler
    axes.imshow(pixels, aspect="auto", interpolation="nearest")
    axes.set_yticks(np.arange(len(streams) + 1) - 0.5, minor=True)
    if len(streams) <= NAMED:
        axes.grid(which="minor", axis="y", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel(f"slot (a batch of {config.batch_size})")
    axes.set_title("corruption of every slot" + (", paler where milder" if _gradual(config) else ""))
    axes.legend(
        handles=[Patch(color=colours[name], label=name) for name in domains],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.55 / (0.22 * min(len(streams), NAMED) + 0.6)),
        ncols=5,
        frameon=False,
    )


def _palette(number: int) -> list[tuple[float, float, float]]:
    """Return colours of different hues, neighbours of different brightness: paleness is left to mean something."""
    from colorsys import hsv_to_rgb

    return [hsv_to_rgb(i / max(1, number), 0.8, (0.95, 0.6)[i % 2]) for i in range(number)]


def _draw_classes(axes: Any, figure: Any, counts: NDArray[np.int64] | None) -> None:
    axes.set_title("samples of each class, all slots together")
    axes.set_xlabel("class")
    if counts is None:
        axes.text(0.5, 0.5, "an own stream: not known\nbefore it is read", ha="center", transform=axes.transAxes)
        return
    shown = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    if counts.shape[1] <= 20:
        axes.set_xticks(range(counts.shape[1]))
    if counts.size <= WRITTEN:
        for (i, k), number in np.ndenumerate(counts):
            colour = "white" if number > counts.max() / 2 else "black"
            axes.text(k, i, str(number), ha="center", va="center", color=colour, fontsize=7)
    figure.colorbar(shown, ax=axes, fraction=0.04)


def _gradual(config: RunConfig) -> bool:
    return config.severity_schedule == "gradual"


def _title(config: RunConfig) -> str:
    spread = (
        f"group-orders {config.group_orders}"
        if config.group_orders
        else f"spatial heterogeneity {config.spatial_heterogeneity:g}"
    )
    skew = f", class skew {config.class_skew:g}" if config.class_skew else ""
    return (
        f"{config.dataset}: {config.num_clients} clients, {spread}, shift every {config.shift_length} slots, "
        f"{config.sampling}, {config.stream_order}{skew}"
    )
