"""Noise corruptions (Hendrycks & Dietterich, ICLR 2019), on images x in [0, 1]."""

import numpy as np

from fedtta_flwr.data._recipe import Batch, Floats, Recipe


def gaussian_noise(batch: Batch, std: float) -> Floats:
    """Return x + std * n with n ~ N(0, 1) per channel value."""
    x = batch.unit
    return x + std * batch.draw(lambda rng: rng.standard_normal(x.shape[1:]))


def shot_noise(batch: Batch, rate: float) -> Floats:
    """Return Poisson(rate * x) / rate."""
    counts = [rng.poisson(image * rate) for rng, image in zip(batch.rngs, batch.unit, strict=True)]
    return np.stack(counts) / rate


def impulse_noise(batch: Batch, amount: float) -> Floats:
    """Return x with a share `amount` of the channel values replaced by 0 or 1, equally likely."""
    x = batch.unit
    chance = batch.draw(lambda rng: rng.random(x.shape[1:]))
    return np.where(chance < amount / 2, 0.0, np.where(chance < amount, 1.0, x))


def speckle_noise(batch: Batch, std: float) -> Floats:
    """Return x + std * x * n with n ~ N(0, 1) per channel value."""
    x = batch.unit
    return x + std * x * batch.draw(lambda rng: rng.standard_normal(x.shape[1:]))


RECIPES = {
    "gaussian_noise": Recipe(gaussian_noise, ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,))),
    "shot_noise": Recipe(shot_noise, ((500,), (250,), (100,), (75,), (50,))),
    "impulse_noise": Recipe(impulse_noise, ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,))),
    "speckle_noise": Recipe(speckle_noise, ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,))),
}
