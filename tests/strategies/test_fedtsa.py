"""FedTSA: what it remembers of whom, W from it, mixing over time, and real runs."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.build import build_stream, open_data
from fedtta_flwr.errors import FederationError
from fedtta_flwr.models.source import load_source
from fedtta_flwr.records import DESCRIPTOR, INFO, STATE, arrays_of
from fedtta_flwr.seeding import torch_rng
from fedtta_flwr.strategies.fedtsa import FedTSA, MemoryBank
from fedtta_flwr.strategies.rounds import Round
from fedtta_flwr.strategies.ts_block import new_block, train_block
from fedtta_flwr.strategies.updates import Update, Updates, stack_updates

D = 6
#: who is there in which round
PRESENT = ["abc", "ac", "abcd", "d", "", "bd", "abcd"]


def drawn(client: str, number: int) -> Tensor:
    return torch.rand(D, generator=torch.Generator().manual_seed(1000 * ord(client) + number))


def update(client: str, number: int) -> Update:
    """Statistics, a parameter and an indicator, all of them peculiar to client and round."""
    u = drawn(client, number)
    state = {"block/bn.running_mean": u[:2] + 1, "block/bn.running_var": u[2:4] + 0.1, "weight": u[:1].reshape(1, 1)}
    return Update(state, u, 5)


def updates_of(number: int, clients: str) -> Updates:
    return stack_updates(number, {client: update(client, number) for client in reversed(clients)}, ())


def run(strategy: FedTSA, first: int = 1, last: int = len(PRESENT)) -> list[Tensor]:
    """Let the strategy go through the rounds of PRESENT; return each W."""
    rounds = [(number, PRESENT[number - 1]) for number in range(first, last + 1)]
    return [strategy.collaboration_matrix(updates_of(number, clients)) for number, clients in rounds if clients]


def window_by_hand(client: str, number: int, slots: int) -> list[Tensor]:
    """For each slot what the client sent last by then, or, before its first round, what it sent first."""
    attended = [r for r in range(1, number + 1) if client in PRESENT[r - 1]]
    wanted = range(max(1, number - slots + 1), number + 1)
    last_by_then = [max([r for r in attended if r <= slot], default=attended[0]) for slot in wanted]
    return [drawn(client, r) for r in last_by_then]


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def untrained_by_hand(windows: list[list[Tensor]]) -> tuple[list[list[float]], list[list[float]]]:
    """TS-sim: what each client's last slot attends to, and W."""

    def attention(query: Any, keys: Any) -> list[float]:
        return softmax([float(query @ key) / math.sqrt(D) for key in keys])

    x = [np.array([u.double().numpy() for u in window]) for window in windows]
    over_time = [attention(rows[-1], rows) for rows in x]
    attended = [np.array(a) @ rows for a, rows in zip(over_time, x, strict=True)]
    return over_time, [attention(u, attended) for u in attended]


# ------------------------------------------------------------------------------------------------------------- memory


@settings(max_examples=60, deadline=None)
@given(
    attendance=st.lists(st.sets(st.sampled_from("abc")), min_size=1, max_size=12),
    slots=st.integers(1, 6),
)
def test_a_slot_holds_what_was_sent_last_by_then(attendance: list[set[str]], slots: int) -> None:
    bank = MemoryBank(slots)
    sent: dict[str, dict[int, float]] = {"a": {}, "b": {}, "c": {}}
    for number, clients in enumerate(attendance, start=1):
        names = sorted(clients)
        values = torch.tensor([[100.0 * ord(client) + number] for client in names])
        bank.add(number, names, {"u": values, "other": -values})
        for client, value in zip(names, values, strict=True):
            sent[client][number] = value.item()
        known = [client for client in "abc" if sent[client]]
        if not known:
            continue
        expected = [
            [
                sent[client][max([r for r in sent[client] if r <= slot], default=min(sent[client]))]
                for slot in range(max(1, number - slots + 1), number + 1)
            ]
            for client in known
        ]
        window = bank.window(number, known, "u")
        assert window.shape == (len(known), min(number, slots), 1)
        assert window.squeeze(2).tolist() == expected
        assert torch.equal(bank.window(number, known, "other"), -window)
    assert all(len(t) <= slots for t in bank.memory().values())


