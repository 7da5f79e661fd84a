"""FedCTTA's weights: the identities of its equations, the moving average by hand, and whole runs."""

import itertools
import math
import statistics
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtta_flwr.adaptation.bn_stats import BNStats
from fedtta_flwr.descriptors import mean_logits, noise_images
from fedtta_flwr.errors import ConfigError, FederationError
from fedtta_flwr.options import NoOptions
from fedtta_flwr.records import DESCRIPTOR, INFO, STATE, arrays_of, unstack
from fedtta_flwr.server import make_strategy
from fedtta_flwr.strategies.fedctta import METRICS, FedCTTA, fedctta_weights
from fedtta_flwr.strategies.updates import Update, Updates, stack_updates


def softmax(u: list[float]) -> list[float]:
    exponentials = [math.exp(x - max(u)) for x in u]
    return [x / sum(exponentials) for x in exponentials]


def cross_entropy(u: list[float], v: list[float]) -> float:
    """-sum_k p_k log q_k with p = softmax(u), q = softmax(v)."""
    log_sum = max(v) + math.log(sum(math.exp(x - max(v)) for x in v))
    return -sum(p * (x - log_sum) for p, x in zip(softmax(u), v, strict=True))


def cosine_distance(u: list[float], v: list[float]) -> float:
    return 1 - sum(a * b for a, b in zip(u, v, strict=True)) / (math.hypot(*u) * math.hypot(*v))


DISTANCES = {
    "euclid": math.dist,
    "kl": lambda u, v: cross_entropy(u, v) - cross_entropy(u, u),
    "ce": cross_entropy,
    "cosine": cosine_distance,
}


def by_loops(logits: list[list[float]], temperature: float | str, metric: str = "euclid") -> list[list[float]]:
    """softmax_j(-d(u_i, u_j) / T) with Python floats."""
    if temperature == "median":
        own = DISTANCES["kl" if metric == "ce" else metric]
        nearest = [min(own(u, v) for v in logits if v is not u) for u in logits]
        temperature = statistics.median_low(nearest)
    rows = []
    for u in logits:
        scores = [-DISTANCES[metric](u, v) / temperature for v in logits]  # type: ignore[operator]
        weights = [math.exp(score - max(scores)) for score in scores]
        rows.append([weight / sum(weights) for weight in weights])
    return rows


def draw(n: int, k: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn((n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def updates_of(logits: dict[str, list[float]], number: int = 1) -> Updates:
    made = {client: Update({"t": torch.zeros(1)}, torch.tensor(u), 5) for client, u in logits.items()}
    return stack_updates(number, made, ())


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 8),
    k=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-6, 0.1, 1.0, 30.0]),
    temperature=st.sampled_from([0.05, 1.0, 20.0]),
)
def test_weights_are_those_of_the_equations(n: int, k: int, seed: int, scale: float, temperature: float) -> None:
    logits = draw(n, k, seed, scale)
    weights = fedctta_weights(logits, temperature)
    assert weights.dtype == torch.float64
    expected = torch.tensor(by_loops(logits.tolist(), temperature), dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(n, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert (weights.argmax(dim=1) == torch.arange(n)).all()  # nobody is nearer to a client than itself


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(2, 7),
    k=st.integers(2, 9),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
    temperature=st.sampled_from([0.2, 1.0, 20.0, "median"]),
    metric=st.sampled_from(sorted(METRICS)),
)
def test_weights_of_every_metric(n: int, k: int, seed: int, scale: float, temperature: Any, metric: str) -> None:
    logits = draw(n, k, seed, scale)
    weights = fedctta_weights(logits, temperature, metric)
    expected = torch.tensor(by_loops(logits.tolist(), temperature, metric), dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-8, atol=1e-10)


EVERY = pytest.mark.parametrize(
    ("metric", "temperature"), list(itertools.product(sorted(METRICS), (1.0, "median"))), ids=str
)


@EVERY
def test_one_client_or_equal_ones_are_averaged(metric: str, temperature: Any) -> None:
    one = draw(1, 10, 0).float()
    assert fedctta_weights(one, temperature, metric).tolist() == [[1.0]]
    for n in (2, 3, 40):
        weights = fedctta_weights(one.expand(n, -1), temperature, metric)
        torch.testing.assert_close(weights, torch.full((n, n), 1 / n, dtype=torch.float64), rtol=1e-14, atol=0)


@EVERY
def test_permuting_the_clients_permutes_the_weights_of_every_metric(metric: str, temperature: Any) -> None:
    logits, order = draw(6, 10, 1), torch.randperm(6, generator=torch.Generator().manual_seed(1))
    permuted = fedctta_weights(logits[order], temperature, metric)
    expected = fedctta_weights(logits, temperature, metric)[order][:, order]
    torch.testing.assert_close(permuted, expected, rtol=1e-12, atol=1e-14)


@EVERY
@pytest.mark.parametrize("n", [1, 2, 500])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1.0, 1e10, 3e37])
def test_weights_of_any_scale_are_finite(metric: str, temperature: Any, n: int, scale: float) -> None:
    weights = fedctta_weights((draw(n, 10, 4) * scale).float(), temperature, metric)
    assert weights.shape == (n, n)
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert weights.sum(dim=1).tolist() == pytest.approx([1.0] * n)


