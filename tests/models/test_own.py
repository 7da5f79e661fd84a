"""Networks of the user's own: used like an architecture that ships, and found out before any client is asked."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.build import image_form
from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.models import MODELS, build
from fedtta_flwr.models.base import Classifier, last_linear
from fedtta_flwr.models.own import build_own
from fedtta_flwr.models.source import load_source
from fedtta_flwr.models.trial import try_own
from fedtta_flwr.plugins import named
from fedtta_flwr.server import check_inputs

NETS = """
import torch
from torch import nn
from fedtta_flwr.models import build
from fedtta_flwr.models.source import embedded_checkpoint
from fedtta_flwr.models.checkpoints import load

def small(classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Dropout(), nn.Linear(4, classes))

def shipped(classes):
    return load(embedded_checkpoint(), architecture="resnet8", classes=classes)

def drawn(classes):
    return build("cnn", classes, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))

def double(classes):
    return small(classes).double()

def words(classes):
    return "network"

def nothing():
    return small(10)

def raises(classes):
    return {}["weights"]

def more(classes):
    return small(classes + 1)

def grey(classes):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))

def scaled(classes):
    return nn.Sequential(small(classes), nn.Softmax(dim=1))

def convolutional(classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, classes, 1), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten())

class Auxiliary(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.net, self.auxiliary = small(classes), nn.Linear(4, 2)

    def forward(self, x):
        return self.net(x)

ONE = small(10)

def same(classes):
    return ONE

def old_norm(classes):
    return nn.Sequential(small(4), nn.utils.weight_norm(nn.Linear(4, classes)))

def lazy(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

def scripted(classes):
    return torch.jit.script(small(classes))

def broken(classes):
    net = small(classes)
    nn.init.constant_(net[-1].bias, float("nan"))
    return net

class PerImage(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.net = small(classes)

    def forward(self, x):
        return self.net((x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True))

class Hooked(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.net, self.head, self.seen = small(4), nn.Linear(4, classes), {}
        self.net.register_forward_hook(lambda _, __, output: self.seen.update(z=output))

    def forward(self, x):
        self.net(x)
        return self.head(self.seen["z"])

class Tied(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.b.weight = self.a.weight
        self.net = small(classes)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x):
        return self.net(self.b(self.a(x)))

class Twice(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(4, classes)
        self.all = nn.Sequential(small(4)[:-1], self.head)

    def forward(self, x):
        return self.all(x)

class Looking(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.net, self.head = small(4), nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.net(x).view(-1, self.head.in_features))

class WornOut(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.net = small(classes)

    def forward(self, x):
        if len(x) > 1:
            raise ValueError("no batches")
        return self.net(x)

class Unbegun(nn.Module):
    def __init__(self, classes):
        self.classes = classes

    def forward(self, x):
        return x
"""


@pytest.fixture(autouse=True)
def own_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", "own_nets")
    yield
    sys.modules.pop("own_nets", None)


def config(name: str, **changes: Any) -> RunConfig:
    return RunConfig.from_flat({"model": f"own_nets:{name}"} | changes)


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, others = a.state_dict(), b.state_dict()
    return mine.keys() == others.keys() and all(torch.equal(t, others[name]) for name, t in mine.items())


def test_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = build_own(config("small"), 10)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert same(build_own(config("small"), 10), first)
    assert not same(build_own(config("small", seed=1), 10), first)
    assert not first.training
    assert first(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_a_checkpoint_holds_the_networks_own_state_dict(tmp_path: Path) -> None:
    trained, file = build_own(config("small", seed=1), 10), tmp_path / "own.safetensors"
    save_model(trained, file)
    assert same(load_source(config("small", checkpoint=str(file)), 10), trained)
    told = r"own\.safetensors: the data has 9 classes, the file 10 \(5\.weight is .* classes = 10 if"
    with pytest.raises(CheckpointError, match=told):
        build_own(config("small", checkpoint=str(file)), 9)
    save_file(trained.state_dict() | {"5.weight": torch.zeros(10, 3)}, file)  # more than the classes is another
    with pytest.raises(CheckpointError, match=r"own\.safetensors: does not fit .*5\.weight is float32 \[10, 3\]"):
        build_own(config("small", checkpoint=str(file)), 9)
    torch.save(trained.state_dict(), tmp_path / "own.pt")
    with pytest.raises(CheckpointError, match=r"own\.pt: is a pickle .*safetensors\.torch\.save_model\(model, PATH"):
        build_own(config("small", checkpoint=str(tmp_path / "own.pt")), 10)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("double", r"0\.weight is float64; allowed: float32 \(model\.float\(\)\)"),
        ("Unbegun", r"Unbegun\.__init__ must call super\(\)\.__init__\(\)$"),
        ("words", "returned str; return a plain torch.nn.Module"),
        ("scripted", "return a plain torch.nn.Module"),
        ("lazy", "weight is UninitializedParameter; allowed: float32"),
        ("old_norm", "it cannot be copied, for each client process: RuntimeError: Only Tensors created explicitly"),
        ("broken", "returned NaN or infinite logits; look at its weights"),
        ("Hooked", "raised KeyError: 'z'"),
        ("nothing", r"nothing\(int\) raised TypeError: .*; put it right there"),
        ("raises", r"raises\(int\) raised KeyError: 'weights' \(own_nets\.py, line 28\)"),
        ("absent", "cannot be imported: AttributeError"),
        ("more", r"for images \[1, 3, 32, 32\] it returned float32 \[1, 11\]; expected logits, float32 \[1, 10\]"),
        ("grey", r"for images \[1, 3, 32, 32\] it raised RuntimeError: .*to have 1 channels"),
        ("scaled", r"its logits are not what 0\.5 returns, its last nn\.Linear"),
        ("Auxiliary", "its logits are not what auxiliary returns, its last nn.Linear"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_before_anybody_is_asked(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model = 'own_nets:{name}': .*{words}") as caught:
        check_inputs(config(name))
    assert "\n" not in str(caught.value)


def test_tied_weights_stay_tied_and_constants_what_they_are(tmp_path: Path) -> None:
    trained, file = build_own(config("Tied", seed=1), 10), tmp_path / "own.safetensors"
    save_model(trained, file)  # writes one of the two
    loaded = build_own(config("Tied", checkpoint=str(file)), 10)
    assert same(loaded, trained)
    assert loaded.a.weight is loaded.b.weight
    save_file({name: t.clone() for name, t in trained.state_dict().items()}, file)  # writes both
    loaded = build_own(config("Tied", checkpoint=str(file)), 10)
    assert same(loaded, trained)
    assert loaded.a.weight is loaded.b.weight


def test_what_the_function_returns_is_not_changed(run_local: Callable[..., Any]) -> None:
    first, second = (run_local(model="own_nets:same", adapter="entropy", seed=3) for _ in range(2))
    assert first.summary["accuracy"] == second.summary["accuracy"]
    config = {"task": "tgfl", "tgfl.train-rounds": 1, "tgfl.epochs": 1, "head": "fedthe"}
    first, second = (run_local(model="own_nets:same", **config) for _ in range(2))
    assert first.summary["accuracy"] == second.summary["accuracy"]


@pytest.mark.parametrize(
    ("name", "checkpoint", "said"), [("drawn", False, 1), ("drawn", True, 0), ("shipped", False, 0)]
)
def test_weights_that_are_drawn_are_warned_of(
    warned: list[str], tmp_path: Path, name: str, checkpoint: bool, said: int
) -> None:
    """Unless a checkpoint takes their place: nobody wants the predictions of a network that was not trained."""
    path = tmp_path / "net.safetensors"
    save_file(build("cnn", 10, mean=(0.5,) * 3, std=(0.25,) * 3).state_dict(), path)
    check_inputs(config(name, adapter="source", checkpoint=str(path) if checkpoint else ""))
    assert sum("draws weights at random and checkpoint is empty" in line for line in warned) == said


def test_the_trial_is_no_constant_image() -> None:
    check_inputs(config("PerImage"))


def test_the_trial_needs_no_clean_images(tiny_config: Callable[..., RunConfig]) -> None:
    class Corrupted:
        def images(self, corruption: str, severity: int) -> np.ndarray:
            assert corruption != "none"
            return np.zeros((5, 40, 48, 3), np.uint8)

    assert image_form(tiny_config(), Corrupted()) == (40, 48)


def test_one_without_a_linear_layer_is_no_worse(run_local: Callable[..., Any]) -> None:
    try_own("own_nets:convolutional", build_own(config("convolutional"), 10), torch.rand(1, 3, 8, 8), 10)
    own = {"model": "own_nets:convolutional"}
    assert run_local(strategy="pfedbbn", **own).summary["finished"]
    for strategy in ("fedamp", "pfedsd"):
        assert run_local(strategy=strategy, adapter="entropy", **own).summary["finished"]
    for strategy, by in (("fedtsa", "feature-mean"), ("moon", "moon")):
        words = rf"^strategy = '{strategy}': '{by}' needs a classifier, and Sequential has no linear layer; choose"
        with pytest.raises(ConfigError, match=words):
            run_local(strategy=strategy, adapter="entropy", **own)
    with pytest.raises(ConfigError, match=r"^'shot' needs a classifier, and Sequential has no linear layer"):
        check_inputs(config("convolutional", adapter="shot"))


def test_the_operator_has_to_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTTA_PLUGINS")
    with pytest.raises(ConfigError, match="model = 'own_nets:small': importing package 'own_nets' is not allowed"):
        config("small")
    with pytest.raises(
        ConfigError, match=r"model = 'resnet9': unknown; allowed: resnet8, .*robustbench:ID, or package"
    ):
        RunConfig.from_flat({"model": "resnet9"})
    assert named({"model": "robustbench:Standard"}) == named({"model": "resnet8"}) == {}
    assert named({"model": "own_nets:small"}) == {"model": "own_nets:small"}


def test_there_is_no_normalisation_to_leave_out() -> None:
    with pytest.raises(
        ConfigError, match=r"legacy-no-norm = true: .*'own_nets:small' has is not known; allowed: false"
    ):
        build_own(config("small", **{"legacy-no-norm": True}), 10)


@pytest.mark.parametrize("method", [{"strategy": "fedctta"}, {"strategy": "fedtsa", "adapter": "shot"}])
def test_a_run_with_it_is_that_with_the_same_network_from_here(
    method: dict[str, str], run_local: Callable[..., Any]
) -> None:
    own, ours = run_local(model="own_nets:shipped", **method), run_local(**method)
    assert own.summary["accuracy"] == ours.summary["accuracy"]
    with np.load(own.path / "timeline.npz") as a, np.load(ours.path / "timeline.npz") as b:
        assert all(np.array_equal(a[key], b[key]) for key in a)


def test_two_heads_are_trained_on_it_as_on_ours(run_local: Callable[..., Any]) -> None:
    small = {"task": "tgfl", "dataset": "digits", "tgfl.train-rounds": 1, "tgfl.epochs": 1, "head": "fedthe"}
    own, ours = run_local(model="own_nets:drawn", **small), run_local(model="cnn", **small)
    assert own.summary["accuracy"] == ours.summary["accuracy"]
    assert run_local(model="own_nets:Twice", **small).summary["finished"]
    with pytest.raises(ConfigError, match=r"for images \[1, 3, 32, 32\] it raised RuntimeError"):
        check_inputs(config("grey", **small))
    with pytest.raises(ConfigError, match=r"without its last nn\.Linear, which two heads replace, it raised Attribute"):
        check_inputs(config("Looking", **small))


def test_what_it_raises_later_names_its_line(run_local: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match=r"WornOut\.forward raised ValueError: no batches \(own_nets\.py, line 123\)"):
        run_local(model="own_nets:WornOut")


def test_the_last_linear_layer_of_our_own_networks_is_their_head() -> None:
    for name in set(MODELS) - {"wrn-28-10"}:
        model = build(name, 10)
        assert isinstance(model, Classifier)
        assert last_linear(model) == ("head", model.head)
