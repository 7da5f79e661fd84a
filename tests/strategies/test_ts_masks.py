"""The masks of FedTSA's augmentation: what they must hold always, and the probabilities with which they are drawn."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from fedtta_flwr.strategies.ts_masks import draw, similarity_graph, spatial_mask, temporal_mask

SEED = st.integers(0, 10_000)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attention(*shape: int, seed: int, sharpness: float = 1.0) -> Tensor:
    return torch.softmax(sharpness * torch.randn(shape, generator=rng(seed)), dim=-1)


def one_after_the_other(chances: list[float], count: int) -> dict[frozenset[int], float]:
    """The probability of each set of cells, drawn without replacement: all orders, one by one."""
    found: dict[frozenset[int], float] = Counter()
    for order in itertools.permutations([i for i, chance in enumerate(chances) if chance > 0], count):
        probability, left = 1.0, math.fsum(chances)
        for i in order:
            probability *= chances[i] / left
            left -= chances[i]
        found[frozenset(order)] += probability
    return found


def fits(seen: Counter[frozenset[int]], expected: dict[frozenset[int], float]) -> bool:
    """Whether counts come from a distribution (chi-square, 1 in 1000 would be refused by chance)."""
    assert seen.keys() <= {cells for cells, p in expected.items() if p > 0}
    total = sum(seen.values())
    cells = list(expected)
    observed, wanted = [seen[c] for c in cells], [expected[c] * total for c in cells]
    return chisquare(observed, wanted).pvalue > 1e-3


def cells_of(mask: Tensor) -> frozenset[int]:
    return frozenset(mask.flatten().nonzero().flatten().tolist())


# ------------------------------------------------------------------------------------------------------------ drawing


@pytest.mark.parametrize("count", [1, 2, 3])
def test_cells_are_drawn_one_after_the_other_without_replacement(count: int) -> None:
    chances = [0.5, 0.05, 0.0, 1.5, 0.2]
    drawn = draw(torch.tensor(chances).expand(20_000, -1), count, rng(count))
    assert fits(Counter(map(cells_of, drawn)), one_after_the_other(chances, count))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 5), cells=st.integers(1, 30), share=st.floats(0, 1), zeros=st.floats(0, 1), seed=SEED)
def test_as_many_are_drawn_as_have_a_chance(rows: int, cells: int, share: float, zeros: float, seed: int) -> None:
    chances = torch.rand((rows, cells), generator=rng(seed))
    chances *= torch.rand((rows, cells), generator=rng(seed + 1)) >= zeros
    count = int(share * cells)
    before = chances.clone()
    drawn = draw(chances, count, rng(seed))
    assert torch.equal(chances, before)
    assert not (drawn & (chances == 0)).any()
    assert drawn.sum(dim=1).tolist() == [min(count, int((row > 0).sum())) for row in chances]


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e30])
def test_chances_are_proportions(scale: float) -> None:
    chances = [1.0, 3.0, 6.0]
    drawn = draw((torch.tensor(chances) * scale).expand(5000, -1), 1, rng(0))
    assert fits(Counter(map(cells_of, drawn)), one_after_the_other(chances, 1))


def test_the_generator_alone_decides() -> None:
    chances = torch.ones(100)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(chances, 50, rng(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, draw(chances, 50, rng(3)))
    assert not torch.equal(first, draw(chances, 50, rng(4)))


# --------------------------------------------------------------------------------------------------------- over time


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 4), t=st.integers(1, 8), seed=SEED, sharpness=st.sampled_from([0.0, 1.0, 100.0]))
def test_three_quarters_of_a_clients_cells_are_masked_but_never_the_diagonal(
    n: int, t: int, seed: int, sharpness: float
) -> None:
    a = attention(n, t, t, seed=seed, sharpness=sharpness)
    keep = temporal_mask("sampling", a, rng(seed))
    assert keep.shape == (n, t, t)
    assert keep.dtype == torch.bool
    assert keep.diagonal(dim1=1, dim2=2).all()
    for client in range(n):
        masked, possible = int((~keep[client]).sum()), int((a[client] < 1).sum())
        count = min(int(0.75 * t * t), possible)
        assert count - t <= masked <= count  # what was drawn on the diagonal is kept all the same
        assert not (~keep[client] & (a[client] == 1)).any()


def test_little_attention_is_masked_more_often() -> None:
    """Patterns of 2 x 2 cells against the probabilities of all orders; the other client has other ones."""
    a = torch.tensor([[[0.9, 0.1], [0.3, 0.7]], [[0.5, 0.5], [0.05, 0.95]]])
    keep = temporal_mask("sampling", a.repeat(5000, 1, 1), rng(0)).view(5000, 2, 2, 2)
    for client in range(2):
        expected: dict[frozenset[int], float] = Counter()
        for masked, probability in one_after_the_other((1 - a[client]).flatten().tolist(), 3).items():
            expected[frozenset(range(4)) - masked | {0, 3}] += probability
        assert fits(Counter(map(cells_of, keep[:, client])), expected)


@pytest.mark.parametrize("masks", ["sampling", "bernoulli"])
def test_a_single_slot_is_kept(masks: str) -> None:
    assert temporal_mask(masks, torch.ones(3, 1, 1), rng(0)).all()  # type: ignore[arg-type]


def test_attention_to_itself_alone_leaves_nothing_to_draw_on_the_diagonal() -> None:
    keep = temporal_mask("sampling", torch.eye(4).expand(3, -1, -1), rng(0))
    assert (~keep).sum(dim=(1, 2)).tolist() == [12] * 3  # int(0.75 * 16), all of them off the diagonal


# -------------------------------------------------------------------------------------------------------- over clients


def features_in(groups: list[int], seed: int = 0) -> Tensor:
    """Clients of one group point the same way but for a little."""
    directions = torch.eye(8)[groups]
    return directions + 0.01 * torch.rand(directions.shape, generator=rng(seed))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 12), seed=SEED, sharpness=st.sampled_from([0.0, 1.0, 100.0]))
def test_four_fifths_of_the_edges_go_and_a_fifth_of_the_others_comes(n: int, seed: int, sharpness: float) -> None:
    a = attention(n, n, seed=seed, sharpness=sharpness)
    features = torch.rand((n, 6), generator=rng(seed))
    own = torch.eye(n, dtype=torch.bool)
    edges = similarity_graph(features) & ~own
    others = ~edges & ~own
    keep = spatial_mask("sampling", a, features, rng(seed))
    assert keep.dtype == torch.bool
    assert keep.diagonal().all()
    dropped, added = edges & ~keep, others & keep
    assert int(dropped.sum()) == min(int(0.8 * int(edges.sum())), int((edges & (a < 1)).sum()))
    assert int(added.sum()) == min(int(0.2 * int(others.sum())), int((others & (a > 0)).sum()))
    assert not (dropped & (a == 1)).any()
    assert not (added & (a == 0)).any()


def test_edges_with_little_attention_go_and_pairs_with_much_come() -> None:
    """All patterns that two groups of two can have: 3 of 4 edges dropped, 1 of 8 added."""
    features = features_in([0, 0, 1, 1])
    a = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.3, 0.4, 0.0, 0.3], [0.1, 0.6, 0.2, 0.1], [0.2, 0.05, 0.7, 0.05]])
    edges, others = [1, 4, 11, 14], [2, 3, 6, 7, 8, 9, 12, 13]
    cells = a.flatten().tolist()
    dropped = one_after_the_other([1 - cells[c] for c in edges], 3)
    added = one_after_the_other([cells[c] for c in others], 1)
    expected = {
        frozenset({0, 5, 10, 15, *(edges[i] for i in range(4) if i not in d), *(others[i] for i in plus)}): p * q
        for d, p in dropped.items()
        for plus, q in added.items()
    }
    generator = rng(0)
    seen = Counter(cells_of(spatial_mask("sampling", a, features, generator)) for _ in range(4000))
    assert fits(seen, expected)


def test_the_mask_is_directed() -> None:
    keep = spatial_mask("sampling", attention(8, 8, seed=0), features_in([0, 1] * 4), rng(0))
    assert not torch.equal(keep, keep.T)


def test_no_edge_no_chance_no_other_client() -> None:
    equal = torch.ones(5, 3)
    own = torch.eye(5, dtype=torch.bool)
    keep = spatial_mask("sampling", torch.full((5, 5), 0.2), equal, rng(0))  # E = 0: 4 of 20 pairs are added
    assert int((keep & ~own).sum()) == 4
    # The other way round cannot be: not all pairs are above their mean. But none of them may have a chance.
    keep = spatial_mask("sampling", torch.eye(5), equal, rng(0))
    assert torch.equal(keep, own)
    assert spatial_mask("sampling", torch.ones(1, 1), torch.ones(1, 3), rng(0)).tolist() == [[True]]


@pytest.mark.parametrize("over_time", [True, False])
def test_bernoulli_keeps_a_cell_with_the_probability_of_its_attention(over_time: bool) -> None:
    a = torch.tensor([[0.5, 0.2, 0.3], [0.0, 0.9, 0.1], [1.0, 0.0, 0.0]])
    generator, n = rng(0), 4000
    if over_time:
        keep = temporal_mask("bernoulli", a.expand(n, -1, -1), generator)
    else:
        features = features_in([0, 0, 1])
        keep = torch.stack([spatial_mask("bernoulli", a, features, generator) for _ in range(n)])
    kept = keep.double().mean(dim=0)
    edge = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    for i, j in itertools.product(range(3), repeat=2):
        p = a[i, j].item()
        # the paper's two cases, of which the first is spatial alone: dropped with 1 - a, added with a
        expected = 1.0 if i == j else 1 - (1 - p) if edge[i, j] else p
        assert kept[i, j].item() == pytest.approx(expected, abs=5 * math.sqrt(0.25 / n) * (0 < expected < 1))


@pytest.mark.parametrize("masks", ["sampling", "bernoulli"])
def test_attention_that_is_not_a_number_does_not_end_the_run(masks: str) -> None:
    nan = torch.full((3, 4, 4), torch.nan)
    assert temporal_mask(masks, nan, rng(0)).diagonal(dim1=1, dim2=2).all()  # type: ignore[arg-type]
    assert spatial_mask(masks, nan[0], nan[0], rng(0)).diagonal().all()  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- the graph


def graph_by_loops(features: list[list[float]]) -> list[list[bool]]:
    n = len(features)
    cosine = [[0.0] * n for _ in range(n)]
    for i, j in itertools.product(range(n), repeat=2):
        u, v = features[i], features[j]
        norms = math.sqrt(math.fsum(a * a for a in u)) * math.sqrt(math.fsum(b * b for b in v))
        cosine[i][j] = math.fsum(a * b for a, b in zip(u, v, strict=True)) / norms if norms else 0.0
    mean = math.fsum(itertools.chain(*cosine)) / n**2
    return [[c > mean for c in row] for row in cosine]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 9), d=st.integers(2, 12), seed=SEED, scale=st.sampled_from([1e-37, 1e-3, 1.0, 1e37]))
def test_an_edge_is_a_cosine_above_the_mean(n: int, d: int, seed: int, scale: float) -> None:
    features = torch.rand((n, d), generator=rng(seed)) * scale
    assert similarity_graph(features).tolist() == graph_by_loops(features.double().tolist())


def test_two_groups_are_found() -> None:
    group = torch.tensor([0, 1, 0, 1, 1])
    assert torch.equal(similarity_graph(features_in(group.tolist())), group[:, None] == group)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20, 333])
@pytest.mark.parametrize("d", [1, 3, 64])
@pytest.mark.parametrize("differ", ["not", "by rounding", "in scale"])
def test_equal_clients_are_not_alike_by_rounding(n: int, d: int, differ: str) -> None:
    features = torch.rand((1, d), generator=rng(n)).add(0.1).expand(n, -1)
    if differ == "by rounding":
        features = features * (1 + 1e-7 * torch.randn((n, d), generator=rng(0)))
    elif differ == "in scale":
        features = features * torch.rand((n, 1), generator=rng(0)).add(0.01)
    assert not similarity_graph(features).any()


def test_clients_that_differ_a_little_are_told_apart() -> None:
    base = torch.ones(4, 16)
    base[:2, 0] += 1e-4
    group = torch.tensor([0, 0, 1, 1])
    assert torch.equal(similarity_graph(base), group[:, None] == group)


def test_zero_is_like_nothing() -> None:
    assert not similarity_graph(torch.zeros(4, 3)).any()
    graph = similarity_graph(torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.1]]))
    assert graph.tolist() == [[False] * 3, [False, True, True], [False, True, True]]
