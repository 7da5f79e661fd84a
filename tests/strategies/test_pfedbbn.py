"""pFedBBN's weights against its two equations in plain loops, and whole runs."""

import math
import statistics
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtta_flwr.adaptation.bbn import BBN
from fedtta_flwr.errors import ConfigError, FederationError
from fedtta_flwr.models import build
from fedtta_flwr.models.base import Classifier
from fedtta_flwr.options import BBNOptions
from fedtta_flwr.records import DESCRIPTOR, INFO, STATE, arrays_of, unstack
from fedtta_flwr.registry import ADAPTERS
from fedtta_flwr.strategies.pfedbbn import PFedBBN, pfedbbn_weights, statistics_distances
from fedtta_flwr.strategies.updates import Update, check_row_stochastic, stack_updates
from fedtta_flwr.workbench import make_adapter

#: of a client: mean and variance of each layer
Layers = list[tuple[list[float], list[float]]]


def distances_by_loops(clients: list[Layers]) -> list[list[float]]:
    """Equation 7."""
    return [
        [
            sum((math.dist(m, n) + math.dist(v, w)) / 2 for (m, v), (n, w) in zip(a, b, strict=True)) / len(a)
            for b in clients
        ]
        for a in clients
    ]


def weights_by_loops(distance: list[list[float]], tau: float) -> list[list[float]]:
    """Equation 8, in its two cases."""
    rows = []
    for i, row in enumerate(distance):
        total = sum(math.exp(-d / tau) for k, d in enumerate(row) if k != i)
        own = 1 / (1 + total)
        rows.append(
            [own if j == i else (math.exp(-d / tau) / total * (1 - own) if total else 0.0) for j, d in enumerate(row)]
        )
    return rows