def test_the_median_does_not_depend_on_the_scale_of_logits() -> None:
    logits = draw(7, 10, 6)
    weights = fedctta_weights(logits, "median")
    torch.testing.assert_close(fedctta_weights(1e-3 * logits, "median"), weights, rtol=1e-10, atol=0)
    torch.testing.assert_close(fedctta_weights(1e30 * logits, "median"), weights, rtol=1e-10, atol=0)
    assert weights.diagonal().max() < 0.99
    assert fedctta_weights(1e3 * logits, 1.0).diagonal().min() > 0.99


def test_twins_share_where_most_have_one() -> None:
    logits = draw(3, 10, 7)[[0, 0, 1, 1, 2]]
    expected = [[0.5, 0.5, 0, 0, 0]] * 2 + [[0, 0, 0.5, 0.5, 0]] * 2 + [[0, 0, 0, 0, 1]]
    assert fedctta_weights(logits, "median").tolist() == expected


@pytest.mark.parametrize("scale", [1e-38, 1e-13, 1e30])
def test_the_cosine_knows_no_length(scale: float) -> None:
    logits = draw(5, 10, 8)
    torch.testing.assert_close(METRICS["cosine"](scale * logits), METRICS["cosine"](logits), rtol=1e-10, atol=0)


def test_an_answer_of_zeros_is_at_right_angles_to_all_others() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = METRICS["cosine"](logits.double())
    expected = [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]
    torch.testing.assert_close(found, torch.tensor(expected).double())


def test_one_client_keeps_its_own() -> None:
    assert fedctta_weights(draw(1, 10, 0), 1.0).tolist() == [[1.0]]


@pytest.mark.parametrize("n", [2, 3, 20])
def test_identical_clients_are_averaged(n: int) -> None:
    weights = fedctta_weights(draw(1, 10, 0).float().expand(n, -1), 1.0)
    torch.testing.assert_close(weights, torch.full((n, n), 1 / n, dtype=torch.float64), rtol=1e-14, atol=0)


