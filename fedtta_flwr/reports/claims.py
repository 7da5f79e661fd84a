"""Whether what a paper claims holds in a benchmark."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedtta_flwr.bench.spec import Claim, Labels
from fedtta_flwr.reports.of_run import METRICS
from fedtta_flwr.reports.read import BenchOf
from fedtta_flwr.reports.tables import MINUS, Table, signed

CHANCE = 0.05  # of a difference by chance alone, from which on it is not told from none


@dataclass(frozen=True)
class Finding:
    """One comparison that a claim makes.

    Attributes
    ----------
    better, than : dict of str to str
        Labels of the two cells.
    differences : list of float
        Of the spec's score, in points, seed by seed.
    """

    claim: Claim
    better: Labels
    than: Labels
    differences: list[float]

    def verdict(self) -> str:
        """Return in words whether the claim holds on the mean over the seeds."""
        if not self.differences:
            return "not run"
        mean = float(np.mean(self.differences))
        # "By so many points" is at least so many, below 0 at most so many worse; without, better is more than nothing.
        # What is shown as 0.00 is as good.
        word = "holds" if (mean >= self.claim.by if self.claim.by else round(mean, 2) > 0) else "does not hold"
        if len(self.differences) == 1:
            return f"{word}, one seed"  # which says nothing of how much chance there is in it
        return f"{word}, within the spread of the seeds" if self.chance() > CHANCE else word

    def chance(self) -> float:
        """Return how probable a mean at least so far from what is claimed is without a difference: paired t-test."""
        from scipy.stats import t  # type: ignore[import-untyped, unused-ignore]  # on use: it takes half a second

        differences = np.subtract(self.differences, self.claim.by)
        mean, error = abs(differences.mean()), differences.std(ddof=1) / np.sqrt(len(differences))
        return float(2 * t.sf(mean / error, len(differences) - 1)) if error else 0.0

    def claimed(self) -> str:
        """Return what the mean difference has to be for the claim to hold, as `verdict` has it."""
        return f"≥ {self.claim.by:g}".replace("-", MINUS) if self.claim.by else "> 0"

    def figures(self) -> str:
        """Return the mean difference and its standard deviation over the seeds."""
        if not self.differences:
            return ""
        text = signed(float(np.mean(self.differences)))
        return text if len(self.differences) < 2 else f"{text} ± {np.std(self.differences, ddof=1):.2f}"


def findings(bench: BenchOf) -> list[Finding]:
    """Return every comparison of every claim, in the order of the spec."""
    return [
        Finding(claim, better, than, _differences(bench, better, than))
        for claim in bench.spec.claims
        for better, than in _pairs(bench, claim)
    ]


def claims_table(bench: BenchOf) -> Table:
    """Return all findings as a table."""
    found = findings(bench)
    # Of a claim about cells that are all skipped there is no finding.
    compared = {finding.claim.text for finding in found}
    found += [Finding(claim, {}, {}, []) for claim in bench.spec.claims if claim.text not in compared]
    rows = []
    for one in found:
        where = [f"{axis} {point}" for axis, point in one.better.items() if axis not in one.claim.better]
        figures = [one.claimed(), one.figures(), f"{len(one.differences)}"]
        rows.append([one.claim.text, ", ".join(where), one.verdict(), *figures])
    return Table(
        "claims",
        "What is claimed, and whether it holds here",
        ["claim", "where", "verdict", "claimed", "difference", "seeds"],
        rows,
        labels=3,
        notes=[
            f"Differences of {bench.spec.score}, {METRICS[bench.spec.metric]} in points, paired by seed: mean ± std. "
            f"Within the spread of the seeds: a paired t-test does not tell them from what is claimed (p > {CHANCE})."
        ],
    )


def _pairs(bench: BenchOf, claim: Claim) -> Iterator[tuple[Labels, Labels]]:
    """Give the cells to compare: what only one side names holds for both, all other axes run over their points."""
    axes = bench.spec.axes
    free = [axis for axis in axes if axis not in claim.better and axis not in claim.than]
    exist = [cell.labels for cell in bench.cells]
    for points in itertools.product(*(axes[axis] for axis in free)):
        rest = dict(zip(free, points, strict=True))
        better = {axis: (rest | claim.than | claim.better)[axis] for axis in axes}
        than = {axis: (rest | claim.better | claim.than)[axis] for axis in axes}
        if better in exist and than in exist:
            yield better, than


def _differences(bench: BenchOf, better: Labels, than: Labels) -> list[float]:
    score, metric = bench.spec.score, bench.spec.metric
    first, second = bench.by_seed(better), bench.by_seed(than)
    found = []
    for seed in sorted(first.keys() & second.keys()):
        a, b = first[seed].accuracy(score, metric), second[seed].accuracy(score, metric)
        if a is not None and b is not None:
            found.append(a - b)
    return found