def test_a_round_that_is_repeated_is_remembered_once() -> None:
    """As after a restart from a checkpoint that is older than what was remembered."""
    bank = MemoryBank(3)
    for number, value in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0)]:
        bank.add(number, "a", {"u": torch.tensor([value])})
    assert bank.window(3, "a", "u").tolist() == [[1.0, 20.0, 30.0]]
    bank.add(9, "a", {"u": torch.tensor([9.0])})
    assert bank.window(9, "a", "u").tolist() == [[30.0, 30.0, 9.0]]


def test_what_was_sent_is_copied() -> None:
    bank, sent = MemoryBank(2), torch.tensor([1.0])
    bank.add(1, "a", {"u": sent})
    sent += 1
    assert bank.window(1, "a", "u").tolist() == [[1.0]]


@pytest.mark.parametrize("variant", ["s-sim", "ts-sim", "both", "wo-time"])
@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_new_instance_goes_on_from_the_memory(tiny_config, variant: str, after: int) -> None:
    trained = {"fedtsa.warm-start": variant in ("both", "wo-time"), "fedtsa.mix-time": variant in ("both", "ts-sim")}
    config = tiny_config(**{"fedtsa.variant": variant, "fedtsa.slots": 3, "fedtsa.steps": 4} | trained)
    whole = FedTSA(config)
    expected = run(whole)
    first, second = FedTSA(config), FedTSA(config)
    begun = run(first, last=after)
    memory = first.memory()
    assert all(isinstance(t, Tensor) and not t.requires_grad for t in memory.values())
    second.load_memory({name: t.clone() for name, t in memory.items()})
    found = begun + run(second, first=after + 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert whole.memory().keys() == second.memory().keys()
    assert all(torch.equal(t, second.memory()[name]) for name, t in whole.memory().items())


@pytest.mark.parametrize("mix_time", [False, True])
def test_statistics_are_remembered_only_where_they_are_needed(tiny_config, mix_time: bool) -> None:
    strategy = FedTSA(tiny_config(**{"fedtsa.mix-time": mix_time, "fedtsa.steps": 1}))
    run(strategy, last=1)
    names = ["round", "indicator"] + ["block/bn.running_mean", "block/bn.running_var"] * mix_time
    assert set(strategy.memory()) == {f"bank/{client}/{name}" for client in "abc" for name in names}


# ------------------------------------------------------------------------------------------------------------------ W


@pytest.mark.parametrize("slots", [1, 3, 10])
@pytest.mark.parametrize("variant", ["s-sim", "ts-sim"])
def test_untrained_weights_by_hand(tiny_config, variant: str, slots: int) -> None:
    found = run(FedTSA(tiny_config(**{"fedtsa.variant": variant, "fedtsa.slots": slots})))
    rounds = [number for number, clients in enumerate(PRESENT, start=1) if clients]
    for number, weights in zip(rounds, found, strict=True):
        back = 1 if variant == "s-sim" else slots
        windows = [window_by_hand(client, number, back) for client in sorted(PRESENT[number - 1])]
        expected = torch.tensor(untrained_by_hand(windows)[1], dtype=torch.float64)
        assert weights.dtype == torch.float64
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("variant", ["both", "wo-time", "wo-aug"])
def test_trained_weights_are_those_of_the_block_on_the_last_slots(tiny_config, variant: str) -> None:
    overrides = {"fedtsa.variant": variant, "fedtsa.slots": 3, "fedtsa.steps": 5, "fedtsa.learning-rate": 0.01}
    config = tiny_config(**overrides)
    found = run(FedTSA(config))[-1]
    x = torch.stack([torch.stack(window_by_hand(client, 7, 3)) for client in "abcd"])
    generator = torch_rng(config.seed, 7, "fedtsa", "masks")
    expected, _ = train_block(new_block(D, over_time=variant != "wo-time"), x, config.fedtsa, generator)
    assert torch.equal(found, expected.spatial.double())
    assert found.sum(dim=1).tolist() == pytest.approx([1.0] * 4, abs=1e-6)


def test_variants_differ(tiny_config) -> None:
    overrides = {"fedtsa.slots": 3, "fedtsa.steps": 5, "fedtsa.learning-rate": 0.01}
    configs = [overrides | {"fedtsa.variant": v} for v in ("both", "s-sim", "ts-sim", "wo-time", "wo-aug")]
    configs += [overrides | {"fedtsa.masks": "bernoulli"}, overrides | {"fedtsa.augmentation-weight": 0.1}]
    found = [run(FedTSA(tiny_config(**config)))[-1] for config in configs]
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    # without weight there is nothing to augment
    zero = run(FedTSA(tiny_config(**overrides | {"fedtsa.augmentation-weight": 0.0})))[-1]
    assert torch.equal(zero, found[4])


def test_masks_depend_on_seed_and_round_alone(tiny_config) -> None:
    """All that differs is the seed, or the round, in which the same clients send the same."""

    def weights(number: int = 3, **overrides: Any) -> Tensor:
        strategy = FedTSA(tiny_config(**{"fedtsa.steps": 30, "fedtsa.learning-rate": 0.01} | overrides))
        updates = stack_updates(number, {client: update(client, 1) for client in "abcde"}, ())
        return strategy.collaboration_matrix(updates)

    torch.manual_seed(1)
    first = weights()
    torch.manual_seed(2)
    assert torch.equal(weights(), first)
    assert not torch.equal(weights(seed=1), first)
    assert not torch.equal(weights(number=4, **{"fedtsa.slots": 3}), weights(number=3, **{"fedtsa.slots": 3}))


def test_training_goes_on_with_a_warm_start(tiny_config) -> None:
    overrides = {"fedtsa.slots": 3, "fedtsa.steps": 4, "fedtsa.learning-rate": 0.01}
    cold, warm = (FedTSA(tiny_config(**overrides, **{"fedtsa.warm-start": on})) for on in (False, True))
    first, second = run(cold, last=2), run(warm, last=2)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert {name for name in warm.memory() if "block" in name} == {f"block/{name}" for name in new_block(D)}
    assert not any("block" in name for name in cold.memory())
    x = [torch.stack([torch.stack(window_by_hand(c, t, 3)) for c in sorted(PRESENT[t - 1])]) for t in (1, 2)]
    block = new_block(D)
    for number in (1, 2):
        generator = torch_rng(warm.config.seed, number, "fedtsa", "masks")
        attention, block = train_block(block, x[number - 1], warm.options, generator)
    assert torch.equal(second[1], attention.spatial.double())


def test_one_client_keeps_its_own_and_equal_ones_are_averaged(tiny_config) -> None:
    strategy = FedTSA(tiny_config(**{"fedtsa.steps": 3}))
    for number in range(1, 4):
        updates = stack_updates(number, {"a": update("a", number)}, ())
        assert strategy.collaboration_matrix(updates).tolist() == [[1.0]]
    for n in (2, 20):
        strategy = FedTSA(tiny_config(**{"fedtsa.steps": 3}))
        for number in range(1, 4):
            updates = stack_updates(number, {f"{i:02d}": update("a", number) for i in range(n)}, ())
            weights = strategy.collaboration_matrix(updates)
            torch.testing.assert_close(weights, torch.full((n, n), 1 / n, dtype=torch.float64), rtol=1e-5, atol=0)


def test_missing_descriptors_are_one_line(tiny_config) -> None:
    updates = stack_updates(3, {"a": Update({"t": torch.zeros(1)}, None, 5)}, ())
    with pytest.raises(FederationError, match=r"round 3: .*feature-mean") as caught:
        FedTSA(tiny_config()).collaboration_matrix(updates)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- mixing in time


def personal(strategy: FedTSA, number: int, clients: str) -> dict[str, Tensor]:
    strategy._round = Round(number)
    return strategy.personalize(updates_of(number, clients))


@pytest.mark.parametrize("pooling", ["linear", "moments"])
@pytest.mark.parametrize("slots", [1, 3, 10])
def test_statistics_are_mixed_over_time_then_over_clients(tiny_config, pooling: str, slots: int) -> None:
    overrides = {"fedtsa.variant": "ts-sim", "fedtsa.slots": slots, "fedtsa.mix-time": True, "bn-pooling": pooling}
    strategy = FedTSA(tiny_config(**overrides))
    for number, clients in enumerate(PRESENT, start=1):
        if not clients:
            continue
        found, names = personal(strategy, number, clients), sorted(clients)
        windows = [window_by_hand(client, number, slots) for client in names]
        over_time, w = untrained_by_hand(windows)
        for i in range(len(names)):
            each = zip(w[i], over_time, windows, strict=True)
            shares = [(w_ij * a, u) for w_ij, row, sent in each for a, u in zip(row, sent, strict=True)]
            assert math.fsum(share for share, _ in shares) == pytest.approx(1)
            for c in range(2):
                mean = math.fsum(share * (u[c].item() + 1) for share, u in shares)
                var = math.fsum(
                    share * (u[2 + c].item() + 0.1 + (pooling == "moments") * (u[c].item() + 1 - mean) ** 2)
                    for share, u in shares
                )
                assert found["block/bn.running_mean"][i, c].item() == pytest.approx(mean, rel=1e-5)
                assert found["block/bn.running_var"][i, c].item() == pytest.approx(var, rel=1e-5)
            # a parameter is of this round alone
            own = math.fsum(w[i][j] * drawn(name, number)[0].item() for j, name in enumerate(names))
            assert found["weight"][i].item() == pytest.approx(own, rel=1e-5)
        assert strategy._round.weights is not None
        torch.testing.assert_close(strategy._round.weights, torch.tensor(w, dtype=torch.float64), rtol=1e-12, atol=0)


def test_mixing_over_time_needs_no_statistics(tiny_config) -> None:
    """Nothing at all may travel, as with the adapter `source`."""
    strategy = FedTSA(tiny_config(**{"fedtsa.mix-time": True, "fedtsa.steps": 2}))
    strategy._round = Round(1)
    sent = {client: Update({}, drawn(client, 1), 5) for client in "abc"}
    assert strategy.personalize(stack_updates(1, sent, ())) == {}


def test_without_it_statistics_are_mixed_as_all_else(tiny_config) -> None:
    strategy = FedTSA(tiny_config(**{"fedtsa.variant": "ts-sim"}))
    personal(strategy, 1, "abc")
    found = personal(strategy, 2, "ac")
    weights = strategy._round.weights
    assert weights is not None
    for name, t in updates_of(2, "ac").state.items():
        expected = torch.einsum("ij,j...->i...", weights, t.double())
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=0)


