"""BTFL against adaptive quadrature, the closed form, and its equations in plain loops."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, special
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.heads.base import Fitted
from fedtta_flwr.heads.btfl import BTFL, UNSEEN, interpolation_weight, leave_one_out, squash
from fedtta_flwr.options import BTFLOptions
from fedtta_flwr.run_config import read_overrides
from tests.conftest import ROOT

COUNTS = [1.0, 1.3, 2.0, 5.0, 16.0, 300.0, 1e5]
LOGS = [-math.inf, -800.0, -100.0, -30.0, -5.0, -1.0, -1e-9, 0.0, 1e-3, 1.0, 5.0, 30.0, 100.0, 800.0, math.inf]


def weight(a: float, b: float, log_tau: float) -> float:
    counts = [torch.tensor(n, dtype=torch.float64) for n in (a, b)]
    return interpolation_weight(*counts, torch.tensor([log_tau], dtype=torch.float64)).item()


def quadrature(a: float, b: float, log_tau: float) -> float:
    """Return the integral over the logits of m, where nothing overflows, by adaptive quadrature."""

    def density(s: float) -> float:
        return math.exp(a * s - (a + b) * np.logaddexp(0, s) - normaliser)

    def integrand(s: float) -> float:
        return density(s) * special.expit(s - log_tau)

    normaliser = 0.0
    mode, deviation = math.log(a / b), math.sqrt(1 / a + 1 / b)
    normaliser = a * mode - (a + b) * np.logaddexp(0, mode)  # scipy's betaln has too few digits for large counts
    ends = (mode - 60 / a - 12 * deviation, mode + 60 / b + 12 * deviation)
    points = [mode - 3 * deviation, mode, mode + 3 * deviation]
    settings = {"points": points, "epsabs": 1e-14, "epsrel": 1e-12, "limit": 2000}
    return integrate.quad(integrand, *ends, **settings)[0] / integrate.quad(density, *ends, **settings)[0]


@pytest.mark.parametrize("a", COUNTS)
@pytest.mark.parametrize("b", COUNTS)
def test_weight_is_the_integral(a: float, b: float) -> None:
    expected = [quadrature(a, b, log_tau) for log_tau in LOGS]
    found = [weight(a, b, log_tau) for log_tau in LOGS]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert all(0 <= e <= 1 for e in found)
    assert all(e >= later for e, later in itertools.pairwise(found))
    mirrored = [weight(b, a, -log_tau) for log_tau in LOGS]
    np.testing.assert_allclose(np.add(found, mirrored), 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize("a", [1.0, 2.5, 7.0, 16.0])
@pytest.mark.parametrize("b", [1.0, 2.5, 7.0, 16.0])
def test_weight_is_the_closed_form(a: float, b: float) -> None:
    for tau in (0.2, 0.7, 1.0, 1.5, 4.0):
        expected = a / ((a + b) * tau) * special.hyp2f1(1, a + 1, a + b + 1, 1 - 1 / tau)
        assert weight(a, b, math.log(tau)) == pytest.approx(expected, abs=1e-11)  # scipy's own digits


def test_weight_in_known_cases() -> None:
    for a, b in itertools.product(COUNTS, COUNTS):
        assert weight(a, b, 0.0) == pytest.approx(a / (a + b), abs=1e-12)
        assert [weight(a, b, -math.inf), weight(a, b, math.inf)] == pytest.approx([1, 0], abs=1e-14)
    for tau in (0.3, 2.0, 50.0):
        expected = (1 - tau + tau * math.log(tau)) / (tau - 1) ** 2
        assert weight(1, 1, math.log(tau)) == pytest.approx(expected, abs=1e-12)


def test_each_sample_may_have_its_own_prior() -> None:
    a, b, logs = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 9.0, 2.0], [4.0, 1.0, 2.5], [0.4, -3.0, 2.0]))
    expected = [weight(*row) for row in zip(a.tolist(), b.tolist(), logs.tolist(), strict=True)]
    assert interpolation_weight(a, b, logs).tolist() == pytest.approx(expected, abs=1e-14)


def test_leave_one_out() -> None:
    own = torch.rand(6, 9, dtype=torch.float64)
    for i in range(6):
        others = [own[j] for j in range(6) if j != i]
        torch.testing.assert_close(leave_one_out(own.mean(0), own[i], 6), sum(others, torch.zeros(9)) / 5)
    torch.testing.assert_close(leave_one_out(own[0], own[0], 6), own[0])  # N alike: the same
    torch.testing.assert_close(leave_one_out(own[0], own[0], 1), own[0])
    assert torch.equal(leave_one_out(own[1], own[0], 0), own[1])  # of others alone: one's own is not in it


def test_squash() -> None:
    logs = torch.tensor(LOGS, dtype=torch.float64)
    assert squash(logs, 0.0) is logs
    squashed = squash(logs, 4.0)
    assert squashed.isfinite().all()
    torch.testing.assert_close(squashed, -squash(-logs, 4.0))
    for log_tau in (-1.5, -0.1, 0.0, 0.7):
        tau = math.exp(log_tau)
        bounded = 4 * math.tanh(tau - 1) + 1 if tau > 1 else 1 / (4 * math.tanh(1 / tau - 1) + 1)
        found = squash(torch.tensor([log_tau], dtype=torch.float64), 4.0).item()
        assert found == pytest.approx(math.log(bounded), abs=1e-12)


def reference(fitted: Fitted, x: Tensor, options: BTFLOptions, batch: int) -> tuple[list[list[float]], list[float]]:
    """Predict by the equations, in plain Python, sample by sample; return probabilities and the counts at the end."""
    found, code = fitted.statistics, options.exponents == "code"
    own, mean = found["dle-personal"].double().numpy(), found["dle-global"].double().numpy()
    if options.leave_one_out:
        n = int(found["clients"])
        mean = n / (n - 1) * mean - own / (n - 1)
    own, mean = ((1 - options.smoothing) * p + options.smoothing / 2 for p in (own, mean))
    own, mean = (np.clip(p, UNSEEN, 1 - UNSEEN) for p in (own, mean))
    bar_l, bar_g = float(found["entropy-personal"]), float(found["entropy-global"])
    n_exd = n_ind = 1.0
    prior = (n_exd, n_ind)
    predictions = []
    for i, z in enumerate(fitted.extractor(x).detach()):
        if i % batch == 0 or options.prior == "sample":
            prior = (n_exd, n_ind)
        z_hat = [round(math.tanh(max(0.0, v))) for v in z.tolist()]
        log_l, log_g = (sum(math.log(1 - p[j] if z_hat[j] else p[j]) for j in range(len(p))) for p in (own, mean))
        y_l, y_g = ((head @ z).double().softmax(0).numpy() for head in (fitted.personal_head, fitted.global_head))
        h_l, h_g = (-float((y * np.log(y)).sum()) for y in (y_l, y_g))
        u_l = math.exp((h_l - bar_l) / (bar_l if code else h_l))
        u_g = math.exp((h_g - math.log(100)) / math.log(100) if code else (h_g - bar_g) / h_g)
        log_tau = (u_l * log_l - u_g * log_g) / len(z)
        if options.squash:
            k, tau = options.squash, math.exp(log_tau)
            log_tau = math.log(k * math.tanh(tau - 1) + 1) if tau > 1 else -math.log(k * math.tanh(1 / tau - 1) + 1)
        e = quadrature(*prior, log_tau)
        if options.mix == "log":
            y = np.exp(e * np.log(y_g) + (1 - e) * np.log(y_l))
            y /= y.sum()
        else:
            y = e * y_g + (1 - e) * y_l
        predictions.append(y.tolist())
        if log_l > log_g and h_l < bar_l and h_g > bar_g:
            n_ind += 1
        if log_l < log_g and h_l > bar_l and h_g < bar_g:
            n_exd += 1
        last = i % batch == batch - 1 or i == len(x) - 1
        if (last or options.prior == "sample") and n_ind + n_exd > options.threshold:
            total = n_ind + n_exd
            n_ind, n_exd = 1 + options.strength * n_ind / total, 1 + options.strength * n_exd / total
    return predictions, [n_ind, n_exd]


CODE = RunConfig.from_flat(read_overrides([str(ROOT / "configs" / "presets" / "btfl-code.toml")])).btfl
SMALL = {"threshold": 4.0}  # so that few events prune
FORMS = {
    "paper": BTFLOptions(**SMALL),
    "batch": BTFLOptions(prior="batch", **SMALL),
    "code": CODE,
    "smooth": BTFLOptions(smoothing=0.4, squash=10.0, mix="log"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [1, 5, 32])
def test_predictions_and_counts(form: str, batch: int, make_fitted: Callable[..., Fitted], images: Tensor) -> None:
    options = FORMS[form]
    predictor = BTFL(make_fitted(), options)
    internal, external = predictor.events(*evidence(predictor, images))
    assert internal.sum() > 2
    assert external.sum() > 2
    for _ in range(2):  # the second time as the first
        predictor.reset()
        found = torch.cat([predictor.predict(part) for part in images.split(batch)])
        expected, counts = reference(make_fitted(), images, options, batch)
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=2e-6)
        assert [predictor.n_ind, predictor.n_exd] == pytest.approx(counts, abs=1e-12)
    assert predictor.weights is not None
    assert len(predictor.weights) == len(images.split(batch)[-1])


def evidence(predictor: BTFL, x: Tensor) -> tuple[Tensor, Tensor]:
    z = predictor.extractor(x)
    shared, own = (logits.softmax(1) for logits in predictor.logits(z))
    entropies = torch.stack([-(p * p.log()).sum(1) for p in (own, shared)], dim=1)
    return predictor.log_likelihoods(z), entropies


def test_a_batch_of_one_is_a_sample(make_fitted: Callable[..., Fitted], images: Tensor) -> None:
    by_batch, by_sample = (BTFL(make_fitted(), BTFLOptions(prior=prior, **SMALL)) for prior in ("batch", "sample"))
    one_by_one = torch.cat([by_batch.predict(image) for image in images.unsqueeze(1)])
    torch.testing.assert_close(by_sample.predict(images), one_by_one, rtol=0, atol=1e-6)
    by_batch.reset()
    assert not torch.allclose(by_batch.predict(images), one_by_one, atol=1e-3)


def test_bits_never_seen(make_fitted: Callable[..., Fitted], images: Tensor) -> None:
    never, always = torch.zeros(12), torch.ones(12)
    predictor = BTFL(make_fitted(dle_personal=never, dle_global=always), BTFLOptions())
    probabilities = predictor.predict(images)
    assert probabilities.isfinite().all()
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(images)))


@pytest.mark.parametrize("options", [BTFLOptions(), CODE], ids=["paper", "code"])
def test_a_head_sure_of_everything(options: BTFLOptions, make_fitted: Callable[..., Fitted], images: Tensor) -> None:
    fitted = make_fitted(entropy_personal=torch.tensor(0.0), entropy_global=torch.tensor(0.0))
    assert BTFL(fitted, options).predict(images).isfinite().all()
    fitted.personal_head.mul_(1e4)
    own = BTFL(fitted, options).logits(fitted.extractor(images))[1]
    assert (torch.distributions.Categorical(logits=own).entropy() == 0).any()
    assert BTFL(fitted, options).predict(images).isfinite().all()
