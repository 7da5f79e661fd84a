"""A head of the user's own is asked once before anything is trained for it, not for the first time when all is."""

from collections.abc import Set
from copy import deepcopy

import torch

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.heads.base import NEEDS, SHARED, VALIDATION, Predictor, ask
from fedtta_flwr.heads.training import Epoch, TwoHeads, fitted, statistics
from fedtta_flwr.options import Options
from fedtta_flwr.own import check_taken
from fedtta_flwr.resolve import call


def try_out(name: str, method: type[Predictor], options: Options, net: TwoHeads, batches: Epoch, clients: int) -> None:
    """Let a head predict one image by an untrained network and the statistics of a client's first batch.

    Parameters
    ----------
    name : str
        As in the run config.
    method : type of Predictor
        Its class.
    options : Options
        Its own.
    net : TwoHeads
        Stays as it is.
    batches : Epoch
        A client's training part.
    clients : int
        How many there are.

    Raises
    ------
    ConfigError
        If it needs a statistic that nobody makes, cannot be made, or predicts no probabilities.
    """
    needs: object = method.needs
    made = NEEDS if net.recipe.rotation else NEEDS - {"rotation-head"}
    if not isinstance(needs, Set) or needs - made:
        raise ConfigError(
            f"head = {name!r}: needs = {needs!r}; allowed, as a set: {', '.join(sorted(made))}"
            + ("" if made == NEEDS else ", and rotation-head where recipe() has rotation=True")
        )
    x, labels = next(iter(batches()))
    means = {own: mean for own, mean in SHARED.items() if mean in needs}
    found = statistics(net, lambda: [(x, labels)], {*needs, *means, *VALIDATION})
    found |= {name: found[own] for own, name in {**VALIDATION, **means}.items()}
    found["clients"] = torch.tensor(float(clients)).to(x)
    predictor: Predictor = call("head", name, method, fitted(deepcopy(net), found), options)
    check_taken("head", name, predictor)
    if not hasattr(predictor, "fitted"):
        raise ConfigError(f"head = {name!r}: __init__ must call super().__init__(fitted, options)")
    predictor.identity = (0, "trial")
    predictor.reset()
    ask(predictor, x[:1])
