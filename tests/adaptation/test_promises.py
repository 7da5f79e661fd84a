"""An adapter that changes what it does not declare is refused at its first step; one that returns no logits, always."""

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation import promises
from fedtta_flwr.adaptation.base import Adapter, Draws, State, statistics
from fedtta_flwr.adaptation.norms import affine_parameters
from fedtta_flwr.adaptation.promises import MEMORY
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import NoOptions
from fedtta_flwr.registry import ADAPTERS
from fedtta_flwr.workbench import make_adapter
from tests.conftest import ROOT


class Affine(Adapter):
    """Names the affine parameters, and does to the model what a test says."""

    def select(self) -> State:
        return dict(affine_parameters(self.model, "affine"))

    def act(self, x: Tensor) -> object:
        return self.predict(x)

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        self.model.bn1.bias += 0.1
        return self.act(x)  # type: ignore[return-value]


class Train(Affine):
    def act(self, x: Tensor) -> object:
        self.model.train()
        logits = self.model(x)
        self.model.eval()
        return logits


class Declared(Train):
    def select(self) -> State:
        return super().select() | statistics(self.model)


class AtHome(Train):
    def __init__(self, model: nn.Module, options: NoOptions) -> None:
        super().__init__(model, options)
        self.keep(statistics(self.model))


class There(Affine):
    """There and back again is no change."""

    def act(self, x: Tensor) -> object:
        before = self.model.head.weight.clone()
        self.model.head.weight.zero_()
        logits = self.predict(x)
        self.model.head.weight.copy_(before)
        return logits


class Replaced(Affine):
    def act(self, x: Tensor) -> object:
        self.model.bn2.weight = nn.Parameter(self.model.bn2.weight * 1)
        return self.predict(x)


class Grown(Affine):
    def act(self, x: Tensor) -> object:
        self.model.register_buffer("memory", x)
        return self.predict(x)


class Copies(Affine):
    def select(self) -> State:
        return {name: p.clone() for name, p in super().select().items()}


class Rebinds(Affine):
    def __init__(self, model: nn.Module, options: NoOptions) -> None:
        super().__init__(model, options)
        self.n = torch.zeros(1)
        self.keep({"n": self.n})

    def act(self, x: Tensor) -> object:
        self.n = self.n + 1
        return self.predict(x)


class CountsInPlace(Rebinds):
    def act(self, x: Tensor) -> object:
        self.n += 1
        return self.predict(x)


class Spoils(Affine):
    def act(self, x: Tensor) -> object:
        logits = self.predict(x)
        x.mul_(-1)
        return logits


class LeftInTrainMode(Declared):
    def act(self, x: Tensor) -> object:
        self.model.train()
        return self.model(x)


class CountsForItself(Affine):
    """A number that the next client finds as this one has left it."""

    seen = 0

    def act(self, x: Tensor) -> object:
        self.seen += 1
        return self.predict(x) * self.seen


class KeepsNoTensor(Affine):
    """The same, of a tensor: what the step has come to shows it, whatever becomes of the logits."""

    def __init__(self, model: nn.Module, options: NoOptions) -> None:
        super().__init__(model, options)
        self.seen = torch.zeros(())

    def act(self, x: Tensor) -> object:
        self.seen += 1
        self.model.bn2.bias += self.seen
        return torch.zeros(len(x), 3)


class KeepsNoMoments(Affine):
    def __init__(self, model: nn.Module, options: NoOptions) -> None:
        super().__init__(model, options)
        parameters = [p.requires_grad_(True) for p in self.select().values()]
        self.adam = torch.optim.Adam(parameters, lr=1e-3)

    def step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        self.adam.zero_grad()
        logits.softmax(1).square().sum().backward()
        self.adam.step()
        return logits


class DrawsFromTheProcess(Affine):
    def act(self, x: Tensor) -> object:
        self.model.bn1.bias += torch.randn(4)
        return self.predict(x)


class Dropout(Declared):
    """Only of a network that drops something."""


class Caches(Affine):
    """What no later step reads may stay behind."""

    last: Tensor | None = None

    def __init__(self, model: nn.Module, options: NoOptions) -> None:
        super().__init__(model, options)
        self.draws = Draws(self, "noise")

    def act(self, x: Tensor) -> object:
        self.last = torch.randn(4, generator=self.draws.next())
        self.model.bn1.bias += self.last
        return self.predict(x)


class PredictsInTrainMode(Affine):
    def predict(self, x: Tensor) -> Tensor:
        self.model.train()
        logits: Tensor = self.model(x)
        return logits


class SwitchesDropout(Affine):
    def predict(self, x: Tensor) -> Tensor:
        logits = super().predict(x)
        self.model.drop.train(not self.model.drop.training)
        return logits


class PredictsInPlace(Affine):
    def predict(self, x: Tensor) -> Tensor:
        return super().predict(x.sub_(0.5))


class PredictsOne(Affine):
    def predict(self, x: Tensor) -> Tensor:
        return super().predict(x)[:1]


class SelectsAList(Affine):
    def select(self) -> State:
        return list(super().select().values())  # type: ignore[return-value]


class SelectsLayers(Affine):
    def select(self) -> State:
        return {"bn1": self.model.bn1}  # type: ignore[dict-item]


class Counts(Affine):
    def select(self) -> State:
        return super().select() | {"seen": torch.zeros(1, dtype=torch.int64)}


HERE = rf"^adapter '{__name__}:"
AGAIN = "step comes to something else when it is taken again from the same state; declare all that it changes"


def without_dropout(model: nn.Module) -> nn.Module:
    model.drop.p = 0.0
    return model


