"""Local objectives: values by plain loops, gradients of exactly zero where theory says so, state and rounds."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter, State
from fedtta_flwr.adaptation.bbn import BBN
from fedtta_flwr.adaptation.bn_stats import BNStats
from fedtta_flwr.adaptation.cotta import CoTTA
from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.norms import affine_parameters, batch_statistics
from fedtta_flwr.adaptation.note import NOTE
from fedtta_flwr.adaptation.objectives import (
    FedAMP,
    FedProx,
    Moon,
    Objectives,
    PFedGraph,
    PFedSD,
    contrast,
    cosine_distance,
    distillation,
    squared_distance,
)
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.adaptation.roid import ROID
from fedtta_flwr.adaptation.rotta import RoTTA
from fedtta_flwr.adaptation.sar import SAR
from fedtta_flwr.adaptation.tent import Tent
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import (
    BBNOptions,
    BNStatsOptions,
    CoTTAOptions,
    NoOptions,
    NOTEOptions,
    ROIDOptions,
    RoTTAOptions,
    SAROptions,
    TentOptions,
)
from fedtta_flwr.server import federation
from tests.adaptation.conftest import copied, same_bits
from tests.adaptation.oracle import by_batch, cross_entropy, leaves, network, softmax

F64 = torch.float64
ADAPTERS: dict[str, Callable[..., Adapter]] = {
    "tent": lambda model: Tent(model, TentOptions()),
    "tent-sgd": lambda model: Tent(model, TentOptions(optimizer="sgd")),
    "cotta": lambda model: CoTTA(model, CoTTAOptions(augmentations=2)),
    "rotta": lambda model: RoTTA(model, RoTTAOptions(update_every=6)),
    "roid": lambda model: ROID(model, ROIDOptions()),
    "bbn": lambda model: BBN(model, BBNOptions(entropy_threshold=2.0)),
}
every_adapter = pytest.mark.parametrize("make_adapter", ADAPTERS.values(), ids=ADAPTERS.keys())
proximal_term = pytest.mark.parametrize("term", [FedProx(10.0), FedAMP(10.0, 0.5), PFedGraph(10.0)], ids=repr)
any_term = pytest.mark.parametrize("term", [FedProx(10.0), FedAMP(10.0), PFedGraph(10.0), Moon(), PFedSD()], ids=repr)


def lists(seed: int, grad: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=F64).requires_grad_(grad) for shape in ((3, 2), (4,), ())]


def flat(tensors: list[Tensor]) -> list[float]:
    return [v for t in tensors for v in t.flatten().tolist()]


def test_distances() -> None:
    a, b = lists(1), lists(2)
    u, v = flat(a), flat(b)
    assert float(squared_distance(a, b)) == pytest.approx(sum((s - t) ** 2 for s, t in zip(u, v, strict=True)))
    dot = sum(s * t for s, t in zip(u, v, strict=True))
    norms = math.sqrt(sum(s * s for s in u)) * math.sqrt(sum(t * t for t in v))
    assert float(cosine_distance(a, b)) == pytest.approx(1 - dot / norms)


@pytest.mark.parametrize("distance", [squared_distance, cosine_distance])
def test_distances_have_the_gradients_of_their_formulas_and_exactly_none_at_equal_tensors(distance) -> None:
    current = lists(1, grad=True)
    for g in torch.autograd.grad(distance(current, [t.detach().clone() for t in current]), current):
        assert not g.any()
    assert torch.autograd.gradcheck(lambda *t: distance(list(t), lists(2)), current)


def test_contrast_and_distillation() -> None:
    z, a, r = (torch.randn(3, 4, generator=torch.Generator().manual_seed(s), dtype=F64) for s in range(3))
    total = 0.0
    for b in range(3):
        cosines = [float((z[b] * o[b]).sum() / (z[b].norm() * o[b].norm())) / 0.5 for o in (a, r)]
        total -= math.log(math.exp(cosines[0]) / (math.exp(cosines[0]) + math.exp(cosines[1])))
    assert float(contrast(z, a, r, 0.5)) == pytest.approx(total / 3)
    total = 0.0
    for b in range(3):
        p, q = softmax(a[b] / 2), softmax(z[b] / 2)
        total += 4 * float(cross_entropy(a[b] / 2, z[b] / 2) + (p * p.log()).sum())
        assert q.sum() == pytest.approx(1)
    assert float(distillation(z, a, 2.0)) == pytest.approx(total / 3)


@every_adapter
@proximal_term
def test_a_proximal_term_changes_nothing_with_one_step_a_round(make_adapter, term, tiny, images) -> None:
    plain, other = make_adapter(tiny()), make_adapter(tiny())
    Objectives(other, [term])
    for seed in range(3):
        x = images(6, seed=seed)
        assert torch.equal(plain.adapt(x), other.adapt(x))
        assert same_bits(plain.adapted_state(), other.adapted_state())
        mixture = {name: t * (0.99 if name.endswith("weight") else 1.0) for name, t in plain.adapted_state().items()}
        for adapter in (plain, other):
            adapter.load_adapted_state(mixture)


@every_adapter
@any_term
def test_a_term_acts_from_the_second_step_on(make_adapter, term, tiny, images) -> None:
    plain, other = make_adapter(tiny(F64)), make_adapter(tiny(F64))
    Objectives(other, [term])
    for seed in range(4):
        plain.adapt(images(6, seed=seed, dtype=F64))
        other.adapt(images(6, seed=seed, dtype=F64))
        if seed == 0:  # MOON needs a round in which the previous model is not the received one
            mixture = {name: t * 0.99 for name, t in other.adapted_state().items()}
            plain.load_adapted_state(mixture)
            other.load_adapted_state(mixture)
    assert other.rolled_back == 0
    assert not same_bits(plain.adapted_state(), other.adapted_state())


@pytest.mark.parametrize(
    "make_adapter",
    [
        lambda model: SAR(model, SAROptions(entropy_margin=1.0)),
        lambda model: RoTTA(model, RoTTAOptions(update_every=3)),
        lambda model: NOTE(model, NOTEOptions(update_every=3)),
    ],
    ids=["sar", "rotta", "note"],
)
@proximal_term
def test_a_term_acts_at_once_where_a_batch_has_more_than_one_gradient(make_adapter, term, tiny, images) -> None:
    """SAR's second one is beside the parameters; a memory that is due twice in a batch takes two steps."""
    plain, other = make_adapter(tiny(F64)), make_adapter(tiny(F64))
    Objectives(other, [term])
    plain.adapt(images(6, dtype=F64))
    other.adapt(images(6, dtype=F64))
    assert not same_bits(plain.adapted_state(), other.adapted_state())


