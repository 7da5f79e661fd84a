"""FedTHE: its gradient against finite differences, its averages and steps against plain loops."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtta_flwr.heads import fedthe
from fedtta_flwr.heads.base import Fitted
from fedtta_flwr.heads.fedthe import FLAT, FedTHE, objective
from fedtta_flwr.options import FedTHEOptions

HISTORY, PRESENT, STEPS, RATE = 0.3, 0.2, 15, 0.1
OPTIONS = FedTHEOptions(history=HISTORY, present=PRESENT, steps=STEPS, learning_rate=RATE)


def softmax(v: np.ndarray) -> np.ndarray:
    e = np.exp(v - v.max())
    return e / e.sum()


def loss(e: np.ndarray, y_g: np.ndarray, y_l: np.ndarray, d: np.ndarray, s: float) -> float:
    w = softmax(e)
    p = softmax(w[0] * y_g + w[1] * y_l)
    return s * -float(p @ np.log(p)) + (1 - s) * float(w @ d)


def differences(e: np.ndarray, *given: object) -> np.ndarray:
    h = 1e-5
    steps = np.eye(2) * h
    return np.array([(loss(e + step, *given) - loss(e - step, *given)) / (2 * h) for step in steps])


def test_gradient_is_that_of_the_objective() -> None:
    generator = torch.Generator().manual_seed(2)
    e, y_g, y_l = (torch.randn(9, n, dtype=torch.float64, generator=generator) for n in (2, 5, 5))
    distances = torch.rand(9, 2, dtype=torch.float64, generator=generator) * 3
    similarity = torch.linspace(0, 1, 9, dtype=torch.float64)
    e.requires_grad_(True)
    values = objective(e, y_g, y_l, distances, similarity)
    (gradient,) = torch.autograd.grad(values.sum(), [e])
    for i in range(9):
        given = (y_g[i].numpy(), y_l[i].numpy(), distances[i].numpy(), float(similarity[i]))
        assert values[i].item() == pytest.approx(loss(e[i].detach().numpy(), *given), abs=1e-12)
        np.testing.assert_allclose(gradient[i], differences(e[i].detach().numpy(), *given), rtol=0, atol=1e-9)


def reference(fitted: Fitted, x: Tensor, flat: float = FLAT) -> tuple[list[list[float]], list[float], int]:
    """Predict sample by sample, gradients by finite differences, Adam by hand; count who stops on the way."""
    h_g, h_l = (fitted.statistics[f"feature-{whose}"].double().numpy() for whose in ("global", "personal"))
    features = fitted.extractor(x).detach().double().numpy()
    heads = [head.double().numpy() for head in (fitted.global_head, fitted.personal_head)]
    average = features[0]
    predictions, weights, stopped = [], [], 0
    for h in features:
        average = HISTORY * h + (1 - HISTORY) * average
        psi = PRESENT * h + (1 - PRESENT) * average
        y_g, y_l = (head @ h for head in heads)
        p_g, p_l = softmax(y_g), softmax(y_l)
        s = float(p_g @ p_l / np.linalg.norm(p_g) / np.linalg.norm(p_l))
        given = (y_g, y_l, np.array([np.linalg.norm(psi - h_g), np.linalg.norm(psi - h_l)]), s)
        e, m, v = np.ones(2), np.zeros(2), np.zeros(2)
        for t in range(1, STEPS + 1):
            g = differences(e, *given)
            if np.linalg.norm(g) < flat:
                stopped += t > 1
                break
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            e = e - RATE * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        w = softmax(e)
        weights.append(float(w[0]))
        predictions.append(softmax(w[0] * y_g + w[1] * y_l).tolist())
    return predictions, weights, stopped


@pytest.mark.parametrize("batch", [1, 7, 33])
def test_predictions_are_those_of_samples_one_by_one(
    batch: int, make_fitted: Callable[..., Fitted], images: Tensor
) -> None:
    expected, weights, _ = reference(make_fitted(), images)
    assert max(weights) - min(weights) > 0.2
    predictor = FedTHE(make_fitted(), OPTIONS)
    for _ in range(2):
        predictor.reset()
        found, shares = [], []
        for part in images.split(batch):
            found.append(predictor.predict(part))
            shares.append(predictor.weights)
        torch.testing.assert_close(torch.cat(shares), torch.tensor(weights), rtol=0, atol=2e-4)
        torch.testing.assert_close(torch.cat(found), torch.tensor(expected), rtol=0, atol=2e-4)


def test_a_flat_sample_stops_and_the_others_go_on(
    make_fitted: Callable[..., Fitted], images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    steep = 0.15  # within few steps some gradients are shorter, though Adam's momentum would go on
    monkeypatch.setattr(fedthe, "FLAT", steep)
    expected, weights, stopped = reference(make_fitted(), images, steep)
    assert 3 < stopped < 30
    predictor = FedTHE(make_fitted(), OPTIONS)
    torch.testing.assert_close(predictor.predict(images), torch.tensor(expected), rtol=0, atol=2e-4)
    torch.testing.assert_close(predictor.weights, torch.tensor(weights), rtol=0, atol=2e-4)


def test_averages_forget(make_fitted: Callable[..., Fitted]) -> None:
    predictor = FedTHE(make_fitted(), OPTIONS)
    z = torch.rand(4, 12)
    averages = predictor.averages(z)
    torch.testing.assert_close(averages[0], z[0])
    torch.testing.assert_close(averages[1], HISTORY * z[1] + (1 - HISTORY) * z[0])
    torch.testing.assert_close(predictor.averages(z[:1])[0], HISTORY * z[0] + (1 - HISTORY) * averages[3])
    predictor.reset()
    torch.testing.assert_close(predictor.averages(z), averages)
    assert not math.isnan(float(predictor.averages(torch.rand(500, 12)).sum()))


@pytest.mark.parametrize("batch", [1, 3, 9])
def test_what_is_not_finite_leaves_the_average_as_it_is(
    make_fitted: Callable[..., Fitted], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = torch.randn((9, 12), generator=torch.Generator().manual_seed(1))
    z[[0, 4, 8], 3] = torch.tensor([torch.nan, torch.inf, torch.nan])
    finite = z.isfinite().all(dim=1)
    predictor, without = (FedTHE(make_fitted(), OPTIONS) for _ in range(2))
    expected = without.averages(z[finite])
    monkeypatch.setattr(fedthe, "AT_ONCE", 4)  # so that nine are more than are made at once
    found = torch.cat([predictor.averages(part) for part in z.split(batch)])
    torch.testing.assert_close(found[finite], expected)
    torch.testing.assert_close(predictor.averages(z[1:2]), without.averages(z[1:2]))
