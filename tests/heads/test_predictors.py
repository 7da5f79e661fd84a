"""What every predictor promises: probabilities, batches that do not matter, nothing left behind by a test set."""

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtta_flwr.adaptation import memo
from fedtta_flwr.adaptation.augment import crop_and_flip
from fedtta_flwr.adaptation.augmix import augmix
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.heads.base import Fitted, Predictor, Recipe
from fedtta_flwr.heads.knn_per import KNNPer
from fedtta_flwr.heads.memo import MEMO
from fedtta_flwr.options import BTFLOptions, FedTHEPlusOptions, KNNPerOptions, MEMOOptions, Options, TTTOptions
from fedtta_flwr.registry import HEADS
from fedtta_flwr.resolve import make
from fedtta_flwr.seeding import torch_rng

#: few views, and steps that can be seen
FAST: dict[str, Options] = {
    "btfl": BTFLOptions(threshold=4.0),
    "memo": MEMOOptions(learning_rate=0.05, steps=2, views=4),
    "fedthe-plus": FedTHEPlusOptions(tune_rate=0.05, tune_steps=2, views=4),
    "ttt": TTTOptions(learning_rate=0.02),
}
Make = Callable[..., Fitted]


def predictor(name: str, fitted: Fitted) -> Predictor:
    options = FAST.get(name) or RunConfig().options(name)
    found: Predictor = make("head", name, HEADS, Predictor, fitted, options)
    found.identity = (5, "client-03")
    return found


def predict(found: Predictor, x: Tensor, batch: int) -> tuple[Tensor, Tensor | None]:
    probabilities, weights = [], []
    for part in x.split(batch):
        probabilities.append(found.predict(part))
        weights.append(found.weights)
    return torch.cat(probabilities), None if weights[0] is None else torch.cat(weights)


@pytest.mark.parametrize("name", HEADS)
def test_batches_do_not_matter_and_reset_forgets(name: str, make_fitted: Make, images: Tensor) -> None:
    images = images[:9] if name in ("memo", "fedthe-plus") else images  # slow ones
    found = predictor(name, make_fitted())
    before = {key: t.clone() for key, t in found.extractor.state_dict().items()}
    whole, weights = predict(found, images, 33)
    assert found.seen == len(images)
    torch.testing.assert_close(whole.sum(1), torch.ones(len(images)))
    assert (whole >= 0).all()
    assert not whole.requires_grad
    assert (weights is not None) == (name in ("btfl", "fedthe", "fedthe-plus"))
    for batch in (1, 7):
        found.reset()
        assert found.seen == 0
        again, shares = predict(found, images, batch)
        torch.testing.assert_close(again, whole, rtol=0, atol=1e-5)
        if weights is not None:
            torch.testing.assert_close(shares, weights, rtol=0, atol=1e-4)
            assert ((weights >= 0) & (weights <= 1)).all()
    found.reset()
    assert all(torch.equal(t, before[key]) for key, t in found.extractor.state_dict().items())
    assert found.predict(images[:0]).shape == (0, 4)


@pytest.mark.parametrize("name", ["memo", "fedthe-plus", "ttt"])
def test_what_draws_draws_by_client_and_place(name: str, make_fitted: Make, images: Tensor) -> None:
    found = predictor(name, make_fitted())
    first = found.predict(images[:4])
    twice = torch.cat([images[:1], images[:1]])
    found.reset()
    assert not torch.equal(*found.predict(twice).unbind(0))  # another place: other views, or an extractor that learned
    found.reset()
    found.identity = (5, "client-04")
    assert torch.equal(found.predict(images[:4]), first) == (name == "ttt")  # TTT turns all ways, and draws nothing


def test_heads_alone_and_together(make_fitted: Make, images: Tensor) -> None:
    fitted = make_fitted()
    z = fitted.extractor(images).detach().numpy()
    shared, own = z @ fitted.global_head.numpy().T, z @ fitted.personal_head.numpy().T
    for name, logits in {"global": shared, "personal": own, "fedrep": own, "fedrod": shared + own}.items():
        e = np.exp(logits)
        found = predictor(name, make_fitted()).predict(images)
        np.testing.assert_allclose(found, e / e.sum(1, keepdims=True), rtol=0, atol=1e-6)


