"""BatchNorm on batch statistics without touching its buffers, and what the base class keeps of a local state."""

import pytest
import torch
from torch import nn

from fedtta_flwr.adaptation.base import Adapter, Draws, State, reshape_in_place
from fedtta_flwr.adaptation.norms import affine_parameters, batch_statistics
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.options import NoOptions
from fedtta_flwr.workbench import make_adapter


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.5])
def test_the_output_is_that_of_train_mode_and_only_the_statistics_may_move(tiny, images, track, momentum) -> None:
    model, reference, x = tiny().eval(), tiny(), images(5)
    reference.drop.eval()
    for bn in (reference.bn1, reference.bn2):
        bn.momentum = 0.1 if momentum is None else momentum
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with batch_statistics(model, track=track, momentum=momentum):
        torch.testing.assert_close(model(x), reference(x))
        assert not model.drop.training
    expected = reference.state_dict() if track else before
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())
    assert torch.equal(model(x), model.eval()(x))
    assert all(bn.track_running_stats and bn.momentum == 0.1 for bn in (model.bn1, model.bn2))


@pytest.mark.parametrize("affine", [True, False])
def test_the_gradients_are_those_of_train_mode(affine) -> None:
    layer = nn.BatchNorm2d(3, affine=affine, dtype=torch.float64).eval()
    h = torch.randn((4, 3, 5, 2), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    inputs = [h, *layer.parameters()]
    with torch.no_grad():
        for p in inputs[1:]:
            p.uniform_(0.5, 1.5)

    def gradients(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out.pow(3).sum(), inputs)

    with batch_statistics(layer):
        found = gradients(layer(h))
    torch.testing.assert_close(found, gradients(layer.train()(h)))


def test_the_layers_are_as_before_after_an_exception(tiny, images) -> None:
    model = tiny().eval()
    with pytest.raises(RuntimeError), batch_statistics(model):
        model(images(2)[:, :2])
    for bn in (model.bn1, model.bn2):
        assert bn.track_running_stats
        assert not bn.training
        assert not bn._forward_pre_hooks


@pytest.mark.parametrize("adapter", ["bbn", "rotta", "note"])
def test_who_needs_those_of_batch_norm_says_so(adapter: str) -> None:
    """A LayerNorm has some, which are of no use to it."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, affine=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(4),
        nn.Linear(4, 5),
    )
    with pytest.raises(ConfigError, match=f"^adapter = '{adapter}': Sequential has no BatchNorm layer with affine p"):
        make_adapter(RunConfig.from_flat({"adapter": adapter}), model.eval())


def test_affine_parameters_are_the_models_own() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)), nn.LayerNorm(2, bias=False)
    )
    found = affine_parameters(model, "tent")
    assert list(found) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight"]
    assert found["1.0.bias"] is model[1][0].bias


class Counting(Adapter):
    """Counts samples in its local state, remembers the last image, draws numbers; fails on demand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, NoOptions())
        self.counts = torch.tensor([3, 0])
        self.image = torch.zeros(0)
        self.draws = Draws(self, "test")
        self.keep({"counts": self.counts})
        self.keep({"image": self.image}, growing=True)

    def select(self) -> State:
        return {}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.counts[1] += len(x)
        reshape_in_place(self.image, x.shape[1:])
        self.image.copy_(x[-1])
        return self.predict(x) + torch.rand((), generator=self.draws.next())


def test_local_state_is_undone_saved_and_begun_anew(tiny, images) -> None:
    adapter = Counting(tiny())
    first = adapter.adapt(images(4))
    local = {name: t.clone() for name, t in adapter.local_state().items()}
    assert local["counts"].tolist() == [3, 4]
    assert torch.equal(local["image"], images(4)[-1])
    x = images(2, size=8)
    x[0, 0, 0, 0] = torch.nan
    adapter.adapt(x)  # another size, and not finite: the shape is undone as well
    assert adapter.rolled_back == 1
    assert all(torch.equal(t, local[name]) for name, t in adapter.local_state().items())
    second = adapter.adapt(images(4))
    assert not torch.equal(first, second)
    adapter.load_local_state(local)
    assert torch.equal(adapter.adapt(images(4)), second)
    adapter.reset({})
    assert adapter.local_state()["counts"].tolist() == [3, 0]
    assert adapter.local_state()["image"].shape == (0,)
    assert torch.equal(adapter.adapt(images(4)), first)


def test_the_numbers_drawn_depend_on_seed_and_client(tiny, images) -> None:
    results = []
    for identity in ((0,), (1,), (0, "client-01"), (0, "client-02"), (0, "client-01")):
        adapter = Counting(tiny())
        adapter.identity = identity
        results.append(adapter.adapt(images(2)))
    assert torch.equal(results[2], results[4])
    assert len({tuple(r.flatten().tolist()) for r in results}) == 4


def test_a_wrong_local_state_is_refused_before_anything_is_installed(tiny) -> None:
    adapter = Counting(tiny())
    right = {name: t + 1 for name, t in adapter.local_state().items()}
    with pytest.raises(CheckpointError, match="first that differ: image"):
        adapter.load_local_state({name: t for name, t in right.items() if name != "image"})
    with pytest.raises(CheckpointError, match=r"counts has shape \[3\], expected \[2\]; .* growing=True \(docs/"):
        adapter.load_local_state(right | {"counts": torch.zeros(3)})
    assert adapter.local_state()["counts"].tolist() == [3, 0]