# ---------------------------------------------------------------------------------------------------------- real runs


def weights_of(run: Any) -> Any:
    with np.load(run.path / "collaboration.npz") as arrays:
        return arrays["weights"]


def descriptors_of(run: Any) -> dict[tuple[int, str], Tensor]:
    """(round, client) -> what it sent."""
    found = {}
    for reply in run.replies:
        if INFO in reply.content.config_records and DESCRIPTOR in reply.content.array_records:
            info = reply.content.config_records[INFO]
            for client, t in zip(info["updated"], arrays_of(reply.content, DESCRIPTOR)[DESCRIPTOR], strict=True):
                found[info["round"], client] = t
    return found


def features_of(config: RunConfig, every: int = 1) -> dict[tuple[int, str], Tensor]:
    """The source model's mean features on the last batch of each round, asked for one image at a time."""
    data = open_data(config)
    model = load_source(config, data.classes).eval()
    found = {}
    for client in config.client_names():
        stream = build_stream(config, client, data, {})
        for slot in range(every - 1, len(stream), every):
            x, _ = stream.batch(slot)
            with torch.no_grad():
                each = [model.embed(model.normalize(image[None]))[0].double() for image in x]
            found[1 + slot // every, client] = torch.stack(each).mean(dim=0)
    return found


@pytest.fixture(scope="module")
def runs(run_local) -> dict[str, Any]:
    return {
        name: run_local(adapter=name, strategy="fedtsa", **{"fedtsa.slots": 3, "fedtsa.steps": 5})
        for name in ("bn-stats", "entropy", "source")
    }


def test_indicators_are_the_source_models_features(runs, tiny_config) -> None:
    """Whatever the clients adapt, and whatever they have received."""
    expected = features_of(tiny_config())
    assert len(expected) == 4 * 4
    for run in runs.values():
        found = descriptors_of(run)
        assert found.keys() == expected.keys()
        for key, t in found.items():
            torch.testing.assert_close(t.double(), expected[key], rtol=1e-4, atol=1e-5)


def test_with_several_slots_a_round_the_last_one_is_described(run_local, tiny_config) -> None:
    run = run_local(strategy="fedtsa", **{"aggregate-every": 2, "fedtsa.variant": "s-sim"})
    expected = features_of(tiny_config(), every=2)
    found = descriptors_of(run)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(t.double(), expected[key], rtol=1e-4, atol=1e-5) for key, t in found.items())


