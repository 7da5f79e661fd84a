"""The observer that tells trackers what the run directory has written down."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol

from flwr.common.logger import log

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError, in_words, install
from fedtta_flwr.registry import TRACKERS
from fedtta_flwr.reports.run_directory import RunDirectory
from fedtta_flwr.resolve import resolve
from fedtta_flwr.strategies.rounds import Counts, Round

#: what is told of the end, beside the accuracies: parts of summary.json
PARTS = ("bytes", "seconds", "collaboration", "memory", "rolled_back")
ACCURACIES = ("micro", "macro", "macro_all_classes", "mean_clients", "per_corruption")
Sums = dict[str, tuple[int, int]]  # score -> samples seen, predicted correctly


class Tracker(Protocol):
    """A service that keeps numbers; whatever it raises ends the tracking by it, never the run.

    Its constructor takes the run directory's path. What it needs is imported in `begin`.
    """

    def begin(self, config: RunConfig) -> None:
        """Start a run with its hyper-parameters; with ``config.resume``, go on with the one of the run directory."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep a round's numbers; a resumed run may tell rounds again."""

    def finish(self, step: int, numbers: Mapping[str, float], *, finished: bool) -> None:
        """Keep the summary's numbers, and whether the run ended well or was broken off."""


class Tracking:
    """Tells trackers of every round as soon as it is complete, and of the end.

    A round's `post` score comes with the replies of the next one, and only then is the round told, as in rounds.jsonl.

    Parameters
    ----------
    directory : RunDirectory
        Told of everything before this observer.
    trackers : mapping of str to Tracker
        By name; one that raises is named in the log and told nothing more.
    """

    def __init__(self, directory: RunDirectory, trackers: Mapping[str, Tracker]) -> None:
        self._directory = directory
        self._trackers = dict(trackers)
        self._sums: Sums | None = None
        self._began = False
        self._told = 0

    def on_start(self, config: RunConfig, clients: tuple[str, ...], rounds: int) -> None:
        """Let the trackers begin."""
        self._began = True
        self._tell(lambda tracker: tracker.begin(config))

    def on_round(self, round_: Round) -> None:
        """Tell what the previous round brought, of which all is known now."""
        if not self._trackers:
            return
        if self._sums is None:  # of a resumed run, the board knows the counts of earlier rounds, too
            tallies = self._directory.board.tallies().items()
            self._sums = _sums((key[0], seen.sum(), correct.sum()) for key, (seen, correct) in tallies)
        else:
            self._sums = _sums(_totals(round_.counts), self._sums)
        if (line := self._directory.line) is None:
            return
        self._told = line["round"]
        later = _sums(_totals(counts for counts in round_.counts if counts.round > self._told))
        numbers = {
            "loss": line.get("loss"),
            "accuracy": line["accuracy"],
            "accuracy-so-far": _accuracies(self._sums, later),
            "bytes": line["bytes"],
            "seconds": line["seconds"],
            "collaboration": line["collaboration"],
            "own": line.get("own", {}),
            "predictions": {
                "confidence": line["predictions"]["confidence"],
                "largest_share": line["predictions"]["largest_share"],
                "collapsed": len(line["predictions"]["collapsed"]),
            },
            "clients": {"mixed": line["clients"], "screened": len(line["screened"])},
            "samples": line["samples"],
        }
        flat = dict(_numbers(numbers))
        self._tell(lambda tracker: tracker.log(self._told, flat))

    def on_end(self) -> None:
        """Tell the summary."""
        self.close(finished=True)

    def close(self, *, finished: bool) -> None:
        """Tell how the run ended; after the run directory has been closed.

        The last round of a run that was broken off is not told: its `post` score never came, or comes when it resumes.
        """
        if not self._began or not self._trackers:
            return
        numbers = dict(_numbers(_outcome(self._directory.summary(finished=finished)), "summary"))
        self._tell(lambda tracker: tracker.finish(self._told, numbers, finished=finished))
        self._trackers.clear()

    def _tell(self, say: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                say(tracker)
            except Exception as error:  # a full disk, a server that is gone: whatever it is, the run goes on
                del self._trackers[name]
                log(WARNING, "tracking by %s ends here, the run goes on: %s", name, in_words(error))


def check_trackers(config: RunConfig) -> None:
    """Find out whether what the run's trackers need is installed.

    Raises
    ------
    ConfigError
        If not; it names the extra to install.
    """
    for name in config.tracker_names():
        found = importlib.util.find_spec(TRACKERS[name].package)
        # A folder of that name, such as one that W&B writes to, would do as a namespace package.
        if found is None or found.origin is None:
            raise ConfigError(f"tracking = {config.tracking!r}: {name} is not installed here; {install(name)}")


def make_trackers(config: RunConfig, folder: Path) -> dict[str, Tracker]:
    """Return the run's trackers by name, for a run directory."""
    return {name: resolve("tracking", name, TRACKERS)(folder) for name in config.tracker_names()}


def _totals(counts: Iterable[Counts]) -> Iterator[tuple[str, int, int]]:
    return ((c.score, c.seen.sum(), c.correct.sum()) for c in counts)


def _sums(entries: Iterable[tuple[str, int, int]], before: Sums | None = None) -> Sums:
    """Add entries up by score."""
    sums = dict(before or {})
    for score, seen, correct in entries:
        known = sums.get(score, (0, 0))
        sums[score] = known[0] + int(seen), known[1] + int(correct)
    return sums


def _accuracies(sums: Sums, later: Sums) -> dict[str, float]:
    """Return micro accuracy in percent by score, without what was seen later."""
    accuracies = {}
    for score, (seen, correct) in sums.items():
        seen_later, correct_later = later.get(score, (0, 0))
        if seen > seen_later:
            accuracies[score] = 100 * (correct - correct_later) / (seen - seen_later)
    return accuracies


def _outcome(summary: Mapping[str, Any]) -> dict[str, Any]:
    accuracy = {score: {key: found[key] for key in ACCURACIES} for score, found in summary["accuracy"].items()}
    return {"accuracy": accuracy} | {part: summary[part] for part in PARTS if part in summary}


def _numbers(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Give the numbers in nested mappings as ``accuracy/post``; what is not known is left out."""
    for key, value in nested.items():
        name = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from _numbers(value, name)
        elif isinstance(value, int | float):
            yield name, float(value)
