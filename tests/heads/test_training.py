"""What training of two heads changes, against its losses in plain loops; statistics against counting."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.heads import training
from fedtta_flwr.heads.base import Recipe
from fedtta_flwr.heads.training import (
    SGD,
    Epoch,
    TwoHeads,
    balanced_softmax,
    bits,
    fitted,
    personalise,
    statistics,
    train_shared,
    turn,
)
from fedtta_flwr.models.base import Classifier
from fedtta_flwr.models.normalize import Normalize

CLASSES, COUNTS = 3, torch.tensor([7, 5, 0])


class Small(Classifier):
    """One layer with batch normalisation and a ReLU: features [B, 6] of images [B, 1, 4, 4]."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__(Normalize([0.5], [0.5]))
        self.layer = nn.Linear(16, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = head

    def embed(self, x: Tensor) -> Tensor:
        """Map images to features."""
        z: Tensor = self.norm(self.layer(x.flatten(1)))
        return z.relu()


def make(recipe: Recipe, seed: int = 0) -> TwoHeads:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = TwoHeads(Small(nn.Linear(6, CLASSES)), recipe).double()
        with torch.no_grad():
            net.personal_head.weight.normal_()
            net.extractor.norm.running_var.uniform_(0.5, 2)
            if net.rotation_head is not None:
                net.rotation_head.weight.normal_()
    return net


X = torch.rand(12, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0])


def batches(size: int) -> Epoch:
    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X.split(size), Y.split(size), strict=True)

    return epoch


def changed(net: TwoHeads, before: dict[str, Tensor]) -> set[str]:
    return {name for name, t in net.state_dict().items() if not torch.equal(t, before[name])}


def snapshot(net: TwoHeads) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in net.state_dict().items()}