def draw(clients: int, sizes: tuple[int, ...], seed: int, scale: float = 1.0) -> list[Tensor]:
    """Means and variances of all layers, [N, C] each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        scale * made((clients, size), generator=generator, dtype=torch.float64)
        for size in sizes
        for made in (torch.randn, torch.rand)
    ]


def as_lists(of_layers: list[Tensor]) -> list[Layers]:
    pairs = list(zip(of_layers[::2], of_layers[1::2], strict=True))
    return [[(m[i].tolist(), v[i].tolist()) for m, v in pairs] for i in range(len(of_layers[0]))]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 7),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 10_000),
    tau=st.sampled_from([0.1, 1.0, 10.0, "median"]),
)
def test_weights_are_those_of_the_two_equations(n: int, sizes: tuple[int, ...], seed: int, tau: Any) -> None:
    of_layers = draw(n, sizes, seed)
    distance = distances_by_loops(as_lists(of_layers))
    found = statistics_distances(of_layers)
    torch.testing.assert_close(found, torch.tensor(distance, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    between = statistics.median_low(d for i, row in enumerate(distance) for d in row[:i])
    expected = weights_by_loops(distance, between if tau == "median" else tau)
    weights = pfedbbn_weights(found, tau)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def test_tau_limits() -> None:
    distance = statistics_distances(draw(5, (3, 4), 1))
    eye, uniform = torch.eye(5, dtype=torch.float64), torch.full((5, 5), 0.2, dtype=torch.float64)
    torch.testing.assert_close(pfedbbn_weights(distance, 1e-3), eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(pfedbbn_weights(distance, 1e12), uniform, rtol=1e-10, atol=0)
    sharper = [pfedbbn_weights(distance, tau).diagonal().mean().item() for tau in (10.0, 1.0, 0.1)]
    assert sharper == sorted(sharper)


def test_the_median_does_not_depend_on_the_scale_of_the_statistics() -> None:
    of_layers = draw(6, (3, 4), 2)
    weights = pfedbbn_weights(statistics_distances(of_layers), "median")
    larger = pfedbbn_weights(statistics_distances([1e6 * t for t in of_layers]), "median")
    torch.testing.assert_close(larger, weights, rtol=1e-10, atol=0)
    assert weights.diagonal().max() < 0.9


TAUS = pytest.mark.parametrize("tau", [0.1, 1.0, "median"])


@TAUS
@pytest.mark.parametrize("n", [1, 2, 20])
def test_identical_clients_are_averaged(n: int, tau: Any) -> None:
    of_layers = [t.float().expand(n, -1) for t in draw(1, (16, 8), 3)]
    weights = pfedbbn_weights(statistics_distances(of_layers), tau)
    torch.testing.assert_close(weights, torch.full((n, n), 1 / n, dtype=torch.float64), rtol=1e-14, atol=0)


@TAUS
def test_permuting_the_clients_permutes_the_weights(tau: Any) -> None:
    of_layers, order = draw(6, (3, 4), 4), torch.randperm(6, generator=torch.Generator().manual_seed(4))
    weights = pfedbbn_weights(statistics_distances(of_layers), tau)
    permuted = pfedbbn_weights(statistics_distances([t[order] for t in of_layers]), tau)
    torch.testing.assert_close(permuted, weights[order][:, order], rtol=1e-12, atol=1e-14)


@TAUS
@pytest.mark.parametrize("n", [1, 2, 500])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1.0, 1e10, 3e37])
def test_weights_of_any_scale_are_row_stochastic(n: int, scale: float, tau: Any) -> None:
    of_layers = [t.float() for t in draw(n, (16, 8), 5, scale)]
    weights = pfedbbn_weights(statistics_distances(of_layers), tau)
    assert check_row_stochastic(weights, n) is None
    assert (weights >= 0).all()


# -------------------------------------------------------------------------------------------------------- the strategy

#: those that upload the running statistics of the network that learns
UPLOAD_STATISTICS = {"bn-stats", "entropy", "dua", "note", "rotta", "bbn"}


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_statistics_that_do_not_travel_are_asked_for(tiny_config, resnet8: Classifier, adapter: str) -> None:
    config = tiny_config(adapter=adapter)
    strategy = PFedBBN(config)
    made = make_adapter(config, deepcopy(resnet8))
    strategy.prepare(made)
    assert strategy.descriptor == ("" if adapter in UPLOAD_STATISTICS else "bn-statistics")
    assert strategy.source.keys() == made.adapted_state().keys()


def test_a_network_without_batch_norm_is_one_line(tiny_config) -> None:
    config = tiny_config(strategy="pfedbbn", adapter="entropy")
    with pytest.raises(ConfigError, match="strategy = 'pfedbbn': ResNet has no BatchNorm") as caught:
        PFedBBN(config).prepare(make_adapter(config, build("resnet20-gn", 10)))
    assert "\n" not in str(caught.value)


def test_missing_descriptors_are_one_line(tiny_config, resnet8: Classifier) -> None:
    config = tiny_config(adapter="source")
    strategy = PFedBBN(config)
    strategy.prepare(make_adapter(config, deepcopy(resnet8)))
    with pytest.raises(FederationError, match=r"round 3: .*bn-statistics"):
        strategy.collaboration_matrix(stack_updates(3, {"a": Update({}, None, 5)}, ()))


@pytest.mark.parametrize("adapter", ["bbn", "rotta"])
def test_only_the_students_running_statistics_tell_clients_apart(
    tiny_config, resnet8: Classifier, adapter: str
) -> None:
    config = tiny_config(adapter=adapter)
    strategy, made = PFedBBN(config), make_adapter(config, deepcopy(resnet8))
    strategy.prepare(made)
    clients = {name: {key: t.clone() for key, t in made.adapted_state().items()} for name in "abc"}
    for key, t in clients["b"].items():
        if "teacher" in key or "class" in key or not key.endswith(("running_mean", "running_var")):
            t += 1
    updates = {name: Update(state, None, 5) for name, state in clients.items()}
    assert (strategy.collaboration_matrix(stack_updates(1, updates, ())) == 1 / 3).all()
    clients["c"]["layer2.0.bn1.running_var"][3] += 0.9
    weights = strategy.collaboration_matrix(stack_updates(1, updates, ()))
    layers = 9  # of BatchNorm in resnet8
    expected = weights_by_loops([[0, 0, (d := 0.9 / 2 / layers)], [0, 0, d], [d, d, 0]], 1.0)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------------- whole runs


def of_clients(messages: Any, kind: str) -> dict[int, dict[str, dict[str, Tensor]]]:
    """round -> client -> tensors; `kind` is who is named: "personal" in what was sent, "updated" in what came."""
    found: dict[int, dict[str, dict[str, Tensor]]] = {}
    for message in messages:
        info = message.content.config_records.get(INFO)
        for i, name in enumerate(info[kind] if info is not None and kind in info else []):
            tensors = arrays_of(message.content, STATE) | arrays_of(message.content, DESCRIPTOR)
            found.setdefault(info["round"], {})[name] = unstack(tensors, i)
    return found


def weights_of(run: Any) -> Tensor:
    with np.load(run.path / "collaboration.npz") as arrays:
        return torch.from_numpy(arrays["weights"]).double()


def expected_weights(clients: dict[str, dict[str, Tensor]], tau: float) -> Tensor:
    """W from the uploaded running statistics, layer by layer."""
    layers = sorted(k.removesuffix(".running_mean") for k in clients["client-00"] if k.endswith(".running_mean"))
    lists = [
        [tuple(state[f"{layer}.running_{kind}"].double().tolist() for kind in ("mean", "var")) for layer in layers]
        for _, state in sorted(clients.items())
    ]
    return torch.tensor(weights_by_loops(distances_by_loops(lists), tau), dtype=torch.float64)  # type: ignore[arg-type]


@pytest.mark.parametrize("adapter", ["bn-stats", "entropy", "bbn"])
def test_a_run_mixes_by_the_statistics(run_local: Callable[..., Any], adapter: str) -> None:
    run = run_local(strategy="pfedbbn", adapter=adapter, scores="post", **{"pfedbbn.tau": 0.1})
    uploaded, sent, weights = of_clients(run.replies, "updated"), of_clients(run.sent, "personal"), weights_of(run)
    assert len(weights) == 4
    for t in range(4):
        expected = expected_weights(uploaded[t + 1], 0.1)
        torch.testing.assert_close(weights[t], expected, rtol=1e-4, atol=1e-6)
        assert expected.diagonal().min() > 0.25
        names = sorted(uploaded[t + 1])
        for row, name in zip(expected, names, strict=True):
            for key, found in sent[t + 2][name].items():  # all that travels, the statistics of every class as well
                parts = [w * uploaded[t + 1][other][key].double() for w, other in zip(row, names, strict=True)]
                torch.testing.assert_close(found.double(), sum(parts), rtol=1e-3, atol=1e-5)
    if adapter == "bbn":
        assert {"bn1.class_mean", "bn1.teacher_class_var", "bn1.weight"} <= sent[2]["client-00"].keys()


def test_balanced_norm_balances_a_mixture_anew(run_local: Callable[..., Any], resnet8: Classifier) -> None:
    """The mixed balanced variance is not that of the mixed classes, whose means differ from client to client."""
    run = run_local(strategy="pfedbbn", adapter="bbn", scores="post", **{"bbn.momentum": 0.5})
    state = of_clients(run.sent, "personal")[3]["client-01"]
    adapter = BBN(deepcopy(resnet8), BBNOptions(momentum=0.5))
    adapter.load_adapted_state(state)
    loaded, layer = adapter.adapted_state(), "layer3.0.bn2"
    for role, classes in (("running", ""), ("teacher", "teacher_")):
        mean, var = (state[f"{layer}.{classes}class_{kind}"].double().numpy() for kind in ("mean", "var"))
        balanced_mean = np.array([column.mean() for column in mean.T])
        balanced_var = np.array([v.mean() + ((m - m.mean()) ** 2).mean() for m, v in zip(mean.T, var.T, strict=True)])
        np.testing.assert_allclose(loaded[f"{layer}.{role}_mean"], balanced_mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(loaded[f"{layer}.{role}_var"], balanced_var, rtol=1e-5)
        assert np.abs(balanced_var / state[f"{layer}.{role}_var"].double().numpy() - 1).max() > 1e-3


def test_what_does_not_travel_is_weighed_as_if_it_did(run_local: Callable[..., Any]) -> None:
    """The statistics of a batch in the source model are those that TTA-bn uploads."""
    settings = {"strategy": "pfedbbn", "scores": "post", "pfedbbn.tau": "median"}
    with_statistics, without = run_local(**settings), run_local(adapter="source", **settings)
    assert torch.equal(weights_of(without), weights_of(with_statistics))
    assert without.summary["bytes"]["down"] == 0
    assert weights_of(without).diagonal(dim1=1, dim2=2).min() > 0.26
    sent = of_clients(without.replies, "updated")[1]["client-00"]
    assert list(sent) == [DESCRIPTOR]


def test_affine_parameters_alone_are_mixed_by_the_batches_statistics(run_local: Callable[..., Any]) -> None:
    run = run_local(strategy="pfedbbn", adapter="tent", scores="post", rounds=2)
    described = of_clients(run.replies, "updated")[1]
    sizes = [16, 16, 16, 32, 32, 32, 64, 64, 64]  # in the order of the network's modules
    lists = [
        [
            tuple(half.tolist() for half in layer.double().chunk(2))
            for layer in torch.split(state[DESCRIPTOR], [2 * size for size in sizes])
        ]
        for _, state in sorted(described.items())
    ]
    expected = weights_by_loops(distances_by_loops(lists), 1.0)  # type: ignore[arg-type]
    torch.testing.assert_close(weights_of(run)[0], torch.tensor(expected).double(), rtol=1e-4, atol=1e-6)
    assert set(described["client-00"]) > {"bn1.weight", DESCRIPTOR}