def test_small_distances_are_not_lost_in_large_logits() -> None:
    """Expanding the square would make all of these distances zero."""
    base = torch.full((3, 10), 4096.0)
    base[1, 0] += 2**-9
    base[2, 0] += 3 * 2**-9
    distance = 2**-9
    weights = fedctta_weights(base, distance)
    expected = torch.tensor(by_loops([[0.0], [1.0], [3.0]], 1.0), dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_permuting_the_clients_permutes_the_weights(seed: int) -> None:
    logits = draw(6, 10, seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        fedctta_weights(logits[order], 1.0), fedctta_weights(logits, 1.0)[order][:, order], rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("shift", [0.5, -100.0, 1e6])
def test_a_common_shift_changes_nothing(shift: float) -> None:
    logits = draw(6, 10, 1)
    moved = logits + shift * draw(1, 10, 2)
    torch.testing.assert_close(fedctta_weights(moved, 1.0), fedctta_weights(logits, 1.0), rtol=1e-7, atol=1e-9)


def test_temperature_limits() -> None:
    logits = draw(5, 10, 3)
    eye, uniform = torch.eye(5, dtype=torch.float64), torch.full((5, 5), 0.2, dtype=torch.float64)
    torch.testing.assert_close(fedctta_weights(logits, 1e-4), eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(fedctta_weights(logits, 1e9), uniform, rtol=1e-7, atol=0)
    # a temperature is a scale of the logits
    torch.testing.assert_close(fedctta_weights(logits, 4.0), fedctta_weights(logits / 4, 1.0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", [1e-38, 1e-10, 1e10, 3e37])
@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e6])
def test_extreme_scales_stay_finite(scale: float, temperature: float) -> None:
    weights = fedctta_weights((draw(6, 10, 4) * scale).float(), temperature)
    assert weights.isfinite().all()
    assert weights.sum(dim=1).tolist() == pytest.approx([1.0] * 6)
    assert (weights >= 0).all()


def test_five_hundred_clients() -> None:
    weights = fedctta_weights(draw(500, 10, 5).float(), 1.0)
    assert weights.shape == (500, 500)
    assert weights.isfinite().all()
    assert weights.sum(dim=1).tolist() == pytest.approx([1.0] * 500)


@pytest.mark.parametrize("share", [0.0, 0.9, 0.5])
def test_the_moving_average_is_kept_by_name(tiny_config, share: float) -> None:
    """Clients join, leave and come back; each one's average moves only when it replies."""
    strategy = FedCTTA(tiny_config(**{"fedctta.ema": share, "fedctta.temperature": 2.0}))
    generator = torch.Generator().manual_seed(6)
    present = ["abc", "ac", "abcd", "d", "bd", "abcd"]
    average: dict[str, list[float]] = {}
    for number, names in enumerate(present, start=1):
        new = {name: torch.randn(4, generator=generator).tolist() for name in names}
        for name, u in new.items():
            old = average.get(name, u)
            average[name] = [share * o + (1 - share) * v for o, v in zip(old, u, strict=True)]
        weights = strategy.collaboration_matrix(updates_of(dict(reversed(new.items())), number))
        expected = by_loops([average[name] for name in sorted(names)], 2.0)
        torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_the_average_of_what_never_changes_is_exactly_that(tiny_config) -> None:
    """Or who joins later would be an ulp away from all others, which the median takes for far."""
    for seed in range(20):
        strategy = FedCTTA(tiny_config(**{"fedctta.temperature": "median"}))
        u = torch.randn(4, generator=torch.Generator().manual_seed(seed)).tolist()
        for number in range(1, 12):
            strategy.collaboration_matrix(updates_of(dict.fromkeys("abcd", u), number))
        weights = strategy.collaboration_matrix(updates_of(dict.fromkeys("abcde", u), 12))
        assert weights.flatten().tolist() == pytest.approx([0.2] * 25)


def test_the_average_does_not_change_what_was_sent(tiny_config) -> None:
    strategy = FedCTTA(tiny_config())
    updates = updates_of({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    assert updates.descriptor is not None
    before = updates.descriptor.clone()
    strategy.collaboration_matrix(updates)
    strategy.collaboration_matrix(updates)
    assert torch.equal(updates.descriptor, before)


def test_the_request_names_the_descriptor_and_its_options(tiny_config) -> None:
    strategy = FedCTTA(tiny_config(**{"fedctta.noise-samples": 7}))
    assert strategy.descriptor == "noise-logits"
    assert dict(strategy.descriptor_options) == {"samples": 7, "redraw": "never", "lagged": False}
    strategy = FedCTTA(tiny_config(**{"fedctta.redraw": "each-client", "fedctta.lagged": True}))
    assert dict(strategy.descriptor_options) == {"samples": 4, "redraw": "each-client", "lagged": True}


def test_what_is_remembered_can_be_stored(tiny_config) -> None:
    """A new strategy that loads it goes on in exactly the same way, with clients that leave and come back."""
    config = tiny_config(**{"fedctta.ema": 0.7})
    generator = torch.Generator().manual_seed(9)

    def some(names: str, number: int) -> Updates:
        return updates_of({name: torch.randn(4, generator=generator).tolist() for name in names}, number)

    first = FedCTTA(config)
    assert first.memory() == {}
    first.collaboration_matrix(some("abc", 1))
    first.collaboration_matrix(some("ab", 2))
    stored = {name: t.clone() for name, t in first.memory().items()}
    assert sorted(stored) == ["smoothed/a", "smoothed/b", "smoothed/c"]
    second = FedCTTA(config)
    second.load_memory(stored)
    third = some("bcd", 3)
    expected = first.collaboration_matrix(third)
    assert torch.equal(second.collaboration_matrix(third), expected)
    assert not torch.equal(FedCTTA(config).collaboration_matrix(third), expected)


@pytest.mark.parametrize(
    "flat", [{"dataset": "cifar10-c"}, {"dataset": "cifar100-c"}, {"stream": "mine:stream", "classes": 10}]
)
def test_images_cannot_be_chosen_where_there_are_no_clean_ones(tiny_config, flat: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"fedctta.images = 'chosen': .*no clean images.*digits") as caught:
        make_strategy(tiny_config(**flat, **{"fedctta.images": "chosen"}))
    assert next(iter(flat.values())) in str(caught.value)
    assert "\n" not in str(caught.value)
    make_strategy(tiny_config(**flat))


def test_missing_descriptors_are_one_line(tiny_config) -> None:
    updates = stack_updates(3, {"a": Update({"t": torch.zeros(1)}, None, 5)}, ())
    with pytest.raises(FederationError, match=r"round 3: .*noise-logits") as caught:
        FedCTTA(tiny_config()).collaboration_matrix(updates)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- whole runs


def described(run: Any) -> dict[tuple[int, str], Tensor]:
    """(round, client) -> the descriptor that it sent."""
    found = {}
    for reply in run.replies:
        sent = arrays_of(reply.content, DESCRIPTOR).get(DESCRIPTOR)
        if sent is not None:
            info = reply.content.config_records[INFO]
            found |= {(info["round"], name): sent[i] for i, name in enumerate(info["updated"])}
    return found


def received(run: Any) -> dict[tuple[int, str], dict[str, Tensor]]:
    """(round, client) -> the personal state that it began with."""
    found = {}
    for message in run.sent:
        info, state = message.content.config_records.get(INFO), arrays_of(message.content, STATE)
        known = zip(info["personal"], info["places"], strict=True) if info is not None else ()
        found |= {(info["round"], name): unstack(state, i) for name, i in known}
    return found


def weights_of(run: Any) -> Tensor:
    with np.load(run.path / "collaboration.npz") as arrays:
        return torch.from_numpy(arrays["weights"]).double()


def differ(sent: dict[tuple[int, str], Tensor], number: int) -> bool:
    """Whether anybody's descriptor of a round is another than the first client's."""
    return any(not torch.equal(u, sent[number, "client-00"]) for (n, _), u in sent.items() if n == number)


@pytest.mark.parametrize(
    ("adapter", "images", "indicator", "metric"),
    [
        ("bn-stats", "noise", "logits", "euclid"),
        ("entropy", "noise", "features", "cosine"),
        ("bn-stats", "chosen", "logits", "kl"),
        ("entropy", "chosen", "features", "euclid"),
        ("bn-stats", "original", "logits", "ce"),
        ("source", "original", "features", "euclid"),
    ],
)
def test_a_run_mixes_by_the_answers(run_local, adapter: str, images: str, indicator: str, metric: str) -> None:
    options = {"images": images, "indicator": indicator, "metric": metric, "ema": 0.0, "temperature": "median"}
    settings = {f"fedctta.{key}": value for key, value in options.items()}
    run = run_local(adapter=adapter, scores="post", **settings, **{"entropy.learning-rate": 0.01})
    sent, weights = described(run), weights_of(run)
    assert weights.shape == (4, 4, 4)
    for t in range(4):
        answers = [sent[t + 1, f"client-0{i}"].double().tolist() for i in range(4)]
        assert len(answers[0]) == {"logits": 10, "features": 64}[indicator]
        expected = torch.tensor(by_loops(answers, "median", metric), dtype=torch.float64)
        torch.testing.assert_close(weights[t], expected, rtol=1e-4, atol=1e-5)
        assert differ(sent, t + 1)


def test_who_does_not_adapt_answers_alike(run_local) -> None:
    """The source model travels nowhere; on noise all are one, on their own batches they are not."""
    run = run_local(adapter="source", scores="tta")
    assert (weights_of(run) == 0.25).all()
    assert run.summary["bytes"]["down"] == 0
    other = run_local(adapter="source", scores="tta", **{"fedctta.images": "original"})
    assert (weights_of(other).diagonal(dim1=1, dim2=2) > 0.26).all()
    assert other.summary["accuracy"] == run.summary["accuracy"]


def test_a_lagged_answer_on_shared_noise_is_fedavg(run_local) -> None:
    """In the first round all begin alike; the uniform W keeps them alike, bit for bit and for ever."""
    run = run_local(scores="post", **{"fedctta.lagged": True, "fedctta.temperature": "median"})
    assert (weights_of(run) == 0.25).all()
    sent = received(run)
    for key, state in received(run_local(scores="post", strategy="fedavg")).items():
        assert state.keys() == sent[key].keys()
        assert all(torch.equal(t, sent[key][name]) for name, t in state.items())
    assert not any(differ(described(run), number) for number in (1, 2, 3, 4))


@pytest.mark.parametrize("slots", [1, 2])
def test_a_lagged_answer_is_that_of_what_came(run_local, resnet8, slots: int) -> None:
    settings = {"fedctta.lagged": True, "fedctta.redraw": "each-client", "aggregate-every": slots}
    run = run_local(scores="post", **settings)
    began, sent = received(run), described(run)
    assert len(sent) == 16 / slots
    adapter = BNStats(deepcopy(resnet8), NoOptions())
    source = {name: t.clone() for name, t in adapter.adapted_state().items()}
    for (number, client), answer in sent.items():
        adapter.load_adapted_state(began.get((number, client), source))
        noise = noise_images(0, 4, (3, 32, 32), number, client)
        torch.testing.assert_close(answer, mean_logits(adapter.predict, noise))
    adapter.load_adapted_state(source)
    assert all(differ(sent, number) for number in range(1, 4 // slots + 1))


def test_every_client_and_round_has_noise_of_its_own(run_local) -> None:
    """With the source model, whose answers differ by the noise alone."""
    found = {}
    for redraw in ("never", "each-round", "each-client"):
        sent = described(run_local(adapter="source", scores="", **{"fedctta.redraw": redraw}))
        answers = {tuple(u.tolist()) for u in sent.values()}
        found[redraw] = (len(answers), differ(sent, 1))
    assert found == {"never": (1, False), "each-round": (4, False), "each-client": (16, True)}
