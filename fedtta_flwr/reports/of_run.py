"""The tables of one run."""

from collections.abc import Sequence

import numpy as np

from fedtta_flwr.reports.read import Run
from fedtta_flwr.reports.tables import Table, number

METRICS = {"micro": "micro", "macro": "macro, classes that occurred", "macro_all_classes": "macro, all K classes"}
STRUCTURE = {
    "self_weight": "weight of a client's own state",
    "within_group": "weight within a group",
    "evenness": "evenness of a row (0: one client, 1: all alike)",
}
#: title -> what summary.json says, by which it has to be divided per round, and digits
COSTS = ("client compute s/round", "server s/round", "transport s/round", "total s/round")
MiB = 2**20


def run_tables(run: Run) -> list[Table]:
    """Return all tables of a run."""
    tables = [
        _accuracies(run),
        *(_by(run, key, title) for key, title in (("per_corruption", "corruption"), ("per_client", "client"))),
        _classes(run),
        cost_table({"": [run]}, []),
        _structure(run),
    ]
    return [table for table in tables if table.rows]


def major_and_minor(run: Run, score: str) -> tuple[float, float] | None:
    """Return the accuracies in percent of the classes with more samples than the mean of those present, and the rest.

    None where nothing was scored, or where all classes that occur have as many samples.
    """
    found = run.summary["accuracy"].get(score)
    if found is None or "per_class" not in found:
        return None
    seen, correct = (np.array(found["per_class"][key]) for key in ("seen", "correct"))
    major = seen > seen[seen > 0].mean()
    minor = (seen > 0) & ~major
    if not major.any() or not minor.any():
        return None
    return 100 * float(correct[major].sum() / seen[major].sum()), 100 * float(correct[minor].sum() / seen[minor].sum())


def costs(run: Run) -> list[float | None]:
    """Return seconds a round by `COSTS`, bytes up and down per client and round, and peak memory in bytes."""
    summary, rounds = run.summary, max(1, int(run.summary["rounds"]))
    seconds = [summary["seconds"][key] / rounds for key in ("client", "server", "transport", "total")]
    peaks = summary.get("memory") or {}
    return [
        *seconds,
        summary["bytes"]["up"],
        summary["bytes"]["down"],
        *(peaks.get(k) for k in ("client", "server", "cuda")),
    ]


def cost_table(runs: dict[str, Sequence[Run]], labels: list[str]) -> Table:
    """Return what runs cost, the mean of those with one label; the label is split at tabs."""
    columns = [*labels, *COSTS, "bytes up", "bytes down", "client MiB", "server MiB", "CUDA MiB"]
    digits = [3, 3, 3, 3, 0, 0, 0, 0, 0]
    units = [1, 1, 1, 1, 1, 1, MiB, MiB, MiB]
    rows = []
    for label, several in runs.items():
        if not several:
            continue
        every = list(zip(*(costs(run) for run in several), strict=True))
        means = [None if None in values else float(np.mean(values)) for values in every]
        cells = [number(None if m is None else m / u, d) for m, u, d in zip(means, units, digits, strict=True)]
        rows.append([*(label.split("\t") if labels else []), *cells])
    return Table(
        "costs",
        "What it costs",
        columns,
        rows,
        labels=len(labels),
        notes=[
            "Client compute is summed over the clients; transport is the time in which the server waited and no client "
            "computed. Bytes are those of tensors, per client and round. Memory is the peak of a process."
        ],
    )


def _accuracies(run: Run) -> Table:
    rows = [[score, *(number(run.accuracy(score, metric)) for metric in METRICS)] for score in run.scores()]
    return Table("accuracy", "Accuracy in %", ["score", *METRICS.values()], rows)


def _by(run: Run, key: str, title: str) -> Table:
    found = {score: run.summary["accuracy"][score][key] for score in run.scores()}
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    rows = [[name, *(number(values.get(name)) for values in found.values())] for name in names]
    return Table(key.replace("_", "-"), f"Accuracy in % by {title}", [title, *found], rows)


def _classes(run: Run) -> Table:
    found = {score: run.summary["accuracy"][score].get("per_class") for score in run.scores()}
    found = {score: counts for score, counts in found.items() if counts}
    rows: list[list[str]] = []
    if found:
        seen = next(iter(found.values()))["seen"]
        for k, samples in enumerate(seen):
            shares = [
                counts["correct"][k] / counts["seen"][k] if counts["seen"][k] else None for counts in found.values()
            ]
            rows.append([str(k), f"{samples:,}", *(number(None if s is None else 100 * s) for s in shares)])
        pairs = {score: major_and_minor(run, score) for score in found}
        if all(pair is not None for pair in pairs.values()):
            for part, name in enumerate(("major classes", "minor classes")):
                rows.append([name, "", *(number(pair[part]) for pair in pairs.values() if pair is not None)])
    note = "Major classes have more labelled samples than the mean of the classes that occurred, minor ones the rest."
    return Table("per-class", "Accuracy in % by class", ["class", "samples", *found], rows, notes=[note])


def _structure(run: Run) -> Table:
    found = run.summary.get("collaboration") or {}
    rows = [[title, number(found.get(key), 3)] for key, title in STRUCTURE.items() if found.get(key) is not None]
    return Table("collaboration", "The collaboration matrix W, mean over the rounds", ["", "value"], rows)
