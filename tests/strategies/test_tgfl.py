"""Two heads through the same apps as all else: what travels, what is averaged, who is absent, who was killed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.btgfl import SETS
from fedtta_flwr.data.build import open_benchmark
from fedtta_flwr.errors import ConfigError, FederationError, FedTTAError
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.memory import Cursor, Memory, Remembered
from fedtta_flwr.records import BINS, HEADS, INFO, SCORES, STATE, WEIGHTS, arrays_of, from_arrays, to_arrays
from fedtta_flwr.server import check_inputs, federation
from fedtta_flwr.strategies.replies import Limits, read_replies
from fedtta_flwr.strategies.roster import gather
from fedtta_flwr.strategies.rounds import Round
from fedtta_flwr.strategies.tgfl import TGFL
from fedtta_flwr.strategies.updates import Updates
from fedtta_flwr.tgfl import HeadBench, visit_heads
from tests.conftest import LocalRun, RecordingGrid
from tests.strategies.test_checkpoint import Killed, KilledAfter, result
from tests.strategies.test_fleet import HttpGrid
from tests.strategies.test_roster import HostingGrid

#: a head of one's own that remembers how many samples of the set it has seen, and mixes by it
PLUGIN = """
import torch
from fedtta_flwr.heads.base import Predictor

class Fading(Predictor):
    needs = frozenset({"dle-personal", "dle-global", "clients", "entropy-global", "features", "labels"})

    def predict(self, x):
        z = self.extractor(x)
        general, personal = self.logits(z)
        place = self.seen + torch.arange(len(x))
        self.seen += len(x)
        self.weights = 1 / (1 + place / 10) * self.fitted.statistics["dle-global"].mean().clamp(0.5, 1)
        e = self.weights[:, None]
        return e * general.softmax(1) + (1 - e) * personal.softmax(1)

class Plain(Predictor):
    def predict(self, x):
        return self.logits(self.extractor(x))[0].softmax(1)

class Needy(Plain):
    needs = {"my-statistic"}

class Turned(Plain):
    needs = frozenset({"rotation-head"})

class Listed(Plain):
    needs = ["features"]

class Abstract(Predictor):
    pass

class Cook(Plain):
    @classmethod
    def recipe(cls, options):
        return cls.nothing

class Unmade(Plain):
    def __init__(self, fitted, options):
        super().__init__(fitted, options)
        self.scale = fitted.statistic

class Misspelt(Plain):
    def predict(self, x):
        return self.logit(x)

class Flat(Plain):
    def predict(self, x):
        return super().predict(x)[0]

class Unlike(Plain):
    def predict(self, x):
        return super().predict(x).tolist()

class Weighed(Plain):
    def predict(self, x):
        self.weights = torch.tensor(0.5)
        return super().predict(x)

class Heavy(Plain):
    def predict(self, x):
        self.weights = torch.full((len(x),), 2.0)
        return super().predict(x)

class Unbegun(Plain):
    def __init__(self, fitted, options):
        self.options = options