BODY = {f"extractor.{n}" for n in ("layer.weight", "layer.bias", "norm.weight", "norm.bias")}
TRACKED = {f"extractor.norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
GLOBAL, PERSONAL, ROTATION = "global_head.weight", "personal_head.weight", "rotation_head.weight"
CASES = {
    "apart": (Recipe(), {GLOBAL}, {GLOBAL}),
    "balanced": (Recipe(loss="balanced", sparsity=0.01), {GLOBAL}, {GLOBAL}),
    "fedrep": (Recipe(heads="fedrep"), {PERSONAL}, set()),
    "fedrod": (Recipe(loss="balanced", heads="fedrod"), {GLOBAL, PERSONAL}, {GLOBAL}),
    "ttt": (Recipe(rotation=True), {GLOBAL, ROTATION}, {GLOBAL, ROTATION}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_trains_and_what_is_shared(case: str) -> None:
    recipe, heads, shared = CASES[case]
    net = make(recipe)
    before = snapshot(net)
    train_shared(net, batches(5), 2, SGD(0.1), COUNTS)
    assert changed(net, before) == BODY | TRACKED | heads
    assert set(net.shared()) == BODY | TRACKED - {"extractor.norm.num_batches_tracked"} | shared | {
        "extractor.normalize.mean",
        "extractor.normalize.std",
    } & set(before)
    assert not net.training
    assert all(p.grad is None for p in net.parameters())
    before = snapshot(net)
    personalise(net, batches(5), 1, SGD(0.1))
    assert changed(net, before) == {PERSONAL}
    other = make(recipe, seed=1)
    other.load_shared(net.shared())
    assert all(torch.equal(t, net.shared()[name]) for name, t in other.shared().items())
    assert not torch.equal(other.personal_head.weight, net.personal_head.weight)


def oracle(state: dict[str, np.ndarray], recipe: Recipe) -> float:
    """Return the training loss of all images as one batch, in numpy, image by image."""

    def features(image: np.ndarray) -> np.ndarray:
        return (image.ravel() - 0.5) / 0.5 @ state["extractor.layer.weight"].T + state["extractor.layer.bias"]

    def normalised(images: list[np.ndarray]) -> np.ndarray:
        z = np.stack([features(image) for image in images])
        z = (z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5)
        return np.maximum(z * state["extractor.norm.weight"] + state["extractor.norm.bias"], 0)

    def cross_entropy(logits: np.ndarray, label: int) -> float:
        return float(np.log(np.exp(logits).sum()) - logits[label])

    images = list(X.numpy()[:, 0])
    z = normalised(images)
    prior = np.log(np.maximum(COUNTS.numpy(), 1e-300)) if recipe.loss == "balanced" else np.zeros(CLASSES)
    total = 0.0
    turned = normalised([np.rot90(image, i % 4) for i, image in enumerate(images)])
    for i, label in enumerate(Y.tolist()):
        g, p = state[GLOBAL] @ z[i], state[PERSONAL] @ z[i]
        total += cross_entropy(p, label) if recipe.heads == "fedrep" else cross_entropy(g + prior, label)
        if recipe.heads == "fedrod":
            total += cross_entropy(g + p, label)
        total += recipe.sparsity * np.abs(z[i]).sum()
        if recipe.rotation:
            total += cross_entropy(state[ROTATION] @ turned[i], i % 4)
    return total / len(images)


#: through which of the two terms of FedRoD nothing but the personal head learns, is its own test below
STEPS = {name: recipe for name, (recipe, *_) in CASES.items() if name != "fedrod"}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_follows_the_gradient_of_the_loss(case: str) -> None:
    net = make(STEPS[case])
    state = {name: t.numpy().copy() for name, t in net.state_dict().items()}
    rate, decay = 0.05, 0.01
    found = train_shared(net, batches(12), 1, SGD(rate, weight_decay=decay), COUNTS)
    assert found == pytest.approx(oracle(state, STEPS[case]), abs=1e-9) or case == "fedrep"  # whose head learned before
    fixed = {PERSONAL} if case == "fedrep" else set()
    for name in sorted((BODY | CASES[case][1]) - fixed):
        flat = state[name].ravel()
        expected = []
        for i, value in enumerate(flat.tolist()):
            ends = []
            for h in (1e-6, -1e-6):
                flat[i] = value + h
                ends.append(oracle(state, STEPS[case]))
            flat[i] = value
            expected.append(value - rate * ((ends[0] - ends[1]) / 2e-6 + decay * value))
        np.testing.assert_allclose(net.state_dict()[name].numpy().ravel(), expected, rtol=0, atol=1e-8)


def test_the_loss_is_the_mean_over_the_images_of_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter([9.0] * 3 + [1.0, 1.0, 4.0])  # of batches of 5, 5 and 2 images, twice
    monkeypatch.setattr(training, "_loss", lambda net, *_: 0 * net.global_head.weight.sum() + next(passes))
    assert train_shared(make(Recipe()), batches(5), 2, SGD(0.1), COUNTS) == pytest.approx((10 * 1 + 2 * 4) / 12)


def test_fedrod_personal_head_disturbs_nobody() -> None:
    alone, beside = make(Recipe(loss="balanced")), make(Recipe(loss="balanced", heads="fedrod"))
    for net in (alone, beside):
        train_shared(net, batches(5), 2, SGD(0.1), COUNTS)
    for name, t in alone.shared().items():
        assert torch.equal(t, beside.shared()[name])
    before = beside.personal_head.weight.detach().clone()
    z = beside.extractor(X).detach()
    p = (z @ (beside.global_head.weight + before).T.detach()).softmax(1)
    personalise(beside, batches(12), 1, SGD(0.1, weight_decay=0.0))
    gradient = (p - nn.functional.one_hot(Y, CLASSES)).T @ z / len(X)
    torch.testing.assert_close(beside.personal_head.weight.detach(), before - 0.1 * gradient)


def test_fedrep_trains_its_head_first() -> None:
    net, by_hand = make(Recipe(heads="fedrep")), make(Recipe(heads="fedrep"))
    train_shared(net, batches(5), 4, SGD(0.1), COUNTS)
    personalise(by_hand, batches(5), 3, SGD(0.1))
    train_shared(by_hand, batches(5), 1, SGD(0.1), COUNTS)
    assert not changed(net, by_hand.state_dict())


def test_a_last_batch_of_one_image_trains_with_running_statistics() -> None:
    net, other, parts = make(Recipe()), make(Recipe()), [(X[:11], Y[:11]), (X[11:], Y[11:])]
    train_shared(net, lambda: iter(parts), 1, SGD(0.1, weight_decay=0.0), COUNTS)
    train_shared(other, lambda: iter(parts[:1]), 1, SGD(0.1, weight_decay=0.0), COUNTS)  # which leaves it in eval mode
    nn.functional.cross_entropy(other.global_head(other.extractor(X[11:])), Y[11:]).backward()
    with torch.no_grad():
        for p in (p for p in other.parameters() if p.grad is not None):
            p -= 0.1 * p.grad
    torch.testing.assert_close(net.state_dict(), other.state_dict())


def test_balanced_softmax_of_a_class_without_images() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0])
    loss = balanced_softmax(logits, labels, COUNTS)
    expected = sum(
        math.log(7 * math.exp(a) + 5 * math.exp(b)) - (math.log(5) + b if label else math.log(7) + a)
        for (a, b, _), label in zip(logits.tolist(), labels.tolist(), strict=True)
    )
    assert loss.item() == pytest.approx(expected / 4, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, [logits])
    assert gradient.isfinite().all()
    assert not gradient[:, 2].any()


def test_turned_images() -> None:
    turned, quarters = turn(X)
    assert quarters.tolist() == [0, 1, 2, 3] * 3
    for i, image in enumerate(X.numpy()[:, 0]):
        np.testing.assert_array_equal(turned[i, 0], np.rot90(image, i % 4))


def test_statistics_are_counted() -> None:
    net = make(Recipe(rotation=True))
    needs = {"dle-personal", "entropy-personal", "entropy-global", "feature-personal", "features", "labels"}
    found = statistics(net, batches(5), {*needs, "rotation-head", "dle-global", "clients"})
    assert found.keys() == {*needs, "rotation-head"}
    assert torch.equal(found["rotation-head"], net.rotation_head.weight)
    z = net.extractor(X).detach()
    torch.testing.assert_close(found["features"], z)
    assert found["labels"].tolist() == Y.tolist()
    zeros = [sum(round(math.tanh(max(v, 0.0))) == 0 for v in z[:, j].tolist()) for j in range(6)]
    assert found["dle-personal"].tolist() == pytest.approx([n / 12 for n in zeros], abs=1e-7)
    assert 0 < sum(zeros) < 72
    assert found["feature-personal"].tolist() == pytest.approx(z.mean(0).tolist())
    for name, head in (("entropy-personal", net.personal_head), ("entropy-global", net.global_head)):
        p = (z @ head.weight.T).softmax(1)
        assert found[name].item() == pytest.approx(-(p * p.log()).sum(1).mean().item())
    assert statistics(net, batches(5), {"labels"}).keys() == {"labels"}
    assert statistics(net, lambda: pytest.fail("a pass for nothing"), {"clients", "rotation-head"}).keys() == {
        "rotation-head"
    }
    result = fitted(net, found)
    assert torch.equal(result.global_head, net.global_head.weight)
    assert torch.equal(result.personal_head, net.personal_head.weight)


def test_bits_turn_at_half_of_the_hyperbolic_tangent() -> None:
    edge = math.atanh(0.5)
    z = torch.tensor([-3.0, 0.0, edge - 1e-6, edge + 1e-6, 1.0, 50.0], dtype=torch.float64)
    assert bits(z).tolist() == [False, False, False, True, True, True]


def test_what_does_not_fit_is_refused() -> None:
    net = make(Recipe())
    state = net.shared()
    with pytest.raises(CheckpointError, match="global_head"):
        net.load_shared({name: t for name, t in state.items() if name != GLOBAL})
    with pytest.raises(CheckpointError, match="first that differ: global_head"):
        net.load_shared(state | {GLOBAL: torch.zeros(2, 6)})
    with pytest.raises(ConfigError, match=r"Sequential: it has no nn\.Linear as its classifier, which two heads need"):
        TwoHeads(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), Recipe())
