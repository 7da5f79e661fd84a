"""Classes of the user's own: values of their attributes from the run config, and names that are taken."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedtta_flwr.bench.spec import cells, make_spec
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError, FederationError
from fedtta_flwr.launch import forget_states, with_states
from fedtta_flwr.own import check_taken, declared, with_values
from fedtta_flwr.plugins import check_plugins
from fedtta_flwr.registry import ADAPTERS, STRATEGIES
from fedtta_flwr.resolve import PLUGIN_VARIABLE, resolve
from fedtta_flwr.server import make_strategy
from fedtta_flwr.strategies.base import _copied
from fedtta_flwr.strategies.updates import Update, stack_updates
from fedtta_flwr.workbench import make_adapter
from tests.conftest import TINY

MODULE = "fedtta_test_own"
SOURCE = """
import dataclasses
import torch
from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.adaptation.bn_stats import BNStats
from fedtta_flwr.adaptation.base import Adapter
from fedtta_flwr.heads.base import Predictor
from fedtta_flwr.strategies.base import PersonalizedStrategy

class Mine(PersonalizedStrategy):
    temperature = 1.0
    steps = 3
    mode = "flat"
    warm = False
    _hidden = 2
    table = (1, 2)

    def __init__(self, config):
        super().__init__(config)
        self.begun_with = self.temperature

    def metrics(self):
        return {"temperature": torch.tensor(self.temperature), "none": float("nan")}

    def collaboration_matrix(self, updates):
        return torch.softmax(torch.eye(len(updates)) / self.temperature, 1)

class Heir(Mine):
    mode = "sharp"

class Wordy(Mine):
    def metrics(self):
        return {"mode": self.mode}

class Listing(Mine):
    def metrics(self):
        return [self.temperature]

class Start(Mine):
    start = 1.0

class Run(Mine):
    run = "first"

class Network(Mine):
    def __init__(self, config):
        super().__init__(config)
        self.network = torch.nn.Linear(2, 1)

class Memory(Mine):
    def __init__(self, config):
        super().__init__(config)
        self.memory = {}

class Late(Mine):
    def prepare(self, adapter):
        super().prepare(adapter)
        self.network = torch.nn.Linear(2, 1)

class Running(Mine):
    # One model, which moves in place.

    def __init__(self, config):
        super().__init__(config)
        self.mean = {}

    def personalize(self, updates):
        for name, t in updates.state.items():
            self.mean.setdefault(name, self.source[name].clone()).lerp_(t.mean(0), 0.5)
        return {name: self.mean[name].expand_as(t) for name, t in updates.state.items()}

class OneForAll(Mine):
    one_for_all = True

    def collaboration_matrix(self, updates):
        return torch.eye(len(updates))

class Anneal(Mine):
    objectives = {"moon.mu": 0.0}

    def collaboration_matrix(self, updates):
        self.objectives = {"moon.mu": float(updates.round)}
        return super().collaboration_matrix(updates)

class Centred(Mine):
    def collaboration_matrix(self, updates):
        for name in updates.state:
            updates.state[name] = updates.state[name] - updates.state[name].mean(0)
        return super().collaboration_matrix(updates)

class Halves(Mine):
    # Two clusters, each mixed by itself.

    def personalize(self, updates):
        mixed = []
        for part in torch.arange(len(updates)).tensor_split(2):
            rows = {
                "clients": tuple(updates.clients[i] for i in part),
                "state": {name: t[part] for name, t in updates.state.items()},
                "began": tuple(updates.began[i] for i in part),
                "examples": updates.examples[part],
            }
            mixed.append(super().personalize(dataclasses.replace(updates, **rows)))
        return {name: torch.cat([one[name] for one in mixed]) for name in updates.state}

class Prompt(Adapter):
    # Learns an image that it adds to others, and nothing of the model.

    def __init__(self, model, options):
        super().__init__(model, options)
        self.optimizer = Optimizer([self.prompt], "sgd", learning_rate=0.1)

    def select(self):
        self.prompt = torch.rand(1, 3, 1, 1) / 10
        return {"prompt": self.prompt}

    @torch.no_grad()
    def predict(self, x):
        return self.model(x + self.prompt)

    @torch.enable_grad()
    def step(self, x):
        logits = self.model(x + self.prompt)
        self.optimizer.minimize(entropy(logits).mean())
        return logits