class Late(Plain):
    def predict(self, x):
        return super().predict(x) / (len(x) == 1 or 1 // 0)

class Fewer(Plain):
    def predict(self, x):
        return super().predict(x)[:1]
"""
ROUNDS = 2 + 1 + 5


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The config of a small run: 240 images of 4 classes, 4 clients, 2 rounds of training."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "own_heads.py").write_text(PLUGIN)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 240)
    images = rng.integers(0, 120, (240, 32, 32, 3))
    for k in range(4):
        images[labels == k, 8 * k : 8 * k + 8] += 130
    np.save(folder / "images.npy", images.astype(np.uint8))
    np.save(folder / "labels.npy", labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("FEDTTA_PLUGINS", "own_heads")
        yield {
            "task": "tgfl", "head": "own_heads:Fading", "dataset": "arrays", "data-dir": str(folder), "model": "cnn",
            "batch-size": 7, "tgfl.train-rounds": 2, "tgfl.epochs": 1, "tgfl.dirichlet": 1.0,
            "tgfl.learning-rate": 0.05, "tgfl.momentum": 0.9,
        }  # fmt: skip


@pytest.fixture(scope="module")
def whole(run_local: Callable[..., LocalRun], heads: dict[str, Any]) -> LocalRun:
    return run_local(nodes=2, **heads)


def of_round(messages: list[Message], number: int) -> list[Message]:
    return [m for m in messages if INFO in m.content and m.content.config_records[INFO]["round"] == number]


def test_rounds_and_sets(whole: LocalRun) -> None:
    assert whole.summary["finished"]
    assert whole.summary["rounds"] == ROUNDS
    accuracy = whole.summary["accuracy"]
    assert list(accuracy) == ["source", "local", "tta"]
    for score in accuracy.values():
        assert list(score["per_corruption"]) == list(SETS)
    with np.load(whole.path / "timeline.npz") as file:
        assert file["rounds"].tolist() == list(range(1, ROUNDS + 1))
        assert file["domains"].tolist() == list(SETS)
    lines = whole.lines()
    assert [line["clients"] for line in lines] == [4] * ROUNDS
    assert [line["samples"] > 0 for line in lines] == [True] * 3 + [False] * 5
    assert 0 < lines[1]["loss"] < lines[0]["loss"] < 2  # of four classes: ln 4 = 1.39 at the start
    assert [line["loss"] for line in lines[2:]] == [None] * 6


def test_every_sample_of_every_set_is_counted(whole: LocalRun, heads: dict[str, Any], tiny_config: Any) -> None:
    made = open_benchmark(tiny_config(**heads))
    with np.load(whole.path / "heads.npz") as file:
        histogram, sets, clients, edges = (file[key] for key in ("histogram", "sets", "clients", "edges"))
    assert sets.tolist() == list(SETS)
    assert histogram.shape == (5, 4, BINS)
    np.testing.assert_allclose(edges, np.arange(BINS + 1) / BINS)
    expected = [[len(made.samples(client, name)) for client in clients.tolist()] for name in SETS]
    np.testing.assert_array_equal(histogram.sum(axis=2), expected)
    with np.load(whole.path / "timeline.npz") as file:
        np.testing.assert_array_equal(file["seen"][0, 3:], expected)
    # The weight fades from sample to sample and is back at each set's first: as many in the highest bin.
    highest = [np.flatnonzero(h).max() for per_set in histogram for h in per_set]
    assert len(set(highest)) == 1


def test_what_is_sent_is_the_clients_uniform_mean(whole: LocalRun) -> None:
    for number in (1, 2):
        uploaded: dict[str, list[np.ndarray]] = {}
        for reply in of_round(whole.replies, number):
            for name, t in arrays_of(reply.content, STATE).items():
                uploaded.setdefault(name, []).append(t.numpy().astype(np.float64))
        assert {name.partition(".")[0] for name in uploaded} == {"extractor", "global_head"}
        for message in of_round(whole.sent, number + 1):
            sent = arrays_of(message.content, STATE)
            for name, parts in uploaded.items():
                mean = np.concatenate(parts).sum(axis=0) / 4
                for own in sent[name].numpy():
                    np.testing.assert_allclose(own, mean, rtol=1e-6, atol=1e-9)


def test_measurements_are_averaged_and_nothing_else_changes_any_more(whole: LocalRun) -> None:
    measured = of_round(whole.replies, 3)
    assert all(not arrays_of(reply.content, STATE) for reply in measured)
    descriptors = np.concatenate([arrays_of(reply.content, "descriptor")["descriptor"].numpy() for reply in measured])
    assert descriptors.shape == (4, 64)
    assert ((descriptors >= 0) & (descriptors <= 1)).all()
    assert np.ptp(descriptors, axis=0).max() > 0.05  # the clients' data differ
    before = arrays_of(of_round(whole.sent, 3)[0].content, STATE)
    for number in range(4, ROUNDS + 1):
        for message in of_round(whole.sent, number):
            sent = arrays_of(message.content, STATE)
            assert message.content.config_records[INFO]["places"] == [0, 0]
            np.testing.assert_allclose(sent["statistics"].numpy(), descriptors.mean(axis=0)[None], rtol=1e-5)
            assert sent["clients"].tolist() == [4.0]
            for name in before.keys() - {"statistics", "clients"}:
                assert torch.equal(sent[name], before[name])


def test_personal_heads_and_images_stay_at_home(whole: LocalRun) -> None:
    for number in range(1, ROUNDS + 1):
        for reply in of_round(whole.replies, number):
            found = set(reply.content.array_records)
            assert found <= {STATE, "descriptor", SCORES, HEADS}
            assert (HEADS in found) == (number > 3)
            assert not any("personal" in name for name in arrays_of(reply.content, STATE))
            assert sum(t.numel() for t in arrays_of(reply.content, SCORES).values()) <= 4 * 2 * 4


def test_the_numbers_do_not_depend_on_the_nodes(
    whole: LocalRun, run_local: Callable[..., LocalRun], heads: dict[str, Any]
) -> None:
    for other in (run_local(nodes=1, **heads), run_local(nodes=4, backwards=True, **heads)):
        assert other.summary["accuracy"] == whole.summary["accuracy"]
        with np.load(other.path / "heads.npz") as a, np.load(whole.path / "heads.npz") as b:
            assert all((a[key] == b[key]).all() for key in b)


def test_another_seed_gives_other_numbers(
    whole: LocalRun, run_local: Callable[..., LocalRun], heads: dict[str, Any]
) -> None:
    assert run_local(seed=1, **heads).summary["accuracy"] != whole.summary["accuracy"]


def test_a_head_without_weights_and_statistics(
    whole: LocalRun, run_local: Callable[..., LocalRun], heads: dict[str, Any]
) -> None:
    run = run_local(**heads | {"head": "own_heads:Plain"})
    accuracy = run.summary["accuracy"]
    assert accuracy["source"] == accuracy["tta"]  # it is the global head
    assert accuracy["local"] == whole.summary["accuracy"]["local"]  # trained as often, measured or not
    assert not (run.path / "heads.npz").exists()


@pytest.mark.parametrize("killed_after", [1, 2, 3, 4, 7])
def test_a_killed_run_goes_on_to_the_same_result(
    apps: tuple[Any, Any], tmp_path: Path, heads: dict[str, Any], whole: LocalRun, killed_after: int
) -> None:
    common = {"num-clients": 4, "device": "cpu", "corruptions": "contrast,pixelate", "checkpoint-every": 1}
    flat = common | heads | {"state-dir": str(tmp_path / "states")}
    path = tmp_path / "run"
    for nodes, more in ((2, {"output-dir": str(path)}), (3, {"resume": str(path)})):
        grid = LocalGrid(apps[1], RunConfig.from_flat(flat | more).to_flat(), nodes)
        with_kill = "output-dir" in more
        try:
            with federation(flat | more) as strategy:
                if with_kill:
                    # Killed before its own checkpoint: the one of the round before counts.
                    strategy.observers.append(KilledAfter(killed_after + 1))
                strategy.start(grid)
        except Killed:
            assert with_kill
    found, expected = result(path), result(whole.path)
    assert found["finished"]
    for key in ("accuracy", "weights", "rounds"):
        assert found[key] == expected[key]
    with np.load(path / "heads.npz") as a, np.load(whole.path / "heads.npz") as b:
        assert all((a[key] == b[key]).all() for key in b)


# -------------------------------------------------------------------------------------------------- the strategy alone


@pytest.fixture
def strategy(heads: dict[str, Any]) -> TGFL:
    made = TGFL(RunConfig.from_flat(heads | {"num-clients": 4, "quorum": 2}))
    made.source = {"w": torch.zeros(2), "statistics": torch.zeros(3), "clients": torch.zeros(())}
    return made


def updates(round_: int, clients: list[int], descriptor: Tensor | None = None) -> Updates:
    states = {} if descriptor is not None else {"w": torch.tensor([[c, -c] for c in clients], dtype=torch.float32)}
    names = tuple(f"client-0{c}" for c in clients)
    return Updates(round_, names, states, descriptor, torch.ones(len(clients)))


def test_who_was_absent_receives_the_mean_too(strategy: TGFL) -> None:
    present = updates(1, [1, 3])
    strategy._keep(present.clients, strategy.personalize(present))
    assert sorted(strategy.personal) == [f"client-0{c}" for c in range(4)]
    assert all(state["w"].tolist() == [2.0, -2.0] for state in strategy.personal.values())


def test_samples_do_not_weight_the_mean(strategy: TGFL) -> None:
    present = updates(1, [0, 1])
    present.examples[1] = 1000
    assert strategy.personalize(present)["w"].tolist() == [[0.5, -0.5]] * 2


@pytest.mark.parametrize(("pooling", "variance"), [("linear", 2.0), ("moments", 6.0)])
def test_variances_are_pooled_as_the_config_says(strategy: TGFL, pooling: str, variance: float) -> None:
    strategy.config = strategy.config.model_copy(update={"bn_pooling": pooling})
    state = {"bn.running_mean": torch.tensor([[0.0], [4.0]]), "bn.running_var": torch.tensor([[1.0], [3.0]])}
    mixed = strategy.personalize(Updates(1, ("client-00", "client-01"), state, None, torch.ones(2)))
    assert mixed["bn.running_mean"].tolist() == [[2.0]] * 2
    assert mixed["bn.running_var"].tolist() == [[variance]] * 2
    assert mixed["bn.running_var"].dtype == torch.float32


def outage(
    apps: tuple[Any, Any], heads: dict[str, Any], folder: Path, silent: int, **overrides: Any
) -> list[dict[str, Any]]:
    """In this round no client can be reached."""
    flat = heads | {"num-clients": 4, "output-dir": str(folder), "round-timeout": 2.0, "device": "cpu"} | overrides
    grid = HttpGrid(apps[1], RunConfig.from_flat(flat), {})
    grid.silent = (silent,)
    with federation(flat) as strategy:
        strategy.start(grid)
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_without_measurements_nobody_predicts_by_them(
    apps: tuple[Any, Any], heads: dict[str, Any], tmp_path: Path, warned: list[str]
) -> None:
    with pytest.raises(FederationError, match=r"^round 3: nobody could be measured, without which head = 'btfl'"):
        outage(apps, heads, tmp_path / "btfl", 3, head="btfl")
    lines = outage(apps, heads, tmp_path / "global", 3, head="global")  # which needs none
    assert [line["clients"] for line in lines] == [4, 4, 0, 4, 4, 4, 4, 4]
    assert not any("is lost" in line for line in warned)  # no test set is


def test_a_test_set_that_nobody_predicted_is_named(
    apps: tuple[Any, Any], heads: dict[str, Any], tmp_path: Path, warned: list[str]
) -> None:
    outage(apps, heads, tmp_path / "run", 6, head="personal")
    assert f"round 6: test set {SETS[2]} is lost; means over the test sets are without it" in warned


def test_who_was_not_measured_learns_that_the_mean_is_without_it(strategy: TGFL) -> None:
    strategy._keep((), strategy.personalize(updates(3, [0, 2], torch.tensor([[0.0, 1, 2], [2, 1, 0]]))))
    assert {c: float(s["clients"]) for c, s in strategy.personal.items()} == {
        "client-00": 2.0, "client-01": 0.0, "client-02": 2.0, "client-03": 0.0,
    }  # fmt: skip
    assert all(s["statistics"].tolist() == [1, 1, 1] for s in strategy.personal.values())


def test_changes_are_clipped_in_training_only(run_local: Callable[..., LocalRun], heads: dict[str, Any]) -> None:
    """Where clients measure, no state travels."""
    bare, clipped = (run_local(**heads | {"head": "btfl", "clip-updates": factor}) for factor in (0.0, 0.5))
    assert bare.summary["clipped"] == {}
    assert clipped.summary["clipped"]
    assert clipped.summary["finished"]


def test_below_the_quorum_everybody_keeps_what_was_shared(strategy: TGFL) -> None:
    before = updates(1, [1, 3])
    strategy._keep(before.clients, strategy.personalize(before))
    lonely = updates(2, [0])
    states, instead = strategy.unmixed(lonely)
    strategy._keep(lonely.clients, states)
    assert instead == "all go on with what they had"
    assert all(state["w"].tolist() == [2.0, -2.0] for state in strategy.personal.values())
    states, instead = strategy.unmixed(updates(3, [0], torch.tensor([[0.5, 0.5, 0.5]])))
    assert (states, instead) == ({}, "what they measured is averaged all the same")
    assert strategy.personal["client-00"]["statistics"].tolist() == [0.5] * 3


def test_what_is_expected_is_what_the_phase_asks_for(strategy: TGFL) -> None:
    found = {}
    for number in (1, 2, 3, 4, 8):  # 2 of training, 1 of measuring, 5 of predicting
        strategy._round = Round(number)
        expected = strategy.expected()
        found[number] = list(expected.state), expected.descriptor is not None
    assert found == {1: (["w"], False), 2: (["w"], False), 3: ([], True), 4: ([], False), 8: ([], False)}


class Meddler(RecordingGrid):
    """Client 0, a node of its own, sends another network with every reply, and other statistics."""

    def pull_messages(self, message_ids: Any) -> Any:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            info = reply.content.config_records.get(INFO)
            if info is not None and info["clients"] == ["client-00"]:
                info["updated"], info["samples"] = ["client-00"], [10**6]
                reply.content[STATE] = to_arrays({"global_head.weight": torch.zeros(1, 3)})
                reply.content["descriptor"] = to_arrays({"descriptor": torch.zeros(1, 7)})
        return replies


def test_nobody_may_send_what_the_phase_does_not_ask_for(
    apps: tuple[Any, Any], heads: dict[str, Any], tiny_config: Any, tmp_path: Path
) -> None:
    config = tiny_config(**heads, **{"output-dir": str(tmp_path / "run"), "num-clients": 2})
    Meddler(apps[1], config.to_flat(), 2).run_server(apps[0])
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [list(line["screened"]) for line in lines] == [["client-00"]] * ROUNDS
    assert [line["clients"] for line in lines] == [1] * ROUNDS


@pytest.mark.parametrize(
    "weights", [torch.zeros(1, BINS), torch.zeros(2, BINS + 1), -torch.ones(2, BINS), torch.ones(2, BINS)]
)
def test_malformed_histograms_are_refused(whole: LocalRun, weights: Tensor) -> None:
    sent = of_round(whole.sent, 4)[0]
    clients = list(sent.content.config_records[INFO]["clients"])
    reply = next(m for m in of_round(whole.replies, 4) if list(m.content.config_records[INFO]["clients"]) == clients)
    changed = Message(RecordDict(dict(reply.content)), reply_to=sent)
    changed.content[HEADS] = to_arrays({WEIGHTS: weights.to(torch.int32)})
    round_ = Round(4)
    limits = Limits(classes=4, slots=1, samples=1000)
    read_replies(round_, [changed], {changed.metadata.reply_to_message_id: clients}, limits)
    if weights.shape == (2, BINS) and weights.min() > 0:
        assert not round_.missing
        assert round_.interpolation.keys() == {(client, SETS[0]) for client in clients}
    else:
        assert "weights of the heads" in round_.missing[clients[0]]
        assert not round_.interpolation


def test_a_client_goes_on_with_its_own_head(heads: dict[str, Any]) -> None:
    still = heads | {"num-clients": 4, "tgfl.learning-rate": 1e-30, "device": "cpu"}
    bench = HeadBench(RunConfig.from_flat(still))
    kept, received = torch.randn(4, 64), bench.adapted_state()
    memory = Memory(RecordDict(), None)
    memory.keep({"client-01": Remembered(Cursor(1, -1, 1), {"heads": to_arrays({"personal_head.weight": kept})})})
    requests = [ConfigRecord({"round": number, "resuming": [], "resume": 0}) for number in (2, 3, 4)]
    for request in requests:
        visited = visit_heads(bench, "client-01", request, received, memory)
        assert not visited.forgot
        assert visited.memory is not None
        assert torch.equal(from_arrays(visited.memory.parts["heads"])["personal_head.weight"], kept)
    # One that has forgotten it begins with the head that all share.
    visited = visit_heads(bench, "client-02", requests[0], received, memory)
    assert visited.forgot
    assert visited.memory is not None
    head = from_arrays(visited.memory.parts["heads"])["personal_head.weight"]
    assert torch.equal(head, received["global_head.weight"])


@pytest.mark.parametrize(("head", "round_"), [("fedrep", 1), ("fedrod", 1), ("btfl", 1), ("btfl", 3), ("fedrep", 3)])
def test_heads_that_came_to_be_no_numbers_are_left_as_they_were(heads: dict[str, Any], head: str, round_: int) -> None:
    """The server sends what is shared anew; from a head of NaN that stays at home a client would never come back."""
    config = {"head": head, "device": "cpu", "tgfl.epochs": 3, "tgfl.personal-epochs": 3}
    bench = HeadBench(RunConfig.from_flat(heads | config | {"tgfl.learning-rate": 1e30}))
    kept, memory = torch.randn(4, 64), Memory(RecordDict(), None)
    memory.keep({"client-01": Remembered(Cursor(1, -1, 1), {"heads": to_arrays({"personal_head.weight": kept})})})
    request = ConfigRecord({"round": round_, "resuming": [], "resume": 0})
    visited = visit_heads(bench, "client-01", request, bench.adapted_state(), memory)
    assert visited.memory is not None
    assert torch.equal(from_arrays(visited.memory.parts["heads"])["personal_head.weight"], kept)
    assert (bench.steps, bench.rolled_back) == (1, 1)
    for own in from_arrays(visited.memory.parts.get("statistics", to_arrays({}))).values():
        assert bool(own.isfinite().all())


def test_a_node_with_other_images_takes_no_part(heads: dict[str, Any], tmp_path: Path) -> None:
    """It would deal them out otherwise: what one client trains on there, another is tested on here."""
    config = RunConfig.from_flat(heads | {"num-clients": 4, "join-timeout": 0.1, "quorum": 2})
    for name in ("images", "labels"):
        np.save(tmp_path / f"{name}.npy", np.load(Path(heads["data-dir"]) / f"{name}.npy")[:-1])
    grid = HostingGrid(config, ["client-00,client-02", "client-01,client-03"])
    grid.change(3, **{"data-dir": str(tmp_path)})
    roster = gather(grid, config, check_inputs(config)[1])
    assert sorted(roster.node_of) == ["client-00", "client-02"]
    assert "node 3 has other images than the server" in roster.refused[3]
    assert len(gather(HostingGrid(config, list(config.client_names())), config).node_of) == 4


def test_fedrep_trains_both_parts_even_in_one_epoch(heads: dict[str, Any]) -> None:
    bench = HeadBench(RunConfig.from_flat(heads | {"head": "fedrep", "device": "cpu"}))
    sent = {name: t.clone() for name, t in bench.adapted_state().items()}
    head = bench.net.personal_head.weight.detach().clone()
    request = ConfigRecord({"round": 1, "resuming": [], "resume": 0})
    visited = visit_heads(bench, "client-01", request, sent, Memory(RecordDict(), None))
    assert visited.memory is not None
    assert not torch.equal(from_arrays(visited.memory.parts["heads"])["personal_head.weight"], head)
    assert any(not torch.equal(t, sent[name]) for name, t in visited.state.items())


def trained(heads: dict[str, Any], **config: Any) -> dict[str, Tensor]:
    """Return what a client sends after a round of training, in a process that has drawn before."""
    torch.rand(1)
    bench = HeadBench(RunConfig.from_flat(heads | {"head": "global", "device": "cpu"} | config))
    request = ConfigRecord({"round": 1, "resuming": [], "resume": 0})
    return visit_heads(bench, "client-01", request, bench.adapted_state(), Memory(RecordDict(), None)).state


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(t, other[name]) for name, t in one.items())


def test_dropout_is_drawn_by_the_seed(heads: dict[str, Any]) -> None:
    once, again, other = (trained(heads, model="cct-4", seed=seed) for seed in (0, 0, 1))
    assert same(once, again)
    assert not same(once, other)


def test_training_images_are_augmented_where_it_is_asked_for(heads: dict[str, Any]) -> None:
    plain, once, again = (trained(heads, **{"tgfl.augment": augment}) for augment in (False, True, True))
    assert same(once, again)
    assert not same(plain, once)


def test_what_is_no_head_is_refused(heads: dict[str, Any]) -> None:
    refused = pytest.raises(ConfigError, match="head = 'own_heads:torch': no subclass")
    with refused, federation(heads | {"head": "own_heads:torch"}):
        pass


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("Needy", r"^head = 'own_heads:Needy': needs = \{'my-statistic'\}; allowed, as a set: clients, dle-global, "),
        ("Turned", r"\{'rotation-head'\}\); .*, and rotation-head where recipe\(\) has rotation=True$"),
        ("Listed", r"needs = \['features'\]; allowed, as a set: clients, "),
        ("Abstract", r"^head = 'own_heads:Abstract': Abstract\(Fitted, NoOptions\) raised TypeError: .*predict"),
        ("Cook", r"^Cook\.recipe raised AttributeError: .*nothing.* \(own_heads\.py, line \d+\)$"),
        ("Unmade", r"Unmade\(Fitted, NoOptions\) raised AttributeError: .*statistic.* \(own_heads\.py, line"),
        ("Misspelt", r"^Misspelt\.predict raised AttributeError: .*logit.* \(own_heads\.py, line \d+\)$"),
        ("Flat", r"^head Flat: predict returned \[4\], expected a tensor \[1, 4\]$"),
        ("Unlike", r"^head Unlike: predict returned list, expected a tensor \[1, 4\]$"),
        ("Weighed", r"^head Weighed: weights is \[\], expected a tensor \[1\]$"),
        ("Heavy", r"^head Heavy: weights has \[2\.0\]; allowed: shares of the global head, 0 to 1$"),
        ("Unbegun", r"^head = 'own_heads:Unbegun': __init__ must call super\(\)\.__init__\(fitted, options\)$"),
    ],
)
def test_a_head_that_cannot_predict_is_one_line_before_anything_is_trained(
    heads: dict[str, Any], tmp_path: Path, head: str, words: str
) -> None:
    config = heads | {"head": f"own_heads:{head}", "output-dir": str(tmp_path / "run"), "device": "cpu"}
    with pytest.raises(FedTTAError, match=words) as caught, federation(config):
        pytest.fail("the run began")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("Late", r"^round 4: .*; client-00, .*: Late\.predict raised ZeroDivisionError: .* \(own_heads\.py, line"),
        ("Fewer", r"^round 4: .*; client-00, .*: head Fewer: predict returned \[1, 4\], expected a tensor \[7, 4\]$"),
    ],
)
def test_a_head_that_cannot_predict_what_comes_later_ends_the_run_with_one_line(
    run_local: Callable[..., LocalRun], heads: dict[str, Any], head: str, words: str
) -> None:
    with pytest.raises(FederationError, match=words) as caught:
        run_local(**heads | {"head": f"own_heads:{head}"})
    assert "\n" not in str(caught.value)


def test_fedrods_personal_prediction_is_the_sum_of_its_heads(
    run_local: Callable[..., LocalRun], heads: dict[str, Any]
) -> None:
    accuracy = run_local(**heads | {"head": "fedrod", "tgfl.dirichlet": 0.1}).summary["accuracy"]
    assert accuracy["local"] == accuracy["tta"]
    assert accuracy["local"] != accuracy["source"]