def off(present: Tensor, received: Tensor) -> Tensor:
    return present - received


def turned(present: Tensor, received: Tensor) -> Tensor:
    """The gradient of 1 - cos."""
    cosine = present @ received / (present.norm() * received.norm())
    return (cosine * present / present.norm() - received / received.norm()) / present.norm()


@pytest.mark.parametrize(
    ("term", "size", "gradient"),
    [(FedProx(10.0), 10.0, off), (FedAMP(3.0, 0.25), 12.0, off), (PFedGraph(1e3), 1e3, turned)],
    ids=["fedprox", "fedamp", "pfedgraph"],
)
def test_the_second_step_is_pulled_back_by_the_size_of_the_term(term, size, gradient, tiny, images) -> None:
    """theta_2 - theta_2(without) = -rate * the term's gradient at theta_1; the first steps are the same."""
    plain, other = (Tent(tiny(F64), TentOptions(optimizer="sgd", learning_rate=0.05)) for _ in range(2))
    Objectives(other, [term])
    thetas = []
    for seed in range(3):
        thetas.append([torch.cat([t.flatten() for t in a.adapted_state().values()]) for a in (plain, other)])
        for adapter in (plain, other):
            adapter.adapt(images(6, seed=seed, dtype=F64))
    (received, _), (present, same), (without, pulled) = thetas
    assert torch.equal(present, same)
    expected = -0.05 * size * gradient(present, received)
    torch.testing.assert_close(pulled - without, expected, rtol=1e-6, atol=1e-12)
    assert expected.abs().max() > 1e-4


