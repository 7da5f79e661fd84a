"""From a run config to a strategy with its observers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path

import torch
from flwr.common.logger import log

from fedtta_flwr.adaptation.base import Adapter
from fedtta_flwr.adaptation.objectives import check_terms, takes_gradient_steps, terms_from
from fedtta_flwr.adaptation.promises import check_predict
from fedtta_flwr.config import RunConfig, Scalar, differing_key
from fedtta_flwr.data.build import check_data, image_form
from fedtta_flwr.descriptors import form_of
from fedtta_flwr.errors import ConfigError, StorageError
from fedtta_flwr.files import locked
from fedtta_flwr.models.own import build_own
from fedtta_flwr.models.source import EMBEDDED_MODEL, load_source
from fedtta_flwr.models.trial import try_network, try_own
from fedtta_flwr.plugins import is_own, plugin_code, plugin_fingerprints
from fedtta_flwr.registry import STRATEGIES
from fedtta_flwr.reports.mistrust import About, read_part
from fedtta_flwr.reports.run_directory import RunDirectory, run_path
from fedtta_flwr.reports.terminal import Terminal
from fedtta_flwr.reports.watch import Watch
from fedtta_flwr.resolve import make
from fedtta_flwr.seeding import seeded, torch_rng
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.checkpoint import Checkpoints, resumable
from fedtta_flwr.strategies.roster import Roster
from fedtta_flwr.strategies.tgfl import TGFL
from fedtta_flwr.tgfl import HeadBench, check_heads
from fedtta_flwr.tracking.observer import Tracking, check_trackers, make_trackers
from fedtta_flwr.workbench import check_descriptor, fingerprint_of, make_adapter


def make_strategy(config: RunConfig) -> PersonalizedStrategy:
    """Build the run's strategy, without observers."""
    strategy: PersonalizedStrategy
    if config.task == "tgfl":
        strategy = TGFL(config)
    else:
        with seeded(torch.device("cpu"), config.seed, "strategy"):
            own = config.strategy_options
            strategy = make("strategy", config.strategy, STRATEGIES, PersonalizedStrategy, config, options=own)
    if getattr(strategy, "config", None) is not config:
        raise ConfigError(f"strategy = {config.strategy!r}: __init__ must call super().__init__(config)")
    if strategy.one_for_all and config.weight_cap < 1:
        raise ConfigError(
            f"weight-cap = {config.weight_cap}: {config.methods()[0]} sends one model to all; allowed: 1.0, or a "
            f"strategy with a mixture for each client"
        )
    return strategy


def check_inputs(config: RunConfig) -> tuple[Adapter | HeadBench, Roster]:
    """Find out what is wrong with trackers, data, source model and adapter while nobody has been asked anything yet.

    It also makes the embedded source model where there is none, before the clients would all do so at once.

    Returns
    -------
    Adapter or HeadBench
        One as every client has it at the start.
    Roster
        Of nobody yet, with what every client must have: source model, number of classes and, of two heads, data.
    """
    check_trackers(config)
    if config.task == "tgfl":
        bench = check_heads(config)
        return bench, Roster(classes=bench.classes, model=bench.fingerprint, data=bench.dealt)
    data = check_data(config)
    classes, model = data.classes, load_source(config, data.classes)
    if form := image_form(config, data):
        image = torch.rand(1, 3, *form, generator=torch_rng(config.seed, "trial"))
        (try_own if is_own(config.model) else try_network)(config.model, model, image, classes)
    roster = Roster(classes=classes, model=fingerprint_of(model))  # before an adapter changes the model
    if is_own(config.model) and not config.checkpoint and _is_drawn(config, classes, roster.model):
        log(
            WARNING,
            "model = %r: draws weights at random and checkpoint is empty: a network that was not trained predicts; "
            "name its .safetensors file",
            config.model,
        )
    adapter = make_adapter(config, model)
    if form:
        with plugin_code(config.adapter):
            check_predict(adapter, image.expand(2, -1, -1, -1).clone(), [classes])
    return adapter, roster


def check_same(directory: Path, config: RunConfig) -> None:
    """Find out whether a run that shall be resumed had the same config, but for where it writes.

    Other code of the user's own is warned of.

    Raises
    ------
    ConfigError
        If not; it names the first key that differs. Also if the directory cannot be read.
    """
    about = read_part(directory / "config.json", About)
    before, now = about["config"], config.to_flat()
    if key := differing_key(now, before):
        raise ConfigError(
            f"resume = {config.resume!r}: that run had {key} = {before.get(key)!r}, found {now[key]!r}; give it the "
            f"same run config (`fedtta run --resume` takes it from there)"
        )
    for package, found in plugin_fingerprints(now).items():
        if about.get("plugins", {}).get(package) != found:
            log(WARNING, "%s was written by other code of %s than this: results may differ", directory, package)


