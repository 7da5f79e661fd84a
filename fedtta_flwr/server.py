"""From a run config to a strategy with its observers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fedtta_flwr.config import RunConfig, Scalar
from fedtta_flwr.data.build import check_data
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models.source import load_source
from fedtta_flwr.registry import STRATEGIES, resolve
from fedtta_flwr.reports.run_directory import RunDirectory, run_path
from fedtta_flwr.reports.terminal import Terminal
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.workbench import make_adapter


def make_strategy(config: RunConfig) -> PersonalizedStrategy:
    """Build the run's strategy, without observers."""
    kind = resolve("strategy", config.strategy, STRATEGIES)
    if not (isinstance(kind, type) and issubclass(kind, PersonalizedStrategy)):
        raise ConfigError(f"strategy = {config.strategy!r}: no subclass of {PersonalizedStrategy.__name__}")
    return kind(config)


def check_inputs(config: RunConfig) -> None:
    """Find out what is wrong with data, source model and adapter while nobody has been asked anything yet.

    It also makes the embedded source model where there is none, before the clients would all do so at once.
    """
    make_adapter(config, load_source(config, check_data(config).classes))


@contextmanager
def federation(run_config: Mapping[str, Scalar]) -> Iterator[PersonalizedStrategy]:
    """Give the strategy of a run config, which writes a run directory and prints its progress.

    However the run ends (an error, Ctrl-C), the run directory is left valid and says whether it finished.

    Raises
    ------
    FedTTAError
        If the config, or a file that it names, is not usable. No client has been asked anything by then.
    """
    config = RunConfig.from_flat(run_config)
    strategy = make_strategy(config)
    check_inputs(config)
    directory = RunDirectory(run_path(config))
    strategy.observers = [directory, Terminal(directory)]
    try:
        yield strategy
    except BaseException:
        directory.close(finished=False)
        raise
