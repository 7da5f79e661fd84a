"""What the rounds of a run add up to, beside accuracies."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from fedtta_flwr.strategies.rounds import Round
from fedtta_flwr.strategies.structure import STRUCTURE


class Totals:
    """Sums over rounds, and of clients how often something befell them; a part of summary.json.

    A checkpoint takes `snapshot`, and `restore` goes on from it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._memory: dict[str, int] = {}
        self._missing, self._undone = Counter[str](), Counter[str]()
        self._collapsed, self._clipped = Counter[str](), Counter[str]()

    def add(self, round_: Round) -> None:
        """Enter a round, or the closing exchange."""
        for who, peak in round_.memory.items():
            self._memory[who] = max(peak, self._memory.get(who, 0))
        for key, value in round_.seconds.items():
            self._sums[f"seconds.{key}"] += value
        self._sums["bytes.up"] += round_.bytes_up
        self._sums["bytes.down"] += round_.bytes_down
        self._sums["steps"] += sum(round_.steps.values())
        if not round_.closing:  # which is no round
            self._missing.update(round_.missing.keys())
        self._sums["rolled-back"] += sum(round_.undone.values())  # not that of `_undone`, which earlier runs lack
        self._undone.update(round_.undone)
        self._collapsed.update(round_.collapsed)
        self._clipped.update(round_.clipped)

    def add_structure(self, found: Mapping[str, float | None]) -> None:
        """Enter what the W of a round says."""
        for key, number in found.items():
            if number is not None:
                self._sums[f"collaboration.{key}"] += number
                self._sums[f"known.{key}"] += 1

    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {
            "totals": self._sums,
            "missing": self._missing,
            "undone": self._undone,
            "collapsed": self._collapsed,
            "clipped": self._clipped,
            "memory": self._memory,
        }

    def restore(self, about: Mapping[str, Any]) -> None:
        """Go on from a snapshot."""
        self._sums.update(about["totals"])
        self._memory.update(about["memory"])
        self._missing.update(about["missing"])
        self._undone.update(about.get("undone", {}))
        self._collapsed.update(about.get("collapsed", {}))
        self._clipped.update(about.get("clipped", {}))

    def summary(self, visits: int) -> dict[str, Any]:
        """Return these parts of summary.json, of so many visits: clients times rounds."""
        sums, per = self._sums, max(1, visits)
        structures = {key: (sums[f"collaboration.{key}"], sums[f"known.{key}"]) for key in STRUCTURE}
        return {
            "bytes": {
                "up": sums["bytes.up"] / per,
                "down": sums["bytes.down"] / per,
                "unit": "bytes per client and round",
            },
            "seconds": {key: sums[f"seconds.{key}"] for key in ("client", "server", "transport", "total")},
            "memory": self._memory | {"unit": "bytes, peak of a process"} if self._memory else None,
            "collaboration": {key: total / rounds for key, (total, rounds) in structures.items() if rounds} or None,
            "screened": dict(sorted(self._missing.items())),
            "steps": int(sums["steps"]),
            "rolled_back": int(sums["rolled-back"]),
            "undone": _most_first(self._undone),
            "collapsed": _most_first(self._collapsed),
            "clipped": _most_first(self._clipped),
        }


def _most_first(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted(counter.items(), key=lambda entry: (-entry[1], entry[0])))
