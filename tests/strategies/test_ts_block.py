"""The TS-Block: its forward pass by plain loops, its gradient by differences, its training by another loop."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import approx_fprime
from torch import Tensor

from fedtta_flwr.options import FedTSAOptions
from fedtta_flwr.strategies import ts_block
from fedtta_flwr.strategies.ts_block import Attention, loss_and_attention, new_block, train_block, untrained_attention

Array = NDArray[np.float64]
SEED = st.integers(0, 10_000)
WITHOUT = FedTSAOptions(variant="wo-aug")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(n: int, t: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Two groups of clients, each around a direction of its own."""
    directions = torch.rand((2, d), generator=rng(seed), dtype=dtype)[torch.arange(n) % 2]
    return directions[:, None] + 0.3 * torch.rand((n, t, d), generator=rng(seed + 1), dtype=dtype)


def random_block(d: int, seed: int, over_time: bool = True) -> dict[str, Tensor]:
    generator = rng(seed)
    block = new_block(d, over_time=over_time)
    return {k: v.double() + 0.5 * torch.randn(v.shape, generator=generator).double() for k, v in block.items()}


# ---------------------------------------------------------------------------------------- the oracle: eqs. 9-18, loops


def softmax(scores: list[float]) -> Array:
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    return np.array([weight / math.fsum(weights) for weight in weights])


def attention_by_loops(x: Array, p: dict[str, Array], kind: str, keep: Any = None) -> tuple[Array, Array]:
    """A and A X for one matrix [M, D]: the rows attend to one another."""
    m, d = x.shape
    queries = [p[f"{kind}.query"].T @ row + p[f"{kind}.bias"] for row in x]
    # The bias of the keys, which the package does without.
    keys = [p[f"{kind}.key"].T @ row + p.get(f"{kind}.key-bias", 0.0) for row in x]
    a = np.zeros((m, m))
    for i in range(m):
        shown = [j for j in range(m) if keep is None or keep[i][j]]
        a[i, shown] = softmax([float(queries[i] @ keys[j]) / math.sqrt(d) for j in shown])
    return a, np.array([sum(a[i, j] * x[j] for j in range(m)) for i in range(m)])


def block_by_loops(x: Array, p: dict[str, Array], keep_slots: Any = None, keep_clients: Any = None) -> Any:
    """Return what each slot attends to [N, T, T], each client [T, N, N], and the outcome [N, T, D]."""
    n, t, _ = x.shape
    attended, temporal, spatial, out = x.copy(), np.array([np.eye(t)] * n), [], np.zeros_like(x)
    if "temporal.query" in p:
        for i in range(n):
            keep = None if keep_slots is None else keep_slots[i]
            temporal[i], attended[i] = attention_by_loops(x[i], p, "temporal", keep)
    for slot in range(t):
        a, out[:, slot] = attention_by_loops(attended[:, slot], p, "spatial", keep_clients)
        spatial.append(a)
    return temporal, np.array(spatial), out


def loss_by_loops(x: Array, p: dict[str, Array], weight: float, masks: Any) -> float:
    raw = block_by_loops(x, p)[2]
    loss = np.mean((x - raw) ** 2)
    if weight:
        loss += weight * np.mean((raw - block_by_loops(x, p, *masks)[2]) ** 2)
    return float(loss)


def arrays(block: dict[str, Tensor]) -> dict[str, Array]:
    return {name: t.detach().double().numpy() for name, t in block.items()}


