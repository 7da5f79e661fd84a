"""When a claim holds."""

import statistics

import pytest

from fedtta_flwr.bench.spec import Claim
from fedtta_flwr.reports.claims import Finding


@pytest.mark.parametrize(
    ("by", "differences", "verdict"),
    [
        (0.0, [0.0], "does not hold, one seed"),  # as good is not better
        (0.0, [0.004], "does not hold, one seed"),  # nor is what is shown as 0.00
        (0.0, [0.01], "holds, one seed"),
        (1.5, [1.5], "holds, one seed"),  # at least so many points
        (1.5, [1.49], "does not hold, one seed"),
        (-0.5, [-0.2], "holds, one seed"),  # as good but for half a point
        (-0.5, [-0.5], "holds, one seed"),
        (-0.5, [-0.51], "does not hold, one seed"),
        (0.0, [3.0, -1.0], "holds, within the spread of the seeds"),
        (0.0, [-3.0, 1.0], "does not hold, within the spread of the seeds"),
        (0.0, [3.0, 2.0], "holds"),
        (1.5, [1.0, 2.2], "holds, within the spread of the seeds"),  # it is at the claim that the spread counts
        (1.5, [0.6, 1.8], "does not hold, within the spread of the seeds"),
        (1.5, [-0.2, 0.3], "does not hold"),
        (0.0, [], "not run"),
    ],
)
def test_verdict(by: float, differences: list[float], verdict: str) -> None:
    finding = Finding(Claim(text="", better={}, than={}, by=by), {}, {}, differences)
    assert finding.verdict() == verdict
    if len(differences) > 1:
        std = statistics.stdev(differences)
        assert finding.figures().endswith(f"± {std:.2f}")
        assert ("spread" in verdict) == (abs(statistics.mean(differences) - by) < std)
