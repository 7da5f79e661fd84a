"""FedCTTA's weights: the identities of its equations, and the moving average by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtta_flwr.errors import FederationError
from fedtta_flwr.strategies.fedctta import FedCTTA, fedctta_weights
from fedtta_flwr.strategies.updates import Update, Updates, stack_updates


def by_loops(logits: list[list[float]], temperature: float) -> list[list[float]]:
    """softmax_j(-||u_i - u_j|| / T) with Python floats."""
    rows = []
    for u in logits:
        scores = [-math.dist(u, v) / temperature for v in logits]
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
    assert dict(strategy.descriptor_options) == {"samples": 7}


def test_missing_descriptors_are_one_line(tiny_config) -> None:
    updates = stack_updates(3, {"a": Update({"t": torch.zeros(1)}, None, 5)}, ())
    with pytest.raises(FederationError, match=r"round 3: .*noise-logits") as caught:
        FedCTTA(tiny_config()).collaboration_matrix(updates)
    assert "\n" not in str(caught.value)
