"""Which run-config keys of the streams go together."""

from typing import TYPE_CHECKING

from fedtta_flwr.data.datasets import DATASETS, NO_CLEAN
from fedtta_flwr.data.orders import check_group_orders
from fedtta_flwr.errors import ConfigError

if TYPE_CHECKING:
    from fedtta_flwr.config import RunConfig


def check_streams(config: "RunConfig") -> None:
    """Refuse combinations that mean nothing.

    Raises
    ------
    ConfigError
        One line: key, value, and what is allowed.
    """
    check_group_orders(config.group_orders, config.num_clients)
    _check_severities_and_mixture(config)
    _check_live(config)
    _check_heads(config)


def require_clean_images(config: "RunConfig", setting: str) -> None:
    """Refuse a setting that needs the data set's clean images where there are none.

    Raises
    ------
    ConfigError
        One line that begins with `setting`.
    """
    where = f"stream = {config.stream!r}" if config.stream else f"dataset = {config.dataset!r}"
    if config.stream or config.dataset in NO_CLEAN:
        raise ConfigError(
            f"{setting}: {where} has no clean images; allowed with a data set that has: "
            f"{', '.join(name for name in DATASETS if name not in NO_CLEAN)}"
        )


def _check_severities_and_mixture(config: "RunConfig") -> None:
    corruptions = config.corruption_names()
    if config.severity_schedule == "gradual" and corruptions == ("none",):
        raise ConfigError("severity-schedule = 'gradual': corruptions = 'none' has no severity; allowed: constant")
    if not config.mixed_domains:
        return
    if not 2 <= len(corruptions) <= config.batch_size:
        raise ConfigError(
            f"mixed-domains = true: corruptions names {len(corruptions)}, batch-size is {config.batch_size}; allowed: "
            f"two corruptions or more, and at most batch-size"
        )
    for key, value, only in (
        ("group-orders", config.group_orders, ""),
        ("severity-schedule", config.severity_schedule, "constant"),
    ):
        if value != only:
            raise ConfigError(f"{key} = {value!r}: nothing shifts with mixed-domains = true; allowed: {only!r}")


def _check_live(config: "RunConfig") -> None:
    if config.dataset != "live":
        return
    if config.stream:
        raise ConfigError(f"stream = {config.stream!r}: dataset = 'live' is a stream already; allowed: one of both")
    if config.classes < 2:
        raise ConfigError("dataset = 'live': nothing else says how many classes; set classes to 2 or more")
    if config.rounds == 0:
        raise ConfigError("dataset = 'live': such a stream has no end; set rounds to 1 or more")
    if config.live_wait * config.aggregate_every >= config.round_timeout:
        raise ConfigError(
            f"live-wait = {config.live_wait:g} x aggregate-every = {config.aggregate_every}: no reply in time; "
            f"allowed: less than round-timeout = {config.round_timeout:g} s"
        )


def _check_heads(config: "RunConfig") -> None:
    if config.task != "tgfl":
        return
    require_clean_images(config, "task = 'tgfl'")
    if config.tgfl.natural_dir and not config.tgfl.natural_dataset:
        raise ConfigError(
            f"tgfl.natural-dir = {config.tgfl.natural_dir!r}: nothing says what is there; set tgfl.natural-dataset"
        )
    if config.num_clients < 2:
        raise ConfigError("num-clients = 1: nobody has samples that are external to it; allowed with tgfl: 2 or more")
    if config.aggregate_every != 1:
        raise ConfigError(
            f"aggregate-every = {config.aggregate_every}: clients train once a round with task = 'tgfl'; allowed: 1"
        )
