"""What two heads do in which round (``task = "tgfl"``); server and clients read it off the run config alike."""

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.btgfl import SETS

TRAIN = "train"
MEASURE = "measure"


def phases(config: RunConfig) -> tuple[str, ...]:
    """Return what happens in each round, from the first: training, measuring, then one test set a round.

    In a round of training a client trains its personal head on the extractor that it received, then extractor and
    global head, which the server averages. When that is over, clients train the personal head a last time and measure
    what predictors need to know of their training parts; the server averages what is meant for all. From then on
    nothing changes but what a predictor counts within a test set.
    """
    return (TRAIN,) * config.tgfl.train_rounds + (MEASURE,) + SETS


def phase_of(config: RunConfig, round_: int) -> str:
    """Return what happens in a round, counted from 1."""
    return phases(config)[round_ - 1]