def test_the_weights_depend_on_the_batches_alone(runs) -> None:
    """Not on what is done to them: the same for every adapter, bit for bit, and row-stochastic."""
    weights = {name: weights_of(run) for name, run in runs.items()}
    assert weights["bn-stats"].shape == (4, 4, 4)
    assert weights["bn-stats"].sum(axis=2) == pytest.approx(1, abs=1e-5)
    assert (weights["bn-stats"] == weights["entropy"]).all()
    assert (weights["bn-stats"] == weights["source"]).all()
    assert len({w.tobytes() for w in weights["bn-stats"]}) == 4  # new ones every round


def test_what_is_sent_back_is_the_mixture(runs) -> None:
    run = runs["entropy"]
    weights, sent = weights_of(run), {}
    for reply in run.replies:
        if INFO in reply.content.config_records and STATE in reply.content.array_records:
            info = reply.content.config_records[INFO]
            for i, client in enumerate(info["updated"]):
                sent[info["round"], client] = {k: t[i] for k, t in arrays_of(reply.content, STATE).items()}
    checked = 0
    for message in run.sent:
        info = message.content.config_records.get(INFO, {})
        for i, client in zip(info.get("places", []), info.get("personal", []), strict=True):
            row = weights[info["round"] - 2, int(client[-1])]
            for name, t in arrays_of(message.content, STATE).items():
                parts = [w * sent[info["round"] - 1, f"client-{j:02d}"][name].double() for j, w in enumerate(row)]
                torch.testing.assert_close(t[i].double(), sum(parts), rtol=1e-4, atol=1e-6)
                checked += 1
    assert checked > 4 * 4 * 10


def test_nothing_travels_but_indicators_without_adaptation(runs) -> None:
    assert not any(arrays_of(reply.content, STATE) for reply in runs["source"].replies)
    assert runs["source"].summary["accuracy"]["post"] == runs["source"].summary["accuracy"]["source"]


def test_a_single_client_is_alone(run_local) -> None:
    """Nobody to collaborate with: what it receives is its own, so that `post` is `tta` of batch statistics."""
    run = run_local(nodes=1, strategy="fedtsa", **{"num-clients": 1, "spatial-heterogeneity": 1.0, "fedtsa.steps": 2})
    assert (weights_of(run) == 1).all()
    assert run.summary["accuracy"]["post"] == run.summary["accuracy"]["local"]
