"""An adapter that changes what it does not declare is refused at its first step; one that returns no logits, always."""

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter, State, statistics
from fedtta_flwr.adaptation.norms import affine_parameters
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import NoOptions


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


class PredictsInTrainMode(Affine):
    def predict(self, x: Tensor) -> Tensor:
        self.model.train()
        logits: Tensor = self.model(x)
        return logits


class PredictsOne(Affine):
    def predict(self, x: Tensor) -> Tensor:
        return super().predict(x)[:1]


class SelectsAList(Affine):
    def select(self) -> State:
        return list(super().select().values())  # type: ignore[return-value]


class Counts(Affine):
    def select(self) -> State:
        return super().select() | {"seen": torch.zeros(1, dtype=torch.int64)}


HERE = rf"^adapter '{__name__}:"


@pytest.mark.parametrize("kind", [Affine, Declared, AtHome, There, CountsInPlace])
def test_what_is_declared_may_change(kind: type[Adapter], tiny, images) -> None:
    adapter = kind(tiny(), NoOptions())
    adapter.adapt(images(4))
    adapter.adapt(images(3))
    assert adapter.steps == 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Train, r"Train': step changed bn1\.running_mean and 3 more, which select\(\) does not name; add it to"),
        (Replaced, r"Replaced': step replaced, added or removed bn2\.weight; .*copy_"),
        (Grown, r"Grown': step replaced, added or removed memory; .*keep\(\)"),
        (Rebinds, r"Rebinds': step put something else in the place of self\.n, which is kept or travels; .*\+="),
        (Spoils, r"Spoils': step changed its batch in place; work on a copy"),
        (PredictsInTrainMode, r"PredictsInTrainMode': predict changed bn1\.running_mean and 3 more; it must leave all"),
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


def test_a_copy_is_no_tensor_of_the_models(tiny) -> None:
    with pytest.raises(ConfigError, match=HERE + r".*Copies': select\(\) returned a copy of bn\d\.\w+; return"):
        Copies(tiny(), NoOptions())


def test_what_is_selected_has_names(tiny) -> None:
    with pytest.raises(ConfigError, match=HERE + r"SelectsAList': select\(\) returned list; return a dict"):
        SelectsAList(tiny(), NoOptions())


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
