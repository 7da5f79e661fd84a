"""FedAvg+FT: local under TTA-bn, written out under TTA-grad, without labels, and without a mixture."""

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.entropy import Entropy
from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.datasets import open_test_set
from fedtta_flwr.data.streams import make_stream
from tests.test_client import CLIENTS, Node, metrics, personal_states, state_for, uploaded

RATE = 0.001  # larger steps amplify rounding errors
ENTROPY = {"adapter": "entropy", "entropy.learning-rate": RATE}


@pytest.mark.parametrize("every", [1, 3])
def test_with_bn_stats_post_is_local(run_local: Any, every: int) -> None:
    few = {"aggregate-every": every}
    found = run_local(strategy="fedavg-ft", **few).summary["accuracy"]
    assert found["post"] == found["local"]
    average, alone = (run_local(strategy=name, **few).summary["accuracy"] for name in ("fedavg", "local"))
    assert found["post"] != average["post"]
    assert found["pre"] == alone["pre"] != average["pre"]  # and from there it goes on


def step(model: nn.Module, x: Tensor) -> Tensor:
    """One step of SGD on the entropy in train mode, by torch alone; the logits before it."""
    logits = model.train().requires_grad_(True)(x)
    p = logits.softmax(dim=1)
    model.zero_grad()
    (-(p * p.log()).sum(dim=1).mean()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    return logits


def hits(model: nn.Module, x: Tensor, y: Any) -> int:
    with torch.no_grad():
        return int((model.eval()(x).argmax(dim=1).numpy() == y).sum())


@pytest.mark.parametrize("every", [1, 3])
def test_a_federation_by_hand(
    run_local: Any, resnet8: nn.Module, tiny_config: Callable[..., RunConfig], every: int
) -> None:
    run = run_local(strategy="fedavg-ft", **ENTROPY, **{"aggregate-every": every})
    sent = personal_states(run)
    config = tiny_config()
    test_set = open_test_set("digits", "", config.seed)
    streams = [make_stream(config, name, test_set) for name in CLIENTS]
    models = [deepcopy(resnet8) for _ in CLIENTS]
    right = dict.fromkeys(("pre", "tta", "post"), 0)
    rounds = [range(4)[i : i + every] for i in range(0, 4, every)]
    for number, slots in enumerate(rounds, start=1):
        for model, stream in zip(models, streams, strict=True):
            for slot in slots:
                x, y = stream.batch(slot)
                right["pre"] += hits(model, x, y)
                right["tta"] += int((step(model, x).argmax(dim=1).numpy() == y).sum())
                right["post"] += hits(model, x, y) if slot != slots[-1] else 0
        states = [model.state_dict() for model in models]
        mean = {key: sum(state[key].double() for state in states).div(4).float() for key in states[0]}
        for key, found in sent[number + 1, CLIENTS[0]].items():
            values = torch.frombuffer(bytearray(found), dtype=torch.float32)
            torch.testing.assert_close(values, mean[key].flatten(), rtol=1e-4, atol=1e-4)
        for model, stream in zip(models, streams, strict=True):
            model.load_state_dict(mean)
            x, y = stream.batch(slots[-1])
            step(model, x)
            right["post"] += hits(model, x, y)
    expected = {score: 100 * count / (4 * 4 * 5) for score, count in right.items()}
    assert {score: run.summary["accuracy"][score]["micro"] for score in right} == pytest.approx(expected)


def test_the_second_step_matters(run_local: Any) -> None:
    found, average = (personal_states(run_local(strategy=name, **ENTROPY)) for name in ("fedavg-ft", "fedavg"))
    assert found[2, CLIENTS[0]] == average[2, CLIENTS[0]]
    assert found[3, CLIENTS[0]] != average[3, CLIENTS[0]]


def test_hosting_changes_nothing(run_local: Any) -> None:
    several = {"strategy": "fedavg-ft", **ENTROPY}
    one = metrics(run_local(nodes=1, **several))
    assert all(metrics(run_local(nodes=nodes, **several)) == one for nodes in (2, 5))


@pytest.mark.parametrize("every", [1, 2])
def test_what_is_scored_does_not_change_what_is_learned(run_local: Any, every: int) -> None:
    few = {"strategy": "fedavg-ft", **ENTROPY, "aggregate-every": every}
    scored, blind = run_local(**few), run_local(**few, scores="")
    assert personal_states(blind).items() <= personal_states(scored).items()
    assert len(personal_states(blind)) == 4 * (4 // every - 1)


# ------------------------------------------------------------------------------------------------------ without labels


class Passing:
    """Four slots of noise: with labels they can be asked for again and again, without them each comes by once."""

    domains = ("noise",) * 4

    def __init__(self, client: str, labelled: bool) -> None:
        self.number, self.labelled, self.gone = int(client[-1]), labelled, -1

    def __len__(self) -> int:
        return 4

    def batch(self, slot: int) -> tuple[Tensor, Any]:
        g = torch.Generator().manual_seed(10 * self.number + slot)
        x = torch.rand((5 - slot % 2, 3, 32, 32), generator=g)
        if self.labelled:
            return x, np.zeros(len(x), np.int64)
        assert slot > self.gone, f"slot {slot} has gone by"
        self.gone = slot
        return x, None


def labelled(config: RunConfig, client: str) -> Passing:
    return Passing(client, labelled=True)


def passing(config: RunConfig, client: str) -> Passing:
    return Passing(client, labelled=False)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of this module, which the operator allows."""
    monkeypatch.setitem(sys.modules, "my_passing_streams", sys.modules[__name__])
    monkeypatch.setenv("FEDTTA_PLUGINS", "my_passing_streams")
    return "my_passing_streams"


@pytest.mark.parametrize("every", [1, 2])
def test_without_labels_the_same_is_learned(run_local: Any, allowed: str, every: int) -> None:
    few = {"strategy": "fedavg-ft", **ENTROPY, "classes": 10, "aggregate-every": every}
    seen, unseen = (run_local(**few, stream=f"{allowed}:{name}") for name in ("labelled", "passing"))
    assert personal_states(unseen) == personal_states(seen)
    assert unseen.summary["accuracy"] == {}
    assert unseen.summary["screened"] == {}
    assert set(seen.summary["accuracy"]["post"]["per_corruption"]) == {"noise"}


@pytest.mark.parametrize("stream", ["my_passing_streams:labelled", "my_passing_streams:passing", ""])
def test_visits_go_on_in_another_process(tiny_config: Callable[..., RunConfig], allowed: str, stream: str) -> None:
    config = tiny_config(**ENTROPY, classes=10, stream=stream)
    here, there = Node(config), Node(config)
    mixture = {name: 0.99 * t for name, t in state_for(here.visit(CLIENTS[:1], finetune=True)).items()}
    there.context.state = deepcopy(here.context.state)
    here.visit(CLIENTS[2:], finetune=True)  # somebody else uses the adapter in between
    one, other = (node.visit(CLIENTS[:1], mixture, finetune=True) for node in (here, there))
    assert uploaded(one) == uploaded(other)


@pytest.mark.parametrize("finetune", [True, False])
def test_a_client_that_no_mixture_reached_finetunes_the_source(
    tiny_config: Callable[..., RunConfig], resnet8: nn.Module, finetune: bool
) -> None:
    """Its first update did not take part, say; with one, and once the stream has ended, the same on that."""
    config = tiny_config(**ENTROPY)
    node, alone = Node(config), Entropy(deepcopy(resnet8), config.entropy)
    source = {name: t.clone() for name, t in alone.adapted_state().items()}
    mixture = {name: 0.99 * t for name, t in source.items()}
    batches = [make_stream(config, CLIENTS[0], open_test_set("digits", "", config.seed)).batch(i)[0] for i in range(4)]

    def visit(received: dict[str, Tensor] | None, slots: int) -> dict[str, bytes]:
        state = None if received is None else {name: t[None] for name, t in received.items()}
        return uploaded(node.visit(CLIENTS[:1], state, slots=slots, finetune=finetune))

    def adapt(received: dict[str, Tensor], late: list[int], slots: list[int]) -> dict[str, bytes]:
        alone.load_adapted_state(received)
        for slot in (late if finetune else []) + slots:
            alone.adapt(batches[slot])
        return {name: t.numpy().tobytes() for name, t in alone.adapted_state().items()}

    assert visit(None, 1) == adapt(source, [], [0])
    assert visit(None, 1) == adapt(source, [0], [1])
    assert visit(mixture, 2) == adapt(mixture, [1], [2, 3])
    assert visit(mixture, 1) == {}


class Pausing(Passing):
    """Nothing arrives in the second and third slot."""

    def batch(self, slot: int) -> tuple[Tensor, Any]:
        x, y = super().batch(slot)
        return (x[:0], None if y is None else y[:0]) if slot in (1, 2) else (x, y)


def pausing(config: RunConfig, client: str) -> Pausing:
    return Pausing(client, labelled=config.scores != "")


@pytest.mark.parametrize("scores", ["post", ""])
def test_what_was_finetuned_outlasts_rounds_without_images(
    tiny_config: Callable[..., RunConfig], allowed: str, resnet8: nn.Module, scores: str
) -> None:
    config = tiny_config(**ENTROPY, classes=10, scores=scores, stream=f"{allowed}:pausing")
    node, alone, images = Node(config), Entropy(deepcopy(resnet8), config.entropy), Pausing(CLIENTS[0], labelled=True)
    mixture = {name: 0.99 * t for name, t in alone.adapted_state().items()}

    def visit() -> dict[str, bytes]:  # who sends nothing is sent the same again
        return uploaded(node.visit(CLIENTS[:1], {name: t[None] for name, t in mixture.items()}, finetune=True))

    assert visit().keys() == mixture.keys()
    assert visit() == visit() == {}
    alone.load_adapted_state(mixture)
    for slot in (0, 3):
        alone.adapt(images.batch(slot)[0])
    assert visit() == {name: t.numpy().tobytes() for name, t in alone.adapted_state().items()}
    assert not node.context.state[f"{CLIENTS[0]}/finetuned"]