class Recorded:
    """The masks that were drawn and from what, and the losses and attention of each step, as they really were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masks: list[list[Array]] = []
        self.drawn_from: list[Array] = []
        self.losses: list[float] = []
        self.attention: list[Attention] = []
        drawn: list[Array] = []
        for name in ("temporal_mask", "spatial_mask"):
            monkeypatch.setattr(ts_block, name, self._listening(getattr(ts_block, name), drawn, self.drawn_from))
        step = ts_block.loss_and_attention

        def listening(*arguments: Any) -> tuple[Tensor, Attention]:
            drawn.clear()
            loss, attention = step(*arguments)
            self.losses.append(loss.item())
            self.attention.append(attention)
            self.masks.append(list(drawn))
            return loss, attention

        monkeypatch.setattr(ts_block, "loss_and_attention", listening)

    @staticmethod
    def _listening(draw: Any, drawn: list[Array], drawn_from: list[Array]) -> Any:
        def listening(*arguments: Any) -> Tensor:
            keep = draw(*arguments)
            drawn.append(keep.numpy())
            drawn_from.extend(t.numpy() for t in arguments if isinstance(t, Tensor))
            return keep

        return listening


# ------------------------------------------------------------------------------------------------------- forward pass


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 5), t=st.integers(1, 4), d=st.integers(1, 6), seed=SEED, over_time=st.booleans())
def test_attention_and_loss_are_those_of_the_equations(n: int, t: int, d: int, seed: int, over_time: bool) -> None:
    x, block = features(n, t, d, seed), random_block(d, seed, over_time)
    loss, attention = loss_and_attention(block, x, WITHOUT, rng())
    p = arrays(block)
    for kind in {name.partition(".")[0] for name in p}:
        p[f"{kind}.key-bias"] = np.random.default_rng(seed).normal(size=d)
    temporal, spatial, _ = block_by_loops(x.numpy(), p)
    assert attention.temporal.numpy() == pytest.approx(temporal[:, -1], rel=1e-9, abs=1e-12)
    assert attention.spatial.numpy() == pytest.approx(spatial[-1], rel=1e-9, abs=1e-12)
    assert loss.item() == pytest.approx(loss_by_loops(x.numpy(), p, 0.0, None), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("masks", ["sampling", "bernoulli"])
@pytest.mark.parametrize("over_time", [True, False])
@pytest.mark.parametrize(("n", "t", "d"), [(1, 1, 2), (1, 4, 3), (5, 1, 3), (6, 4, 5)])
@pytest.mark.parametrize("at_once", [1, 3, 9])
def test_masked_cells_have_no_weight_in_the_second_term(
    monkeypatch, masks: Any, over_time: bool, n: int, t: int, d: int, at_once: int
) -> None:
    monkeypatch.setattr(ts_block, "CELLS", at_once * n**2)
    recorded = Recorded(monkeypatch)
    x, block = features(n, t, d), random_block(d, 1, over_time)
    options = FedTSAOptions(masks=masks, augmentation_weight=0.7)
    loss, attention = ts_block.loss_and_attention(block, x, options, rng())
    assert loss.item() == pytest.approx(
        loss_by_loops(x.numpy(), arrays(block), 0.7, recorded.masks[0]), rel=1e-9, abs=1e-14
    )
    plain = loss_and_attention(block, x, WITHOUT, rng())[1]  # the masks have no part in W
    torch.testing.assert_close(attention.spatial, plain.spatial, rtol=1e-12, atol=0)
    torch.testing.assert_close(attention.temporal, plain.temporal, rtol=1e-12, atol=0)


def test_masks_are_drawn_from_attention_without_masks_and_attended_features(monkeypatch) -> None:
    recorded = Recorded(monkeypatch)
    x, block = features(5, 3, 4), random_block(4, 1)
    ts_block.loss_and_attention(block, x, FedTSAOptions(), rng())
    over_time, attention, attended = recorded.drawn_from
    temporal, spatial, _ = block_by_loops(x.numpy(), arrays(block))
    assert over_time == pytest.approx(temporal, rel=1e-9)
    assert attention == pytest.approx(spatial[-1], rel=1e-9)
    last = [temporal[i, -1] @ x[i].numpy() for i in range(5)]
    assert attended == pytest.approx(np.array(last), rel=1e-9)


def test_a_bare_softmax_of_inner_products_is_where_training_begins() -> None:
    """One slot, lambda = 0, a new block: W = softmax(X X' / sqrt(D)) and R = W X."""
    x = features(5, 1, 7)
    block = {name: t.double() for name, t in new_block(7).items()}
    loss, attention = loss_and_attention(block, x, FedTSAOptions(augmentation_weight=0.0), rng())
    flat = x[:, 0].numpy()
    w = np.array([softmax([float(u @ v) / math.sqrt(7) for v in flat]) for u in flat])
    assert attention.spatial.numpy() == pytest.approx(w, rel=1e-12)
    assert loss.item() == pytest.approx(np.mean((flat - w @ flat) ** 2), rel=1e-12)
    assert untrained_attention(x).spatial.numpy() == pytest.approx(w, rel=1e-12)


@pytest.mark.parametrize("over_time", [True, False])
@pytest.mark.parametrize(("n", "t", "d"), [(1, 1, 1), (4, 1, 3), (3, 6, 4)])
def test_untrained_attention(n: int, t: int, d: int, over_time: bool) -> None:
    x = features(n, t, d, dtype=torch.float32)
    found = untrained_attention(x, over_time=over_time)
    temporal, spatial, _ = block_by_loops(x.double().numpy(), arrays(new_block(d, over_time=over_time)))
    assert found.spatial.dtype == torch.float64
    assert found.spatial.numpy() == pytest.approx(spatial[-1], rel=1e-12)
    assert found.temporal.numpy() == pytest.approx(temporal[:, -1], rel=1e-12)


# ------------------------------------------------------------------------------------------------ gradient and training


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_the_gradient_is_that_of_the_loss(monkeypatch, weight: float) -> None:
    """Finite differences of the loops, with the masks that were drawn; at the beginning and elsewhere."""
    x, recorded = features(4, 3, 3), Recorded(monkeypatch)
    for block in ({name: t.double() for name, t in new_block(3).items()}, random_block(3, 2)):
        leaves = {name: t.requires_grad_() for name, t in block.items()}
        loss, _ = ts_block.loss_and_attention(leaves, x, FedTSAOptions(augmentation_weight=weight), rng())
        gradients = torch.autograd.grad(loss, leaves.values())

        def at(values: Array, shapes: dict[str, Any] = leaves, masks: Any = recorded.masks[-1]) -> float:
            ends = np.cumsum([t.numel() for t in shapes.values()])[:-1]
            parts = zip(shapes.items(), np.split(values, ends), strict=True)
            return loss_by_loops(x.numpy(), {k: part.reshape(t.shape) for (k, t), part in parts}, weight, masks)

        start = torch.cat([t.detach().flatten() for t in leaves.values()]).numpy()
        found = torch.cat([g.flatten() for g in gradients]).numpy()
        assert found == pytest.approx(approx_fprime(start, at, 1e-6), rel=1e-3, abs=1e-6)
        assert np.abs(found).max() > 1e-4


def trained_plainly(x: Tensor, options: FedTSAOptions, masks: list[Any], over_time: bool = True) -> Any:
    """The same training in float64: eqs. 9-18 as they stand, gradients by autograd, Adam by hand."""
    n, t, d = x.shape
    x = x.double()
    block = {name: value.double().requires_grad_() for name, value in new_block(d, over_time=over_time).items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in block.items()}

    def attention(kind: str, rows: Tensor, keep: Any) -> Tensor:
        scores = (rows @ block[f"{kind}.query"] + block[f"{kind}.bias"]) @ (rows @ block[f"{kind}.key"]).T / d**0.5
        if keep is not None:
            scores = torch.where(torch.as_tensor(keep), scores, -torch.inf)
        return torch.softmax(scores, dim=1)

    def forward(keep_slots: Any, keep_clients: Any) -> tuple[Tensor, Tensor]:
        attended = x
        if over_time:
            keeps = [None] * n if keep_slots is None else keep_slots
            attended = torch.stack([attention("temporal", x[i], keeps[i]) @ x[i] for i in range(n)])
        each = [attention("spatial", attended[:, slot], keep_clients) for slot in range(t)]
        return torch.stack([each[slot] @ attended[:, slot] for slot in range(t)], dim=1), each[-1]

    losses, weights = [], []
    for step in range(options.steps):
        raw, w = forward(None, None)
        loss = ((x - raw) ** 2).mean()
        if options.augmentation_weight:
            loss = loss + options.augmentation_weight * ((raw - forward(*masks[step])[0]) ** 2).mean()
        losses.append(loss.item())
        weights.append(w.detach())
        gradients = torch.autograd.grad(loss, list(block.values()), allow_unused=True)
        with torch.no_grad():
            for (name, value), g in zip(block.items(), gradients, strict=True):
                m, v = moments[name]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                scale = math.sqrt(1 - 0.999 ** (step + 1))
                value -= options.learning_rate / (1 - 0.9 ** (step + 1)) * m / (v.sqrt() / scale + 1e-8)
    return losses, weights, block


@pytest.mark.parametrize("masks", ["sampling", "bernoulli"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("over_time", [True, False])
def test_training_is_that_of_another_loop(monkeypatch, masks: Any, weight: float, over_time: bool) -> None:
    x = features(6, 4, 5, dtype=torch.float32)
    recorded = Recorded(monkeypatch)
    options = FedTSAOptions(masks=masks, augmentation_weight=weight, steps=40, learning_rate=0.01)
    attention, block = train_block(new_block(5, over_time=over_time), x, options, rng())
    losses, weights, expected = trained_plainly(x, options, recorded.masks, over_time)
    assert recorded.losses == pytest.approx(losses, rel=1e-3)
    best = min(range(40), key=losses.__getitem__)
    assert attention.spatial.numpy() == pytest.approx(weights[best].numpy(), abs=1e-4)
    assert best > 20  # it did learn
    for name, t in block.items():
        # Adam makes full steps even where the gradient is all but rounding.
        torch.testing.assert_close(t.double(), expected[name].detach(), rtol=0, atol=5e-3)


def test_the_loss_falls(monkeypatch) -> None:
    recorded = Recorded(monkeypatch)
    train_block(new_block(16), features(8, 1, 16), FedTSAOptions(augmentation_weight=0.0, learning_rate=0.01), rng())
    assert all(after < before for before, after in zip(recorded.losses, recorded.losses[1:], strict=False))
    assert recorded.losses[-1] < 0.5 * recorded.losses[0]


def test_training_finds_the_groups() -> None:
    """What the method is for: clients take from their own group, more than before training."""
    x = features(8, 5, 32, dtype=torch.float32)
    same = (torch.arange(8)[:, None] - torch.arange(8)) % 2 == 0
    before, after = untrained_attention(x), train_block(new_block(32), x, FedTSAOptions(), rng())[0]
    within = [(a.spatial.double() * same).sum(dim=1).min().item() for a in (before, after)]
    assert within[0] < 0.8 < 0.9 < within[1]


# -------------------------------------------------------------------------------------------- which step is the best


def test_the_attention_of_the_lowest_loss_is_kept(monkeypatch) -> None:
    """Steps so long that the loss goes up and down."""
    recorded = Recorded(monkeypatch)
    options = FedTSAOptions(learning_rate=0.5, steps=60)
    attention, _ = train_block(new_block(6), features(6, 3, 6), options, rng())
    best = min(range(60), key=recorded.losses.__getitem__)
    assert 0 < best < 59
    assert torch.equal(attention.spatial, recorded.attention[best].spatial)
    assert torch.equal(attention.temporal, recorded.attention[best].temporal)
    others = [a.spatial for a in recorded.attention[best + 1 :]]
    assert not any(torch.equal(attention.spatial, other) for other in others)


def test_the_best_step_may_be_the_first(monkeypatch) -> None:
    """Steps so long that they only do harm."""
    recorded = Recorded(monkeypatch)
    x = 4 * features(6, 3, 6, dtype=torch.float32)
    attention, _ = train_block(new_block(6), x, FedTSAOptions(learning_rate=10.0, steps=20), rng())
    assert min(recorded.losses[1:]) > recorded.losses[0]
    torch.testing.assert_close(attention.spatial.double(), untrained_attention(x).spatial, rtol=1e-4, atol=1e-6)


def test_of_equal_steps_the_first_is_kept(monkeypatch) -> None:
    """Equal clients in equal slots: every attention gives X back, so that no step is better than another."""
    recorded = Recorded(monkeypatch)
    x = torch.full((4, 3, 4), 0.5)
    attention, block = train_block(new_block(4), x, FedTSAOptions(steps=5), rng())
    assert recorded.losses == [0.0] * 5
    assert attention.spatial is recorded.attention[0].spatial
    assert attention.spatial.tolist() == [[0.25] * 4] * 4
    assert all(torch.equal(t, new_block(4)[name]) for name, t in block.items())


def test_training_does_not_change_what_it_begins_from() -> None:
    x, block = features(4, 3, 5, dtype=torch.float32), new_block(5)
    before = x.clone()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, after = train_block(block, x, FedTSAOptions(steps=3), rng())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, before)
    assert all(torch.equal(t, new_block(5)[name]) for name, t in block.items())
    assert not any(t.requires_grad for t in (*block.values(), *after.values(), *first))
    second, _ = train_block(block, x, FedTSAOptions(steps=3), rng())
    assert torch.equal(first.spatial, second.spatial)


# ----------------------------------------------------------------------------------------------------------- extremes


def is_stochastic(w: Tensor) -> bool:
    return bool((w >= 0).all()) and w.sum(dim=1).tolist() == pytest.approx([1.0] * len(w), abs=1e-5)


@pytest.mark.parametrize("masks", ["sampling", "bernoulli"])
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e3, 1e17, 1e20, 1e30, 1e37])
def test_extreme_scales(monkeypatch, masks: Any, scale: float) -> None:
    recorded = Recorded(monkeypatch)
    x = (features(6, 4, 8) * scale).float()
    options = FedTSAOptions(masks=masks, steps=5)
    attention, block = train_block(new_block(8), x, options, rng())
    assert is_stochastic(attention.spatial)
    assert is_stochastic(attention.temporal)
    assert all(t.isfinite().all() for t in block.values())
    if scale >= 1e20:  # beyond float32's squares: as without training, which ends at once
        assert len(recorded.losses) == 1
        assert torch.equal(attention.spatial, untrained_attention(x).spatial)
        assert all(torch.equal(t, new_block(8)[name]) for name, t in block.items())


