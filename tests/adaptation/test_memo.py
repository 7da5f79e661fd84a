"""MEMO against its equations: every image alone, one step on the marginal entropy, forgotten afterwards."""

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.memo import MEMO
from fedtta_flwr.options import MEMOOptions

RATE = 0.5


def logits_of(p: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
    """The tiny network with running statistics, as a function of its parameters."""
    for number, stride in ((1, 1), (2, 2)):
        x = nn.functional.conv2d(x, p[f"conv{number}.weight"], stride=stride, padding=1)
        mean, variance = (buffers[f"bn{number}.running_{kind}"].view(1, -1, 1, 1) for kind in ("mean", "var"))
        scale, shift = (p[f"bn{number}.{kind}"].view(1, -1, 1, 1) for kind in ("weight", "bias"))
        x = ((x - mean) / (variance + 1e-5).sqrt() * scale + shift).clamp(min=0)
    return x.mean(dim=(2, 3)) @ p["head.weight"].T + p["head.bias"]


@pytest.mark.parametrize("steps", [1, 3])
def test_logits_are_those_of_the_equations(tiny, images, steps: int) -> None:
    adapter = MEMO(tiny(torch.float64), MEMOOptions(learning_rate=RATE, views=4, steps=steps))
    buffers = dict(tiny(torch.float64).named_buffers())
    for seed, count in ((0, 3), (1, 1), (2, 2)):
        x = images(count, seed=seed, dtype=torch.float64)
        generator, rows = adapter.generator("memo", seed), []
        for image in x:
            views = adapter.views(image[None], generator)
            p = {name: t.detach().clone().requires_grad_() for name, t in tiny(torch.float64).named_parameters()}
            for _ in range(steps):
                mean = sum(row.exp() / row.exp().sum() for row in logits_of(p, buffers, views)) / len(views)
                loss = -sum(q * q.log() for q in mean)
                gradients = torch.autograd.grad(loss, list(p.values()))
                p = {
                    name: (t - RATE * g).detach().requires_grad_()
                    for (name, t), g in zip(p.items(), gradients, strict=True)
                }
            rows.append(logits_of(p, buffers, image[None])[0].detach())
        torch.testing.assert_close(adapter.adapt(x), torch.stack(rows), rtol=1e-8, atol=1e-10)


def test_nothing_is_left_and_nothing_travels(tiny, images) -> None:
    model = tiny()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    adapter = MEMO(model, MEMOOptions(learning_rate=RATE, views=3))
    plain = adapter.predict(images(4))
    assert not torch.allclose(adapter.adapt(images(4)), plain)
    assert torch.equal(adapter.predict(images(4)), plain)
    assert adapter.adapted_state() == {}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_nothing_is_left_of_a_step_that_fails(tiny, images) -> None:
    adapter = MEMO(tiny(), MEMOOptions(learning_rate=1e30, views=3))
    plain = adapter.predict(images(4))
    assert torch.equal(adapter.adapt(images(4)), plain)
    assert adapter.rolled_back == 1


def test_an_image_does_not_see_its_batch(tiny, images) -> None:
    """With the same views, an image's logits are the same alone and among others."""
    x = images(3)
    a, b = (MEMO(tiny(), MEMOOptions(views=2)) for _ in range(2))
    torch.testing.assert_close(a.adapt(x)[:1], b.adapt(x[:1]), rtol=1e-5, atol=1e-6)


def test_the_marginal_entropy_goes_down(tiny, images) -> None:
    adapter = MEMO(tiny(), MEMOOptions(views=8))
    views = adapter.views(images(1), torch.Generator().manual_seed(0))
    assert views.shape == (8, 3, 6, 6)
    assert bool(((views >= 0) & (views <= 1)).all())

    def marginal(logits: Tensor) -> float:
        mean = logits.softmax(dim=1).mean(dim=0)
        return -(mean * mean.log()).sum().item()

    generator = adapter.generator("memo", 0)
    own = adapter.views(images(1), generator)
    before = marginal(adapter.predict(own))
    adapter._one(images(1), adapter.generator("memo", 0))  # leaves its step to be looked at
    assert marginal(adapter.predict(own)) < before
