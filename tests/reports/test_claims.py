"""When a claim holds."""

import math
import statistics

import pytest

from fedtta_flwr.bench.spec import Claim
from fedtta_flwr.reports.claims import Finding
from fedtta_flwr.reports.tables import MINUS


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
        (0.0, [3.0, 2.0], "holds, within the spread of the seeds"),  # two seeds say little
        (0.0, [3.0, 2.8], "holds"),
        (0.0, [3.0, 2.0, 2.5], "holds"),
        (0.0, [0.5, 0.5], "holds"),
        (0.0, [0.0, 0.0], "does not hold"),
        (1.5, [1.0, 2.2], "holds, within the spread of the seeds"),  # it is at the claim that the spread counts
        (1.5, [0.6, 1.8], "does not hold, within the spread of the seeds"),
        (1.5, [-0.2, 0.3], "does not hold, within the spread of the seeds"),
        (1.5, [0.2, 0.25], "does not hold"),
        (0.0, [], "not run"),
    ],
)
def test_verdict(by: float, differences: list[float], verdict: str) -> None:
    finding = Finding(Claim(text="", better={}, than={}, by=by), {}, {}, differences)
    assert finding.verdict() == verdict
    assert finding.claimed() == {0.0: "> 0", 1.5: "≥ 1.5", -0.5: f"≥ {MINUS}0.5"}[by]
    if len(differences) > 1:
        std = statistics.stdev(differences)
        assert finding.figures().endswith(f"± {std:.2f}")
        assert ("spread" in verdict) == (std > 0 and by_hand(differences, by) > 0.05)


def by_hand(differences: list[float], by: float) -> float:
    """Return the p of a paired t-test, in closed form: with one and with two degrees of freedom there is one."""
    n = len(differences)
    t = abs(statistics.mean(differences) - by) / (statistics.stdev(differences) / math.sqrt(n))
    return 1 - 2 / math.pi * math.atan(t) if n == 2 else 1 - t / math.sqrt(t * t + 2)