def test_neighbours(make_fitted: Make, images: Tensor) -> None:
    fitted = make_fitted()
    known, labels = fitted.statistics["features"].double().numpy(), fitted.statistics["labels"].tolist()
    for options in (
        KNNPerOptions(neighbours=3, tuned=False, share=0.7, scale=0.02),
        KNNPerOptions(neighbours=1000, tuned=False, share=1.0),
    ):
        found = KNNPer(make_fitted(), options).predict(images)
        for row, z in zip(found, fitted.extractor(images).detach(), strict=True):
            p = (1 - options.share) * (fitted.global_head @ z).softmax(0).double().numpy()
            distances = [float(np.linalg.norm(z.double().numpy() - k)) for k in known]
            nearest = sorted(range(len(known)), key=distances.__getitem__)[: options.neighbours]
            kernels = [np.exp(-distances[k] / (len(z) * options.scale)) for k in nearest]
            for k, kernel in zip(nearest, kernels, strict=True):
                p[labels[k]] += options.share * kernel / sum(kernels)
            np.testing.assert_allclose(row, p, rtol=0, atol=1e-5)


def test_the_neighbours_share_is_the_best_on_the_validation_part(make_fitted: Make, images: Tensor) -> None:
    predictions = []
    for tenth in range(10):
        plain = KNNPer(make_fitted(), KNNPerOptions(neighbours=3, tuned=False, share=tenth / 10))
        plain.extractor = torch.nn.Identity()
        predictions.append(plain.predict(plain.fitted.statistics["validation-features"]).argmax(1))
    assert len({tuple(p.tolist()) for p in predictions}) > 3
    half = torch.where(torch.arange(20) % 2 == 0, predictions[0], predictions[7])
    for wanted in (predictions[0], predictions[5], predictions[9], half):
        right = [int((p == wanted).sum()) for p in predictions]
        tuned = KNNPer(make_fitted(validation_labels=wanted), KNNPerOptions(neighbours=3, share=1.0))
        assert tuned.share == right.index(max(right)) / 10


def test_ttt_learns_rotations(make_fitted: Make, images: Tensor) -> None:
    fitted = make_fitted()
    image, options = images[:1], TTTOptions(learning_rate=0.02)
    parameters = [*fitted.extractor.parameters()]
    head = fitted.statistics["rotation-head"].clone().requires_grad_(True)
    loss = torch.zeros(())
    for quarters in range(4):  # all ways: as the mean over eight copies
        logits = head @ fitted.extractor(image.rot90(quarters, (2, 3)))[0]
        loss = loss - logits.log_softmax(0)[quarters] / 4
    gradients = torch.autograd.grad(loss, [*parameters, head])
    with torch.no_grad():
        for p, g in zip(parameters, gradients, strict=False):
            p -= 0.02 * g
        expected = (fitted.personal_head @ fitted.extractor(image)[0]).softmax(0)
    found = predictor("ttt", make_fitted())
    torch.testing.assert_close(found.predict(image)[0], expected)
    sure = make("head", "ttt", HEADS, Predictor, make_fitted(), options.model_copy(update={"threshold": 1e-9}))
    torch.testing.assert_close(sure.predict(image), predictor("personal", make_fitted()).predict(image))
    alone = make("head", "ttt", HEADS, Predictor, make_fitted(), options.model_copy(update={"online": False}))
    torch.testing.assert_close(alone.predict(images[[3, 0]])[1], expected)
    assert not torch.allclose(predictor("ttt", make_fitted()).predict(images[[3, 0]])[1], expected, atol=1e-5)


def test_memo_and_fedthe_plus_without_a_step_worth_it(make_fitted: Make, images: Tensor) -> None:
    small = 1e-12
    for name, plain, options in (
        ("memo", "personal", MEMOOptions(learning_rate=small, views=2)),
        ("fedthe-plus", "fedthe", FedTHEPlusOptions(tune_rate=small, views=2)),
    ):
        tuned = make("head", name, HEADS, Predictor, make_fitted(), options).predict(images[:5])
        torch.testing.assert_close(tuned, predictor(plain, make_fitted()).predict(images[:5]))