class MyAdapter(BNStats):
    rounds_to_wait = 2

class Steps(MyAdapter):
    steps = 2

class Answer(MyAdapter):
    def __init__(self, model, options):
        super().__init__(model, options)
        self.answer = torch.zeros(1)

class Wrapped(MyAdapter):
    def __init__(self, model, options):
        self.before = 1
        super().__init__(model, options)
        self.model = torch.nn.Sequential(self.model)
        self.before = 2

class MyHead(Predictor):
    share = 0.5

    def predict(self, x):
        ours, mine = self.logits(self.extractor(x))
        self.weights = torch.full((len(x),), self.share)
        return self.share * ours.softmax(1) + (1 - self.share) * mine.softmax(1)

class Reset(MyHead):
    reset = 0.5
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGIN_VARIABLE, MODULE)
    yield __import__(MODULE)
    del sys.modules[MODULE]


def config(**keys: Any) -> RunConfig:
    return RunConfig.from_flat(TINY | {key.replace("_", "-"): value for key, value in keys.items()})


def test_plain_attributes_of_the_users_own_classes_can_have_values(own: Any) -> None:
    assert declared(own.Heir) == {"temperature": 1.0, "steps": 3, "mode": "sharp", "warm": False}
    found = with_values("strategy", own.Heir, "temperature=2 warm=true mode='a b'")
    assert (found.temperature, type(found.temperature), found.steps, found.mode, found.warm) == (2, float, 3, "a b", 1)
    assert (own.Heir.temperature, own.Heir.mode) == (1.0, "sharp")
    assert issubclass(found, own.Heir)
    assert (found.__name__, found.__module__) == ("Heir", MODULE)
    assert with_values("adapter", own.MyAdapter, "rounds-to-wait=5").rounds_to_wait == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "temprature=2",
            "strategy-options: temprature = 2: Mine has no such attribute; allowed: temperature, steps, m",
        ),
        ("descriptor='noise-logits'", "Mine has no such attribute"),  # the base class's alone
        ("table=1", "Mine has no such attribute"),
        ("temperature=true", "temperature = True: allowed: a finite number, as its default 1.0 is"),
        ("temperature=nan", "temperature = nan: allowed: a finite number"),
        ("steps=2.5", "steps = 2.5: allowed: a whole number, as its default 3 is"),
        ("warm=1", "warm = 1: allowed: true or false"),
        ("mode=2", "mode = 2: allowed: a string in quotes"),
        ("temperature", "strategy-options = 'temperature': no list of pairs; allowed: 'name=value name=value'"),
        ("mode=flat", "strategy-options = 'mode=flat': Invalid value "),
        ("steps=1 steps=2", "strategy-options = 'steps=1 steps=2': Cannot overwrite a value"),
    ],
)
def test_what_cannot_be_an_attributes_value_is_one_line(own: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_strategy(config(strategy=f"{MODULE}:Mine", strategy_options=text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_without_plain_attributes_says_so() -> None:
    class Bare(nn.Identity): ...

    with pytest.raises(ConfigError, match="allowed: none, since it declares none, such as `temperature = 1"):
        with_values("adapter", Bare, "rate=1")


@pytest.mark.parametrize("kind", ["strategy", "adapter", "head"])
def test_methods_that_ship_have_keys_of_their_own(kind: str, run_local: Callable[..., Any]) -> None:
    words = f"{kind}-options = 'a=1': for a {kind} of your own only, but {kind} = "
    keys = {f"{kind}-options": "a=1", "task": "tgfl" if kind == "head" else "ftta"}
    with pytest.raises(ConfigError, match=words):
        run_local(**keys)
    with pytest.raises(ConfigError, match=words):
        check_plugins(RunConfig.from_flat(keys).to_flat())


def test_a_run_with_values_is_recorded_and_differs(own: Any, run_local: Callable[..., Any]) -> None:
    keys = {"strategy": f"{MODULE}:Mine", "adapter": f"{MODULE}:MyAdapter", "adapter-options": "rounds-to-wait=1"}
    runs = [run_local(**keys, **{"strategy-options": text}) for text in ("", "temperature=0.01")]
    assert '"strategy-options": "temperature=0.01"' in (runs[1].path / "config.json").read_text()
    own = [[line["own"] for line in run.lines()] for run in runs]
    assert own[0] == [{"temperature": 1.0, "none": None}] * len(own[0])
    assert own[1][0]["temperature"] == pytest.approx(0.01)
    weights = [line["collaboration"]["self_weight"] for run in runs for line in run.lines()[:1]]
    n = int(runs[0].lines()[0]["clients"])
    assert weights == pytest.approx([torch.e / (torch.e + n - 1), 1.0], rel=1e-4)


@pytest.mark.parametrize(("name", "found"), [("Wordy", "str for 'mode'"), ("Listing", "list")])
def test_metrics_are_numbers_by_name(own: Any, run_local: Callable[..., Any], name: str, found: str) -> None:
    with pytest.raises(FederationError, match=f"round 1: {name}.metrics returned {found}, expected numbers by name"):
        run_local(strategy=f"{MODULE}:{name}")


def test_a_head_has_values_too(own: Any, run_local: Callable[..., Any]) -> None:
    keys = {"task": "tgfl", "model": "cnn", "tgfl.train-rounds": 1, "num-clients": 3, "spatial-heterogeneity": 1.0}
    run = run_local(**keys, head=f"{MODULE}:MyHead", **{"head-options": "share=1.0"})
    accuracy = run.summary["accuracy"]
    assert accuracy["tta"]["micro"] == accuracy["source"]["micro"] != accuracy["local"]["micro"]
    with pytest.raises(ConfigError, match=r"head = .*: Reset\.reset \(float\) takes the place of a method that Pred"):
        run_local(**keys, head=f"{MODULE}:Reset")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Start", r"Start\.start \(float\) takes the place of a method that PersonalizedStrategy needs itself; choose"),
        ("Run", r"Run\.run \(str\) takes the place of an attribute that PersonalizedStrategy needs itself"),
        ("Network", r"Network\.network \(Linear\) takes the place of an attribute"),
        ("Memory", r"Memory\.memory \(dict\) takes the place of a method"),
    ],
)
def test_names_that_the_base_class_needs_are_refused_of_strategies(own: Any, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy(config(strategy=f"{MODULE}:{name}"))


def test_also_where_the_run_is_prepared(own: Any, run_local: Callable[..., Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"strategy = .*: prepare set self\.network, which PersonalizedStrategy needs"
    ):
        run_local(strategy=f"{MODULE}:Late")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Steps", r"Steps\.steps \(int\) takes the place of an attribute that BNStats needs itself"),
        ("Answer", r"Answer\.answer \(Tensor\) takes the place of a method"),
    ],
)
def test_and_of_adapters(own: Any, resnet8: nn.Module, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_adapter(config(adapter=f"{MODULE}:{name}"), resnet8)


@pytest.mark.parametrize("name", ["MyAdapter", "Wrapped"])
def test_others_are_not(own: Any, resnet8: nn.Module, name: str) -> None:
    make_adapter(config(adapter=f"{MODULE}:{name}"), resnet8)


def test_what_an_adapter_draws_is_the_same_on_every_node(own: Any, resnet8: nn.Module) -> None:
    made = [make_adapter(config(adapter=f"{MODULE}:Prompt", seed=seed), resnet8).prompt for seed in (3, 3, 4)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_terms_work_for_what_is_learned_beside_the_model_but_where_they_predict(
    own: Any, run_local: Callable[..., Any]
) -> None:
    keys = {"adapter": f"{MODULE}:Prompt", "scores": "post", "rounds": 2}
    plain, proximal = (run_local(strategy=name, **keys) for name in ("fedavg", "fedprox"))
    assert not proximal.lines()[0]["screened"]
    assert proximal.summary["accuracy"] == plain.summary["accuracy"]  # of one step a round
    with pytest.raises(FederationError, match="objectives Moon: Prompt learns tensors that are none of the model's"):
        run_local(strategy="moon", **keys)


def test_a_method_that_moves_its_model_in_place_leaves_those_who_are_away_what_they_have(own: Any) -> None:
    strategy = make_strategy(config(strategy=f"{MODULE}:Running"))
    strategy.source = {"a": torch.zeros(2)}
    theta = torch.ones(2, 2)
    for number, clients in ((1, ("a", "b")), (2, ("a",))):
        replies = {client: Update({"a": 10 ** (number - 1) * theta[0]}, None, 1) for client in clients}
        updates = stack_updates(number, replies, (), strategy.personal, strategy.source)
        strategy._keep(updates.clients, {n: _copied(t) for n, t in strategy.personalize(updates).items()})
    assert strategy.personal["b"]["a"].tolist() == [0.5, 0.5]
    assert strategy.personal["a"]["a"].tolist() == [5.25, 5.25]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OneForAll", "round 1: OneForAll.one_for_all is true, but personalize returned other states for some"),
        ("Anneal", r"round 2: Anneal.objectives is {'moon.mu': 1.0}, was {'moon.mu': 0.0}; set it before the run"),
        ("Centred", r"round 1: Centred.collaboration_matrix changed .* of updates.state; work on a copy"),
    ],
)
def test_what_would_be_lost_or_wrong_in_silence_is_one_line(
    own: Any, run_local: Callable[..., Any], name: str, words: str
) -> None:
    with pytest.raises(FederationError, match=words):
        run_local(strategy=f"{MODULE}:{name}")


def test_parts_may_be_mixed_by_themselves(own: Any, run_local: Callable[..., Any]) -> None:
    run = run_local(strategy=f"{MODULE}:Halves")
    assert [line["collaboration"] for line in run.lines()] == [None] * len(run.lines())


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_that_ships_can_be_inherited_from(name: str) -> None:
    own = type("Heir", (resolve("strategy", name, STRATEGIES),), {"__module__": MODULE})
    check_taken("strategy", f"{MODULE}:Heir", own(config()))


@pytest.mark.parametrize("name", ADAPTERS)
def test_and_every_adapter(name: str, resnet8: nn.Module) -> None:
    own = type("Heir", (resolve("adapter", name, ADAPTERS),), {"__module__": MODULE})
    check_taken("adapter", f"{MODULE}:Heir", own(resnet8, config().options(name)))


def test_an_axis_of_a_benchmark_may_be_of_values(own: Any) -> None:
    table: dict[str, Any] = {
        "name": "own", "title": "Own", "rows": ["t"], "columns": [], "seeds": [0],
        "config": {"strategy": f"{MODULE}:Mine"},
        "axes": {"t": {"small": {"strategy-options": "temperature=0.1"}, "none": {}}},
    }  # fmt: skip
    made = cells(make_spec(table, "own.toml"), {})
    assert [cell.config["strategy-options"] for cell in made] == ["temperature=0.1", ""]
    table["axes"]["t"]["small"]["strategy-options"] = "temprature=0.1"
    with pytest.raises(ConfigError, match=r"temprature = 0\.1: Mine has no such attribute"):
        cells(make_spec(table, "own.toml"), {})


def test_clients_of_this_machine_keep_their_states_where_a_run_can_be_resumed(tmp_path: Path) -> None:
    every = {"checkpoint-every": 5, "output-dir": str(tmp_path)}
    assert with_states(every) == every | {"state-dir": str(tmp_path / "states")}
    for other in ({"output-dir": str(tmp_path)}, every | {"state-dir": "/elsewhere"}, every | {"resume": "/a"}):
        assert with_states(other) == other
    new = with_states({"checkpoint-every": 5})
    assert new["state-dir"] == f"{new['output-dir']}/states"
    (tmp_path / "states").mkdir()
    forget_states(every)
    forget_states(every | {"state-dir": "/elsewhere"})
    assert (tmp_path / "states").is_dir()
    forget_states(with_states(every))
    assert not (tmp_path / "states").exists()