def test_fedprox_pulls_back(tiny, images) -> None:
    def distance(mu: float) -> float:
        adapter = Tent(tiny(), TentOptions(optimizer="sgd", learning_rate=0.05))
        Objectives(adapter, [FedProx(mu)])
        start = copied(adapter.adapted_state())
        for seed in range(8):
            adapter.adapt(images(6, seed=seed))
        return sum(float((t - start[n]).square().sum()) for n, t in adapter.adapted_state().items())

    assert distance(5.0) < 0.5 * distance(0.0)


def test_moon_and_pfedsd_see_the_received_and_the_previous_model(tiny, images) -> None:
    """One step of SGD on Tent's loss plus both terms, in float64 by autograd on the plain network."""
    adapter = Tent(tiny(F64), TentOptions(optimizer="sgd", learning_rate=0.1))
    Objectives(adapter, [Moon(2.0, 0.5), PFedSD(3.0, 2.0)])
    adapter.adapt(images(5, dtype=F64))
    previous = leaves(tiny(F64)) | {n: t.clone() for n, t in adapter.adapted_state().items()}
    received = {n: t * 0.9 for n, t in adapter.adapted_state().items()}
    momentum = adapter.local_state()["optimizer.momentum_buffer"].clone()
    adapter.load_adapted_state(received)

    params = leaves(tiny(F64)) | {n: t.clone().requires_grad_() for n, t in received.items()}
    x = images(5, seed=1, dtype=F64)

    def features(p: dict[str, Tensor]) -> Tensor:
        identity = {"head.weight": torch.eye(5, dtype=F64), "head.bias": torch.zeros(5, dtype=F64)}
        return network(p | identity, x, by_batch)

    logits = network(params, x, by_batch)
    loss = sum(cross_entropy(row, row) for row in logits) / 5
    loss = loss + 2.0 * contrast(features(params), features({**params, **received}), features(previous), 0.5)
    loss = loss + 3.0 * distillation(logits, network(previous, x, by_batch).detach(), 2.0)
    gradients = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [params[n] for n in received])])
    adapter.adapt(x)
    expected = torch.cat([t.flatten() for t in received.values()]) - 0.1 * (0.9 * momentum + gradients)
    found = torch.cat([t.flatten() for t in adapter.adapted_state().values()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@any_term
def test_saving_and_loading_in_mid_stream_continues_bit_for_bit(term, tiny, images) -> None:
    adapters = [ADAPTERS["tent"](tiny()) for _ in range(2)]
    for adapter in adapters:
        Objectives(adapter, [term])
    first, second = adapters
    for seed in range(2):
        first.adapt(images(6, seed=seed))
    second.adapt(images(3, seed=9))
    second.load_adapted_state(copied(first.adapted_state()))
    second.load_local_state(copied(first.local_state()))
    for seed in range(2, 4):
        assert torch.equal(first.adapt(images(6, seed=seed)), second.adapt(images(6, seed=seed)))
        assert same_bits(first.adapted_state(), second.adapted_state())
        assert same_bits(first.local_state(), second.local_state())


@any_term
def test_a_shared_adapter_serves_clients_round_by_round(term, tiny, images) -> None:
    """As a visit does it: the local state of the client first, then what it received."""
    shared, alone = ADAPTERS["tent"](tiny()), {c: ADAPTERS["tent"](tiny()) for c in range(2)}
    for adapter in (shared, *alone.values()):
        Objectives(adapter, [term])
    initial, local = copied(shared.adapted_state()), {0: {}, 1: {}}
    received = {0: initial, 1: initial}
    for t in range(3):
        for client, own in alone.items():
            shared.load_local_state(local[client])
            shared.load_adapted_state(received[client])
            own.load_adapted_state(received[client])
            for step in range(2):
                x = images(5, seed=100 * client + 10 * t + step)
                assert torch.equal(shared.adapt(x), own.adapt(x))
            local[client] = copied(shared.local_state())
            received[client] = {name: value * 0.98 for name, value in shared.adapted_state().items()}


def test_a_bad_batch_leaves_references_as_they_were(tiny, images) -> None:
    adapter = ADAPTERS["tent"](tiny())
    Objectives(adapter, [Moon(), PFedSD()])
    adapter.adapt(images(4))
    before = copied(adapter.local_state())
    adapter.adapt(images(4) * float("nan"))
    assert same_bits(before, adapter.local_state())
    assert adapter.rolled_back == 1


def test_an_adapter_without_steps_is_refused_in_one_line(tiny) -> None:
    with pytest.raises(ConfigError, match=r"FedProx.*BNStats") as caught:
        Objectives(BNStats(tiny(), BNStatsOptions()), [FedProx()])
    assert "\n" not in str(caught.value)


class ByTorch(Adapter):
    """An adapter of one's own that steps by torch's own optimiser."""

    def __init__(self, model: nn.Module, options: NoOptions) -> None:
        super().__init__(model, options)
        self.optimizer = self.make()

    def make(self) -> object:
        return torch.optim.SGD([p.requires_grad_(True) for p in self.affine.values()], lr=1e-3)

    def select(self) -> State:
        self.affine = affine_parameters(self.model, "affine")
        return dict(self.affine)

    @torch.inference_mode()
    def predict(self, x: Tensor) -> Tensor:
        with batch_statistics(self.model):
            return self.model(x)

    @torch.enable_grad()
    def step(self, x: Tensor) -> Tensor:
        with batch_statistics(self.model):
            logits = self.model(x)
        self.optimizer.zero_grad()
        entropy(logits).mean().backward()
        self.optimizer.step()
        return logits


class ByAnotherName(ByTorch):
    """It has what terms can be added to, but where nobody looks for it."""

    def make(self) -> object:
        self.opt = Optimizer(list(self.affine.values()), "sgd", learning_rate=1e-3)
        return None


class ByTwo(ByTorch):
    """It has one for each part."""

    def make(self) -> object:
        self.parts = {"all": super().make()}
        return None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ByTwo, r"^ByTwo\.parts holds a torch\.optim\.sgd\.SGD: .*adaptation\.optimizer\.Optimizer as self"),
        (ByTorch, r"^ByTorch\.optimizer is a torch\.optim\.sgd\.SGD: .*adaptation\.optimizer\.Optimizer as self"),
        (
            ByAnotherName,
            r"^ByAnotherName\.opt is a .*\.Optimizer: .*adaptation\.optimizer\.Optimizer as self\.optimizer;",
        ),
    ],
)
def test_an_optimizer_that_takes_no_terms_is_refused_before_the_run_by_strategies_that_have_some(
    kind, words, tiny, tiny_config, monkeypatch, tmp_path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Objectives(kind(tiny(), NoOptions()), [FedProx()])
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("FEDTTA_PLUGINS", kind.__module__.partition(".")[0])
    own = {"adapter": f"{kind.__module__}:{kind.__name__}", "output-dir": str(tmp_path / "run")}
    for strategy in ("fedamp", "pfedgraph", "fedprox", "moon", "pfedsd"):
        config = tiny_config(**own, strategy=strategy).to_flat()
        with pytest.raises(ConfigError, match=words), federation(config):
            pytest.fail("the run began")


def test_it_steps_with_strategies_that_have_none(run_local, monkeypatch) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", ByTorch.__module__.partition(".")[0])
    own = {"adapter": f"{ByTorch.__module__}:ByTorch", "scores": ""}
    for config in ({"strategy": "fedavg"}, {"strategy": "fedamp", "fedamp.weight": 0.0}):
        assert run_local(**own | config, rounds=1).lines()[0]["steps"] > 0
