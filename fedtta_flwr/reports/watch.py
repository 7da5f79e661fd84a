"""Says so when a method that is meant to choose among clients has stopped choosing."""

from logging import WARNING
from typing import Literal, get_args

import torch
from flwr.common.logger import log
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.options import kebab
from fedtta_flwr.strategies.rounds import Round
from fedtta_flwr.strategies.structure import self_weight

ROUNDS = 10  # in a row
#: the options that say how sharply a method chooses: the larger, the more alike all weights
SCALES = ("temperature", "tau", "sigma", "lam")
FINDINGS = {
    "local": ("a client's own weight is above 0.99", "larger"),
    "fedavg": ("every client gives all the same weight", "smaller"),
    "fedavg of the others": ("every client gives all others the same weight", "smaller"),
}


class Watch:
    """Logs once if W is that of another method, one of `FINDINGS`, for 10 rounds in a row.

    Of a shorter run it takes all rounds. A round without W, or with one client, breaks the row.
    """

    def __init__(self) -> None:
        self._config = RunConfig()
        self._rounds = ROUNDS
        self._in_a_row = dict.fromkeys(FINDINGS, 0)
        self._said = False

    def on_start(self, config: RunConfig, clients: tuple[str, ...], rounds: int) -> None:
        """Learn what runs, and for how long."""
        self._config = config
        self._rounds = min(ROUNDS, rounds)

    def on_round(self, round_: Round) -> None:
        """Look at W."""
        found = resembles(round_.weights)
        for method, rounds in self._in_a_row.items():
            self._in_a_row[method] = rounds + 1 if method == found else 0
            if self._in_a_row[method] == self._rounds and not self._said:
                self._said = True
                self._say(method)

    def on_end(self) -> None:
        """Do nothing more: the last round has been looked at."""

    def _say(self, method: str) -> None:
        finding, change = FINDINGS[method]
        log(
            WARNING,
            "%s has silently become %s: for %d %s in a row %s%s",
            self._config.strategy,
            method,
            self._rounds,
            "rounds" if self._rounds > 1 else "round",
            finding,
            hint(self._config, change),
        )


def resembles(weights: Tensor | None) -> str | None:
    """Return which method has a W [N, N] like this, one of `FINDINGS`, or None."""
    if weights is None or len(weights) < 2:
        return None
    if self_weight(weights) > 0.99:
        return "local"
    if _equal(weights):
        return "fedavg"
    # Whatever a client keeps for itself, as with FedAMP: of two clients the other one has no equal.
    clients = len(weights)
    others = weights[~torch.eye(clients, dtype=torch.bool)].view(clients, clients - 1)
    return "fedavg of the others" if clients > 2 and _equal(others) else None


def _equal(weights: Tensor) -> bool:
    """Return whether the weights [N, M] of each row are the same, and above 0."""
    mean = weights.mean(dim=1, keepdim=True)
    # 0.001 for the 20 clients of the papers; of a thousand clients, of whom each has so little, correspondingly less.
    return bool(((weights - mean).abs() < (mean / 50).clamp_max(1e-3)).all())


def hint(config: RunConfig, change: str) -> str:
    """Return how to make the strategy's scale larger or smaller; nothing if it has none, or a relative one already."""
    options = config.options(config.strategy)
    answers = config.fedctta
    alike = answers.lagged and answers.images != "original" and answers.redraw != "each-client"
    if config.strategy == "fedctta" and alike and change == "smaller":  # however sharply they are told apart
        return '; set fedctta.lagged = false, or fedctta.redraw = "each-client"'
    for name in SCALES:
        if (field := type(options).model_fields.get(name)) is not None and getattr(options, name) != "median":
            key = f"{config.strategy}.{kebab(name)}"
            relative = Literal["median"] in get_args(field.annotation)
            return f"; make {key} {change}" + (f', or {key} = "median"' if relative else "")
    return ""
