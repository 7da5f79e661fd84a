"""Accuracies from counts per class."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.strategies.rounds import Counts

Tally = NDArray[np.int64]  # [2, K]: seen, correct


class Scoreboard:
    """Adds up the counts of a run and turns them into accuracies in percent.

    A score without a single labelled sample is absent, never 0.

    Parameters
    ----------
    order : sequence of str
        The corruptions in the order in which they are reported; others follow.
    """

    def __init__(self, order: Sequence[str] = ()) -> None:
        self._order = list(order)
        self._tallies: dict[tuple[str, str, str], Tally] = {}

    def add(self, counts: Iterable[Counts]) -> None:
        """Add the counts of a round."""
        for entry in counts:
            key = (entry.score, entry.client, entry.domain)
            tally = np.stack([entry.seen, entry.correct])
            self._tallies[key] = self._tallies[key] + tally if key in self._tallies else tally

    def tallies(self) -> dict[tuple[str, str, str], Tally]:
        """Return what has been added up, [2, K] by (score, client, corruption)."""
        return dict(self._tallies)

    def load(self, tallies: dict[tuple[str, str, str], Tally]) -> None:
        """Go on from what `tallies` returned."""
        self._tallies = dict(tallies)

    def scores(self) -> set[str]:
        """Return the scores that there are."""
        return {score for score, _, _ in self._tallies}

    def domains(self) -> list[str]:
        """Return the corruptions that were met, in their order."""
        met = {domain for _, _, domain in self._tallies}
        return [name for name in self._order if name in met] + sorted(met - set(self._order))

    def accuracy(self, score: str) -> dict[str, Any] | None:
        """Return the accuracies of one score, in percent, or None if nothing was scored.

        Returns
        -------
        dict
            ``micro``: correct / seen over all samples. ``macro``: mean over the classes that occurred of each
            class's accuracy. ``macro_all_classes``: the same sum divided by all K classes. ``mean_clients``: mean
            of ``per_corruption_mean_clients``, whose values are means over the clients that met the corruption of each
            one's micro. ``per_corruption`` and ``per_client``: micro; the same with ``_macro_all_classes``: the third.
            ``per_class``: samples ``seen`` and ``correct``, [K] each. ``major_minor``: see `_major_minor`.
        """
        own = {key[1:]: tally for key, tally in self._tallies.items() if key[0] == score}
        if not own:
            return None
        seen, correct = sum(own.values(), np.zeros_like(next(iter(own.values()))))
        of_domain = _grouped(own, lambda key: key[1])
        of_client = _grouped(own, lambda key: key[0])
        met = {name: of_domain[name] for name in self.domains() if name in of_domain}
        of_clients: dict[str, list[float]] = {name: [] for name in met}
        for (_, name), tally in own.items():
            of_clients[name].append(_micro(tally))
        means = {name: fmean(values) for name, values in of_clients.items()}  # exact: clients come in any order
        return {
            "micro": _micro((seen, correct)),
            "macro": _macro((seen, correct), int((seen > 0).sum())),
            "macro_all_classes": _macro((seen, correct), len(seen)),
            "mean_clients": fmean(means.values()),
            "per_corruption": {name: _micro(tally) for name, tally in met.items()},
            "per_corruption_mean_clients": means,
            "per_corruption_macro_all_classes": {name: _macro(tally, len(seen)) for name, tally in met.items()},
            "per_client": {name: _micro(tally) for name, tally in of_client.items()},
            "per_client_macro_all_classes": {name: _macro(tally, len(seen)) for name, tally in of_client.items()},
            "per_class": {"seen": seen.tolist(), "correct": correct.tolist()},
            "major_minor": _major_minor(own, of_client, met),
        }


def _major_minor(
    own: dict[tuple[str, str], Tally], of_client: dict[str, Tally], corruptions: Iterable[str]
) -> dict[str, Any]:
    """Return the accuracies on each client's major and minor class, in percent (pFedBBN, Figures 4 and 10).

    Of which it has the most and the fewest samples in its whole stream, of those that occur; of equally frequent ones
    the first. A client whose classes are all equally frequent has neither, and is left out.

    Returns
    -------
    dict
        [major, minor] each: ``classes`` and ``per_client``, by client; ``per_corruption``, means over the clients that
        met the class under the corruption, None if none did.
    """
    classes: dict[str, list[int]] = {}
    for client, (seen, _) in of_client.items():
        present = np.flatnonzero(seen)
        pair = [int(present[seen[present].argmax()]), int(present[seen[present].argmin()])]
        if pair[0] != pair[1]:
            classes[client] = pair

    def mean(corruption: str, part: int) -> float | None:
        tallies = [own[c, corruption][:, [pair[part]]] for c, pair in classes.items() if (c, corruption) in own]
        met = [_micro(tally) for tally in tallies if tally[0].any()]
        return fmean(met) if met else None

    return {
        "classes": classes,
        "per_client": {client: [_micro(of_client[client][:, [k]]) for k in pair] for client, pair in classes.items()},
        "per_corruption": {name: [mean(name, 0), mean(name, 1)] for name in corruptions},
    }


def _grouped(tallies: dict[tuple[str, str], Tally], name: Callable[[tuple[str, str]], str]) -> dict[str, Tally]:
    sums: dict[str, Tally] = {}
    for key, tally in tallies.items():
        sums[name(key)] = sums[name(key)] + tally if name(key) in sums else tally
    return dict(sorted(sums.items()))


def _micro(tally: Sequence[NDArray[np.int64]] | Tally) -> float:
    seen, correct = tally
    return 100 * int(correct.sum()) / int(seen.sum())


def _macro(tally: Sequence[NDArray[np.int64]] | Tally, classes: int) -> float:
    seen, correct = tally
    return 100 * float((correct[seen > 0] / seen[seen > 0]).sum()) / classes
