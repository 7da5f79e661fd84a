"""Which samples a client sees under each corruption, and in which order."""

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data import dirichlet
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.seeding import numpy_rng


def draw_samples(config: RunConfig, client: str, labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Return the positions [S] of a client's samples in stream order; the same ones for each corruption.

    ``fling-iid``: every client draws without replacement and independently of the others, so that clients overlap
    (the sampler of the FedTSA and FedCTTA protocol). ``disjoint``: no sample belongs to two clients. With a
    ``class-skew`` the classes are drawn from a Dirichlet distribution first (`fedtta_flwr.data.dirichlet`): how many
    samples of each by ``class-skew-seed`` alone, which ones by the run's seed, too, so that seeds are repetitions.

    Raises
    ------
    ConfigError
        More samples are needed than there are.
    """
    number, available = _number(config, len(labels)), len(labels)
    if config.class_skew:
        sampler = dirichlet.disjoint if config.sampling == "disjoint" else dirichlet.overlapping
        everyone = sampler(
            labels,
            delta=config.class_skew,
            clients=config.num_clients,
            samples=number,
            classes=classes,
            seed=config.class_skew_seed,
        )
        samples = everyone[config.client_names().index(client)]
        if config.seed:  # those of seed 0 are the published sampler's
            samples = _others_of_a_class(labels, config.seed)[samples]
        if config.stream_order == "shuffled":
            samples = numpy_rng(config.seed, client, "order").permutation(samples)
        return samples
    if config.sampling == "disjoint":
        rank = config.client_names().index(client)
        everybody = numpy_rng(config.seed, "disjoint samples").permutation(available)
        samples = everybody[rank * number : (rank + 1) * number]
    else:
        samples = numpy_rng(config.seed, client, "samples").permutation(available)[:number]
    if config.stream_order == "class-sorted":
        samples = samples[np.argsort(labels[samples], kind="stable")]
    return samples


def _others_of_a_class(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return a random permutation [N] of the samples that gives each one of its own class."""
    drawn = numpy_rng(seed, "samples of a class").permutation(len(labels))
    others = np.empty_like(drawn)
    others[np.argsort(labels, kind="stable")] = drawn[np.argsort(labels[drawn], kind="stable")]
    return others


def _number(config: RunConfig, available: int) -> int:
    """Return the number of samples S of one client under one corruption."""
    batch, slots = config.batch_size, config.slots_per_corruption
    if config.sampling == "disjoint":
        share = available // config.num_clients
        number = slots * batch if slots else share
        if number > share or number == 0:
            raise ConfigError(
                f"sampling = 'disjoint' (class-skew = {config.class_skew:g}): {config.num_clients} clients x "
                f"{number or 1} samples of each corruption are more than {config.dataset} has; allowed: at most "
                f"{share} each, of {available} (num-clients, batch-size, slots-per-corruption)"
            )
        return number
    if config.class_skew:
        return slots * batch if slots else available
    number = slots * batch if slots else available
    if (least := max(number, batch)) > available:
        raise ConfigError(
            f"batch-size = {batch} x slots-per-corruption = {slots or 1}: {least} "
            f"samples of each corruption; allowed: at most {available}, the size of {config.dataset}'s test part"
        )
    return number
