"""The tables of one run."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from fedtta_flwr.config import SCORES
from fedtta_flwr.reports.read import Run
from fedtta_flwr.reports.tables import Table, number, signed
from fedtta_flwr.reports.terminal import HEAD_TITLES

METRICS = {
    "micro": "micro",
    "macro": "macro, classes that occurred",
    "macro_all_classes": "macro, all K classes",
    "mean_clients": "mean over corruptions (test sets) and clients",
}
STRUCTURE = {
    "self_weight": "weight of a client's own state",
    "within_group": "weight within a group",
    "evenness": "evenness of a row (0: one client, 1: all alike)",
}
#: what is within an accuracy: a key of summary.json, of what kind it is
BY = (("per_corruption", "corruption"), ("per_client", "client"))
BY_OF_HEADS = (("per_corruption_mean_clients", "test set, mean over clients"), ("per_client", "client"))
MAJOR_NOTE = (
    "A client's major class is the one of which it has the most labelled samples in its whole stream, its minor class "
    "the one of which it has the fewest; of equally frequent ones the first. Means are over the clients; those whose "
    "classes are all equally frequent are left out."
)
SURE_NOTE = (
    "How sure a model is depends on what it sees, so that a sudden change, up or down, tells without labels that the "
    "images are others. It is no accuracy: methods that make the entropy of predictions small (Tent, say) make it "
    "larger whatever comes of that."
)
MEAN = "mean of clients"
MiB = 2**20
#: column -> by what it is divided, digits
COSTS = {
    "rounds": (1, 0),
    "client s": (1, 3),
    "server s": (1, 3),
    "transport s": (1, 3),
    "total s": (1, 3),
    "bytes up": (1, 0),
    "bytes down": (1, 0),
    "client MiB": (MiB, 0),
    "server MiB": (MiB, 0),
    "CUDA MiB": (MiB, 0),
}


def run_tables(run: Run) -> list[Table]:
    """Return all tables of a run."""
    tables = [
        _accuracies(run),
        *(_by(run, *which) for which in (BY_OF_HEADS if run.two_heads else BY)),
        _classes(run),
        _major_and_minor(run),
        _confidence(run),
        cost_table({"": [run]}, []),
        _structure(run),
    ]
    return [table for table in tables if table.rows]


def score_names(run: Run) -> dict[str, str]:
    """Return how the scores are called: of two heads, by the heads."""
    if not run.two_heads:
        return {score: score for score in SCORES}
    return {"tta": str(run.config.get("head"))} | HEAD_TITLES


def major_and_minor(run: Run, score: str, within: str) -> Mapping[str, Sequence[float | None]]:
    """Return the accuracies in percent on the clients' major and minor classes: the mean, and by client or corruption.

    Nothing of a run that is older than they, or none of whose clients has a major class.
    """
    found = run.summary["accuracy"].get(score, {}).get("major_minor") or {}
    if not found.get("per_client"):
        return {}
    mean = [fmean(part) for part in zip(*found["per_client"].values(), strict=True)]
    values: dict[str, list[float | None]] = found[f"per_{within}"]
    return {MEAN: mean} | values


def by_class(run: Run, score: str) -> dict[str, float | None]:
    """Return the accuracy in percent by class; None for one that did not occur."""
    counts = run.summary["accuracy"].get(score, {}).get("per_class") or {"seen": [], "correct": []}
    pairs = zip(counts["seen"], counts["correct"], strict=True)
    return {str(k): 100 * correct / seen if seen else None for k, (seen, correct) in enumerate(pairs)}


def costs(run: Run) -> list[float | None]:
    """Return rounds, seconds a round, bytes up and down per client and round, and peak memory in bytes, as `COSTS`."""
    summary, rounds = run.summary, int(run.summary["rounds"])
    if not rounds:
        return [None] * len(COSTS)
    seconds = [summary["seconds"][key] / rounds for key in ("client", "server", "transport", "total")]
    peaks = summary.get("memory") or {}
    return [
        rounds,
        *seconds,
        summary["bytes"]["up"],
        summary["bytes"]["down"],
        *(peaks.get(k) for k in ("client", "server", "cuda")),
    ]


def cost_table(runs: dict[str, Sequence[Run]], labels: list[str]) -> Table:
    """Return what runs cost, the mean of those with one label; the label is split at tabs.

    A column of which nothing is known, such as a GPU's memory on a CPU, is left out.
    """
    found = [(label.split("\t") if labels else [], _mean_costs(several)) for label, several in runs.items() if several]
    rows = [(names, means) for names, means in found if any(mean is not None for mean in means)]
    known = [i for i in range(len(COSTS)) if any(means[i] is not None for _, means in rows)]
    columns = list(COSTS)
    body = []
    for names, means in rows:
        cells = []
        for i in known:
            unit, digits = COSTS[columns[i]]
            mean = means[i]
            cells.append(number(None if mean is None else mean / unit, digits))
        body.append([*names, *cells])
    return Table(
        "costs",
        "Seconds per round, bytes per client and round, peak memory",
        [*labels, *(columns[i] for i in known)],
        body,
        labels=len(labels),
        notes=[
            "Client compute is summed over the clients; transport is the time in which the server waited and no client "
            "computed. Bytes are those of tensors. Memory is the peak of a process."
        ],
    )


def _mean_costs(runs: Sequence[Run]) -> list[float | None]:
    columns = [[value for value in values if value is not None] for values in zip(*map(costs, runs), strict=True)]
    return [float(np.mean(values)) if values else None for values in columns]


def _accuracies(run: Run) -> Table:
    names = score_names(run)
    rows = [[names[score], *(number(run.accuracy(score, metric)) for metric in METRICS)] for score in run.scores()]
    return Table("accuracy", "Accuracy in %", ["score", *METRICS.values()], rows)


def _by(run: Run, key: str, title: str) -> Table:
    found = {score: run.summary["accuracy"][score][key] for score in run.scores()}
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    rows = [[name, *(number(values.get(name)) for values in found.values())] for name in names]
    heads = [score_names(run)[score] for score in found]
    return Table(key.replace("_", "-"), f"Accuracy in % by {title}", [title, *heads], rows)


def _classes(run: Run) -> Table:
    found = {score: shares for score in run.scores() if (shares := by_class(run, score))}
    rows: list[list[str]] = []
    if found:
        seen = run.summary["accuracy"][next(iter(found))]["per_class"]["seen"]
        for k, samples in enumerate(seen):
            rows.append([str(k), f"{samples:,}", *(number(shares[str(k)]) for shares in found.values())])
    heads = [score_names(run)[score] for score in found]
    return Table("per-class", "Accuracy in % by class", ["class", "samples", *heads], rows)


def _major_and_minor(run: Run) -> Table:
    scores = [score for score in run.scores() if major_and_minor(run, score, "client")]
    rows: list[list[str]] = []
    for within in ("client", "corruption") if scores else ():
        found = [major_and_minor(run, score, within) for score in scores]
        classes = run.summary["accuracy"][scores[0]]["major_minor"]["classes"] if within == "client" else {}
        for name in [name for name in found[0] if within == "client" or name != MEAN]:
            cells = [number(value) for one in found for value in one.get(name, (None, None))]
            rows.append([name, *map(str, classes.get(name, ("", ""))), *cells])
    heads = [f"{score_names(run)[score]} {part}" for score in scores for part in ("major", "minor")]
    title = "Accuracy in % on the clients' major and minor classes"
    return Table("major-and-minor", title, ["client or corruption", "major", "minor", *heads], rows, notes=[MAJOR_NOTE])


def _confidence(run: Run) -> Table:
    rounds, found = run.confidence()
    rows = list[list[str]]()
    for client, column in zip(run.clients, found.T, strict=True):
        known = np.isfinite(column)
        if not known.any():
            continue
        there, change = column[known], np.diff(column[known])
        numbers = [number(float(value), 3) for value in (there.mean(), there.min(), there[-1])]
        largest = ["", ""]
        if len(change):
            at = np.abs(change).argmax()
            largest = [signed(float(change[at]), 3), str(rounds[known][at + 1])]
        rows.append([client, *numbers, *largest])
    heads = ["client", "mean of the rounds", "lowest", "latest", "largest change", "in round"]
    return Table("confidence", "Mean probability of what was predicted, by client", heads, rows, notes=[SURE_NOTE])


def _structure(run: Run) -> Table:
    found = run.summary.get("collaboration") or {}
    rows = [[title, number(found.get(key), 3)] for key, title in STRUCTURE.items() if found.get(key) is not None]
    return Table("collaboration", "The collaboration matrix W, mean over the rounds", ["of W", "value"], rows)