def test_a_block_that_is_no_longer_finite_is_given_up(monkeypatch) -> None:
    """A step beyond all numbers: the attention before it is kept, and the block from which it began."""
    recorded = Recorded(monkeypatch)
    x, block = features(4, 3, 5, dtype=torch.float32), new_block(5)
    attention, after = train_block(block, x, FedTSAOptions(learning_rate=1e39, steps=9), rng())
    assert len(recorded.losses) == 2
    assert math.isnan(recorded.losses[1])
    assert torch.equal(attention.spatial, recorded.attention[0].spatial)
    assert all(torch.equal(t, new_block(5)[name]) for name, t in after.items())


@pytest.mark.parametrize("masks", ["sampling", "bernoulli"])
@pytest.mark.parametrize("over_time", [True, False])
@pytest.mark.parametrize(("n", "t"), [(1, 1), (1, 5), (2, 1), (2, 2), (7, 1)])
@pytest.mark.parametrize("kind", ["any", "equal", "zero"])
def test_few_clients_and_slots(masks: Any, over_time: bool, n: int, t: int, kind: str) -> None:
    x = features(n, t, 4, dtype=torch.float32)
    x = {"any": x, "equal": x[:1, :1].expand_as(x), "zero": torch.zeros_like(x)}[kind]
    attention, block = train_block(new_block(4, over_time=over_time), x, FedTSAOptions(masks=masks, steps=4), rng())
    assert attention.spatial.shape == (n, n)
    assert attention.temporal.shape == (n, t)
    assert is_stochastic(attention.spatial)
    assert all(t.isfinite().all() for t in block.values())
    if kind != "any":
        torch.testing.assert_close(attention.spatial.double(), torch.full((n, n), 1 / n).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("variant", ["untrained", "wo-aug"])
def test_permuting_the_clients_permutes_the_weights(variant: str) -> None:
    """But for the masks, which are drawn for a client's place in the order of names."""
    x = features(6, 3, 5, dtype=torch.float32)
    order = torch.randperm(6, generator=rng(1))
    found = []
    for each in (x, x[order]):
        trained = train_block(new_block(5), each, FedTSAOptions(variant="wo-aug", steps=20), rng())[0]
        found.append((untrained_attention(each) if variant == "untrained" else trained).spatial)
    torch.testing.assert_close(found[1], found[0][order][:, order], rtol=1e-4, atol=1e-6)


def test_five_hundred_clients() -> None:
    x = features(500, 2, 16, dtype=torch.float32)
    assert is_stochastic(untrained_attention(x[:, -1:]).spatial)
    assert is_stochastic(train_block(new_block(16), x, FedTSAOptions(steps=2), rng())[0].spatial)