def test_the_place_that_is_told_is_there() -> None:
    document, _, title = MEMORY.partition(", ")
    assert f"\n### {title}\n" in (ROOT / document).read_text()


@pytest.mark.parametrize("kind", [Affine, Declared, AtHome, There, CountsInPlace, Caches])
def test_what_is_declared_may_change(kind: type[Adapter], tiny, images) -> None:
    adapter = kind(without_dropout(tiny()), NoOptions())
    adapter.adapt(images(4))
    adapter.adapt(images(3))
    assert adapter.steps == 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Train, r"Train': step changed bn1\.running_mean and 3 more, which select\(\) does not name; add it to"),
        (Replaced, r"Replaced': step replaced, added or removed bn2\.weight; .*copy_"),
        (Grown, r"Grown': step replaced, added or removed memory; .*keep\(\)"),
        (Rebinds, r"Rebinds': step put something else in the place of self\.n, which is kept .*\+=.* grows: " + MEMORY),
        (Spoils, r"Spoils': step changed its batch in place; work on a copy"),
        (
            LeftInTrainMode,
            r"LeftInTrainMode': step left the model in train mode; put it back, e.g. with self.model.eval",
        ),
        (CountsForItself, rf"CountsForItself': {AGAIN}"),
        (KeepsNoTensor, rf"KeepsNoTensor': {AGAIN} .*a memory: {MEMORY}\) with keep"),
        (KeepsNoMoments, rf"KeepsNoMoments': {AGAIN}"),
        (DrawsFromTheProcess, rf"DrawsFromTheProcess': {AGAIN}"),
        (Dropout, rf"Dropout': {AGAIN}"),
        (PredictsInTrainMode, r"PredictsInTrainMode': predict changed bn1\.running_mean and 3 more; it must leave all"),
        (SwitchesDropout, r"SwitchesDropout': predict changed the mode of a layer; it must leave all as it is"),
        (PredictsInPlace, r"PredictsInPlace': predict changed its batch; it must leave all as it is"),
        (PredictsOne, r"PredictsOne': predict returned float32 \[1, 3\], expected floating-point logits \[4, 3\]"),
    ],
)
def test_what_is_not_declared_may_not(kind: type[Adapter], words: str, tiny, images) -> None:
    adapter = kind(tiny(), NoOptions())
    assert adapter.adapt(images(0)).shape == (0, 3)
    for _ in range(2):  # for the next client, too
        with pytest.raises(ConfigError, match=HERE + words) as caught:
            adapter.adapt(images(4))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ADAPTERS)
def test_those_that_ship_keep_their_promises_too(name: str, tiny, images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "ships", lambda adapter: False)
    options = {"update_every": 4, "capacity": 8} if name in ("note", "rotta") else {}  # a step at the first batch
    adapter = make_adapter(RunConfig(adapter=name, **{name: options} if options else {}), tiny())
    adapter.adapt(images(8))
    adapter.adapt(images(3))
    assert adapter.steps == 2


def test_who_has_served_a_client_before_takes_no_step_twice(tiny, images) -> None:
    """On a device every message is a process: each round would begin with two more steps."""
    adapter = CountsForItself(tiny(), NoOptions())
    adapter.proven = True
    adapter.adapt(images(4))
    adapter.adapt(images(4))
    assert adapter.seen == 2
    once = CountsForItself(tiny(), NoOptions())
    with pytest.raises(ConfigError, match=AGAIN):
        once.adapt(images(4))
    assert once.seen == 3


def test_a_copy_is_no_tensor_of_the_models(tiny) -> None:
    with pytest.raises(ConfigError, match=HERE + r".*Copies': select\(\) returned a copy of bn\d\.\w+; return"):
        Copies(tiny(), NoOptions())


def test_what_is_kept_has_a_name_of_its_own(tiny) -> None:
    adapter = Caches(tiny(), NoOptions())
    with pytest.raises(ConfigError, match=r"keep\(\) has draws.noise already; give each a name of its own"):
        Draws(adapter, "noise")
    with pytest.raises(ConfigError, match=r"keep\(\) takes tensors by name; it was given list: make it a dict"):
        adapter.keep([torch.zeros(1)])  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "found"), [(SelectsAList, "list"), (SelectsLayers, "dict")])
def test_what_is_selected_is_tensors_with_names(kind: type[Adapter], found: str, tiny) -> None:
    words = rf"{kind.__name__}': select\(\) returned {found}; return a dict of the model's tensors by name"
    with pytest.raises(ConfigError, match=HERE + words):
        kind(tiny(), NoOptions())


def test_what_cannot_be_mixed_does_not_travel(tiny) -> None:
    with pytest.raises(ConfigError, match=HERE + r".*Counts': select\(\) names seen, which is int64 \[1\]; .*keep\(\)"):
        Counts(tiny(), NoOptions())


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda logits: logits[:, :2], r"float32 \[4, 2\]"),
        (lambda logits: logits[:3], r"float32 \[3, 3\]"),
        (lambda logits: logits.argmax(dim=1), r"int64 \[4\]"),
        (lambda logits: logits.round().long(), r"int64 \[4, 3\]"),
        (lambda logits: None, "NoneType"),
    ],
)
def test_a_step_returns_logits(made, found: str, tiny, images) -> None:
    adapter = Affine(tiny(), NoOptions())
    adapter.adapt(images(4))
    adapter.act = lambda x: made(adapter.predict(x))  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=rf"{HERE}Affine': step returned {found}, expected .* \[4, 3\]$"):
        adapter.adapt(images(4))