def check_requests(strategy: PersonalizedStrategy) -> None:
    """Find out whether clients can do what a strategy will ask them for.

    Raises
    ------
    ConfigError
        If not; it names the strategy.
    """
    try:
        check_descriptor(strategy.descriptor, strategy.descriptor_options)
        form_of(strategy.descriptor, strategy.network, strategy.roster.classes)
        check_terms(terms_from(strategy.objectives), strategy.network)
    except ConfigError as error:
        raise ConfigError(f"strategy = {strategy.config.strategy!r}: {error}") from None


def _is_drawn(config: RunConfig, classes: int, model: str) -> bool:
    """Return whether a network of the user's own, of this fingerprint, comes out otherwise with another seed."""
    return fingerprint_of(build_own(config.model_copy(update={"seed": config.seed + 1}), classes)) != model


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
    resumed = resumable(config.resume) if config.resume else None
    path = resumed or run_path(config)
    with locked(path, f"{'resume' if resumed else 'output-dir'} = {str(path)!r}", "run"):
        if resumed is not None:
            check_same(resumed, config)
        begin, strategy.roster = check_inputs(config)
        for doubt in doubts(config):
            log(WARNING, "%s", doubt)
        _begin(strategy, begin)
        del begin  # with the images and the network of two heads
        directory = RunDirectory(path, resume=resumed is not None)
        strategy.checkpoints = Checkpoints(path, config.checkpoint_every, directory, resume=resumed is not None)
        tracking = Tracking(directory, make_trackers(config, path))
        strategy.observers = [directory, Terminal(directory), tracking]
        if strategy.selective and strategy.source:  # where nothing travels, nobody misses a choice
            strategy.observers.append(Watch())
        try:
            with plugin_code(config.strategy, strategy.where):
                yield strategy
        except BaseException as error:
            if directory.ended:  # what goes wrong while others are told takes nothing from the run
                raise
            try:
                directory.close(finished=False)
            except StorageError as second:
                if not isinstance(error, StorageError):  # what ended the run is to be told, not this
                    log(WARNING, "%s", second)
            finally:
                tracking.close(finished=False)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                kept = f"; {path} holds what was found" if (path / "config.json").exists() else " before it began"
                log(WARNING, "interrupted%s; to go on, %s", kept, directory.again())
            raise


def doubts(config: RunConfig) -> Iterator[str]:
    """Give what is allowed and may yet not be what was meant, a line each."""
    if config.stream and not config.checkpoint and config.model == EMBEDDED_MODEL:
        yield (
            f"checkpoint is empty: the embedded network of the ten digits predicts what stream = {config.stream!r} "
            f"gives; name a .safetensors file for another"
        )
    groups, corruptions = config.groups(), len(config.corruption_names())
    if config.makes_groups() and not config.mixed_domains and groups > corruptions > 1:
        yield (
            f"spatial-heterogeneity = {config.spatial_heterogeneity:g}: {groups} groups, but {corruptions} "
            f"corruptions, so that some groups see the same at a time"
        )


def _begin(strategy: PersonalizedStrategy, begin: Adapter | HeadBench) -> None:
    """Tell a strategy how every client begins."""
    if isinstance(begin, HeadBench):
        strategy.source = {name: t.cpu() for name, t in begin.adapted_state().items()}  # as replies are
        return
    strategy.network = begin.model  # of which it needs to know more than an own `prepare` may tell it
    with plugin_code(strategy.config.strategy):
        strategy.prepare(begin)
    if strategy.network is not begin.model:
        raise ConfigError(
            f"strategy = {strategy.config.strategy!r}: prepare set self.network, which {PersonalizedStrategy.__name__} "
            f"needs itself; choose another name"
        )
    check_requests(strategy)
    if strategy.objectives and not takes_gradient_steps(begin):
        terms = ", ".join(sorted({key.partition(".")[0] for key in strategy.objectives}))
        why = "takes no gradient step by an Optimizer of ours"
        log(WARNING, "%s %s: the clients' term %s has no effect", strategy.config.adapter, why, terms)