def test_fedthe_plus_follows_the_entropy_of_the_mixture(make_fitted: Make, images: Tensor) -> None:
    options = FedTHEPlusOptions(tune_rate=0.3, tune_steps=20, views=4)
    tuned = make("head", "fedthe-plus", HEADS, Predictor, make_fitted(), options).predict(images[:6])
    plain = predictor("fedthe", make_fitted()).predict(images[:6])

    def uncertainty(p: Tensor) -> float:
        return float(-(p * p.clamp(min=1e-12).log()).sum(1).mean())

    assert uncertainty(tuned) < 0.8 * uncertainty(plain)


def test_a_step_of_fedthe_plus(make_fitted: Make, images: Tensor) -> None:
    fitted, rate = make_fitted(), 0.2
    found = make(
        "head", "fedthe-plus", HEADS, Predictor, make_fitted(), FedTHEPlusOptions(tune_rate=rate, tune_steps=2, views=6)
    )
    found.identity = (5, "client-03")
    probabilities = found.predict(images[:3])
    for place in (0, 2):
        generator, w = torch_rng(5, "client-03", "fedthe-plus", place), found.weights[place]
        extractor = deepcopy(fitted.extractor).requires_grad_(True)
        heads = [head.clone().requires_grad_(True) for head in (fitted.global_head, fitted.personal_head)]
        tuned = [*extractor.parameters(), *heads]

        def mixture(x: Tensor, extractor=extractor, heads=heads, w=w) -> Tensor:
            z = extractor(x)
            return (w * z @ heads[0].T + (1 - w) * z @ heads[1].T).softmax(1)

        for _ in range(2):
            views = augmix(crop_and_flip(images[place].expand(6, -1, -1, -1), generator), generator)
            mean = mixture(views).mean(0)
            gradients = torch.autograd.grad(-(mean * mean.log()).sum(), tuned)
            with torch.no_grad():
                for p, g in zip(tuned, gradients, strict=True):
                    p -= rate * g
        torch.testing.assert_close(probabilities[place], mixture(images[place : place + 1])[0].detach())


def test_memo_is_the_adapter_on_the_personal_model(make_fitted: Make, images: Tensor) -> None:
    class Model(torch.nn.Module):
        def __init__(self, fitted: Fitted) -> None:
            super().__init__()
            self.extractor, self.head = fitted.extractor, torch.nn.Parameter(fitted.personal_head)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.extractor(x), self.head)

    adapter = memo.MEMO(Model(make_fitted()), MEMOOptions(learning_rate=0.05, steps=2, views=4))
    adapter.identity = (5, "client-03")
    expected = torch.cat([adapter.adapt(images[i : i + 1]) for i in range(3)]).softmax(1)
    found = predictor("memo", make_fitted())
    assert isinstance(found, MEMO)
    torch.testing.assert_close(found.predict(images[:3]), expected)


def test_recipes() -> None:
    recipes = {name: make_recipe(name, RunConfig.from_flat({"btfl.sparsity": 1e-3}).options(name)) for name in HEADS}
    assert recipes.pop("btfl") == Recipe(sparsity=1e-3)
    assert recipes.pop("ttt") == Recipe(rotation=True)
    assert recipes.pop("fedrep") == Recipe(heads="fedrep")
    assert recipes.pop("fedrod") == Recipe(loss="balanced", heads="fedrod")
    assert {recipes.pop("fedthe"), recipes.pop("fedthe-plus")} == {Recipe(loss="balanced")}
    assert set(recipes.values()) == {Recipe()}


def make_recipe(name: str, options: Options) -> Recipe:
    from fedtta_flwr.resolve import resolve

    found: Recipe = resolve("head", name, HEADS).recipe(options)
    return found


def test_what_is_missing_is_said(make_fitted: Make) -> None:
    fitted = make_fitted()
    del fitted.statistics["labels"]
    with pytest.raises(ConfigError, match="head KNNPer: training left no labels; train again"):
        predictor("knn-per", fitted)
    bad = Fitted(fitted.extractor, fitted.global_head, fitted.personal_head[:2], fitted.statistics)
    with pytest.raises(ConfigError, match=r"global head \[4, 12\], personal head \[2, 12\]"):
        predictor("personal", bad)
