"""FedAvgM: FedAvg with momentum on the server (Hsu et al. 2019, arXiv 1909.06335)."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.options import FedAvgMOptions
from fedtta_flwr.strategies.fedavg import FedAvg, fedavg_weights
from fedtta_flwr.strategies.updates import State, Updates, is_statistic


class FedAvgM(FedAvg):
    r"""A global model x that follows the mean of the clients with momentum; all who took part receive it.

    With :math:`\Delta = x - \sum_j \frac{n_j}{n} \theta_j` and x beginning at the source model, rule ``hsu``
    (the paper's, with a step size :math:`\eta` as of Reddi et al., ICLR 2021):

    .. math:: v \leftarrow \beta v + \Delta, \quad x \leftarrow x - \eta v,

    and rule ``ema``, as the published code of FTTA has it:

    .. math:: v \leftarrow \beta v + (1 - \beta) \Delta, \quad x \leftarrow x - \eta v, \quad v_1 = \Delta_1.

    Where that code and others push everything with momentum, here only parameters have it: a variance that overshoots
    becomes negative, and neither statistics nor the moving averages of a teacher are moved by a gradient. These are
    means, as with `FedAvg`, whose W is reported. So with an adapter that uploads only statistics this is FedAvg, and
    with :math:`\beta` = 0, :math:`\eta` = 1 it is FedAvg with any, but for rounding.

    x goes on while a client is away; who returns begins from the state that it received last, as with every strategy.

    Parameters
    ----------
    config : RunConfig
        With the table ``fedavgm``: momentum, learning-rate, rule.
    """

    one_for_all = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options: FedAvgMOptions = config.fedavgm
        # In float64, as the means that they follow: momentum would multiply what float32 rounds, round after round.
        self._global: State = {}
        self._velocity: State = {}

    def personalize(self, updates: Updates) -> State:
        """Return the mean of statistics and teachers and the moved parameters, equal for all; remember x and v."""
        averaged = {name: t for name, t in updates.state.items() if not has_momentum(name)}
        mixed = super().personalize(replace(updates, state=averaged))
        shares = fedavg_weights(updates.examples)[0]
        for name in filter(has_momentum, updates.state):
            x = self._global.get(name, self.source[name].double())
            mean = (shares @ updates.state[name].double().reshape(len(updates), -1)).view_as(x)
            x, v = server_step(x, mean, self._velocity.get(name), self.options)
            self._global[name], self._velocity[name] = x, v
            mixed[name] = x.to(updates.state[name].dtype).expand_as(updates.state[name]).clone()
        return {name: mixed[name] for name in updates.state}

    def memory(self) -> State:
        """Return x and v: ``global/NAME`` and ``velocity/NAME``, float64."""
        return {f"{kind}/{name}": t for kind, state in self._kinds().items() for name, t in state.items()}

    def load_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Install what `memory` returned."""
        for kind, state in self._kinds().items():
            state.clear()
            state |= {key.removeprefix(f"{kind}/"): t for key, t in memory.items() if key.startswith(f"{kind}/")}

    def _kinds(self) -> dict[str, State]:
        return {"global": self._global, "velocity": self._velocity}


def has_momentum(name: str) -> bool:
    """Return whether a tensor of this name is a parameter that clients learn: no statistic, nothing of a teacher."""
    return not is_statistic(name) and not name.startswith("teacher.")


def server_step(x: Tensor, mean: Tensor, velocity: Tensor | None, options: FedAvgMOptions) -> tuple[Tensor, Tensor]:
    """Return the next x and the next velocity, given the clients' mean; there is no velocity before the first round."""
    delta = x - mean
    if velocity is not None:
        share = 1.0 if options.rule == "hsu" else 1 - options.momentum
        velocity = options.momentum * velocity + share * delta
    else:
        velocity = delta
    return x - options.learning_rate * velocity, velocity
