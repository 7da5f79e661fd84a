"""CoTTA against its equations, on three batches in float64."""

import pytest
import torch

from fedtta_flwr.adaptation import cotta
from fedtta_flwr.adaptation.cotta import CoTTA
from fedtta_flwr.options import CoTTAOptions
from tests.adaptation.oracle import Adam, by_batch, cross_entropy, detached, leaves, network, softmax

CLOSED, OPEN = 0.0, 1.0


def adapter_of(model, **options) -> CoTTA:
    return CoTTA(model, CoTTAOptions(**({"learning_rate": 0.01, "augmentations": 3} | options)))


@pytest.fixture
def views(monkeypatch) -> list[int]:
    """Replace the augmentation by one that is easily repeated; return the list of its calls' batch sizes."""
    calls: list[int] = []

    def view(x, generator):
        calls.append(len(x))
        return x.flip(-1) * (0.5 + 0.1 * (len(calls) % 3))

    monkeypatch.setattr(cotta, "strong", view)
    return calls


@pytest.mark.parametrize("threshold", [CLOSED, OPEN])
def test_three_steps_are_those_of_the_equations(tiny, images, views, threshold: float) -> None:
    momentum, restore = 0.9, 0.3
    adapter = adapter_of(
        tiny(torch.float64), confidence=threshold, teacher_momentum=momentum, restore=restore, share_teacher=False
    )
    source = detached(leaves(tiny(torch.float64)))
    teacher = detached(source)
    # What the student receives is not the teacher's: otherwise the first gradient would be zero but for rounding.
    student = {n: (t + 0.1 * torch.cos(torch.arange(t.numel())).view_as(t)).requires_grad_() for n, t in source.items()}
    adapter.load_adapted_state(student)
    adam, calls = Adam(list(student), 0.01), 0
    for number in range(3):
        x = images(4, seed=number, dtype=torch.float64)
        targets = []
        for _ in range(3 if threshold == OPEN else 1):
            calls += 1
            view = x.flip(-1) * (0.5 + 0.1 * (calls % 3)) if threshold == OPEN else x
            targets.append(network(teacher, view, by_batch))
        target = sum(targets) / len(targets)
        logits = network(student, x, by_batch)
        loss = sum(cross_entropy(target[b], logits[b]) for b in range(4)) / 4
        student = adam.step(student, loss)
        teacher = {n: momentum * teacher[n] + (1 - momentum) * student[n].detach() for n in teacher}
        uniform = torch.rand(sum(p.numel() for p in student.values()), generator=adapter.generator("cotta", number))
        for name, p in student.items():
            chosen, uniform = uniform[: p.numel()].view_as(p) < restore, uniform[p.numel() :]
            student[name] = torch.where(chosen, source[name], p.detach()).requires_grad_()

        torch.testing.assert_close(adapter.adapt(x), target, rtol=1e-9, atol=1e-11)
        for name, p in student.items():
            torch.testing.assert_close(adapter.adapted_state()[name], p.detach(), rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(adapter.local_state()[f"teacher.{name}"], teacher[name], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(adapter.predict(x), network(teacher, x, by_batch), rtol=1e-9, atol=1e-11)
    assert views == ([4] * 9 if threshold == OPEN else [])


def test_the_gate_compares_the_sources_mean_confidence(tiny, images, views) -> None:
    x = images(6)
    source = detached(leaves(tiny().double()))
    logits = network(source, x.double(), by_batch)
    confidence = float(sum(softmax(row).max() for row in logits) / 6)
    for threshold, asked in ((confidence - 1e-4, 0), (confidence + 1e-4, 3)):
        views.clear()
        adapter_of(tiny(), confidence=threshold).adapt(x)
        assert len(views) == asked
    # the source's, whatever the student and the teacher have become
    adapter = adapter_of(tiny(), confidence=confidence + 1e-4)
    for name, t in adapter.adapted_state().items():
        if name.endswith("head.bias"):
            t.add_(torch.tensor([100.0, 0.0, 0.0]))
    views.clear()
    adapter.adapt(x)
    assert len(views) == 3


def test_restoring_all_none_and_some(tiny, images) -> None:
    source = detached(leaves(tiny()))
    count = sum(t.numel() for t in source.values())
    for share in (0.0, 0.2, 1.0):
        adapter = adapter_of(tiny(), restore=share)
        adapter.adapt(images(6))
        # Adam's first step moves every weight with a gradient by the learning rate; the head's bias surely has one.
        equal = sum(int((adapter.adapted_state()[name] == t).sum()) for name, t in source.items())
        if share == 1.0:
            assert equal == count
        assert (equal - share * count) ** 2 <= 25 * count * max(share * (1 - share), 0.01)


def test_draws_depend_on_client_and_step_alone(tiny, images) -> None:
    def student(identity, *seeds) -> list[torch.Tensor]:
        adapter = adapter_of(tiny(), restore=0.5)
        adapter.identity = identity
        for seed in seeds:
            adapter.adapt(images(5, seed=seed))
        return [t.clone() for t in adapter.adapted_state().values()]

    def same(a, b) -> bool:
        return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))

    torch.manual_seed(1)
    first = student((0, "a"), 1, 2)
    torch.manual_seed(2)
    assert same(first, student((0, "a"), 1, 2))
    assert not same(first, student((0, "b"), 1, 2))
    assert not same(first, student((1, "a"), 1, 2))


def test_where_the_teacher_lives(tiny) -> None:
    for shared in (True, False):
        adapter = adapter_of(tiny(), share_teacher=shared)
        names = [name for name, _ in tiny().named_parameters()]
        travels = [name for name in adapter.adapted_state() if name.startswith("teacher.")]
        stays = [name for name in adapter.local_state() if name.startswith("teacher.")]
        assert [name for name in adapter.adapted_state() if name not in travels] == names
        assert (travels if shared else stays) == [f"teacher.{name}" for name in names]
        assert not (stays if shared else travels)


def test_running_statistics_stay_and_do_not_matter(tiny, images) -> None:
    model, other = tiny(), tiny()
    with torch.no_grad():
        other.bn1.running_mean.add_(5.0)
    a, b = adapter_of(model), adapter_of(other)
    assert torch.equal(a.adapt(images(4)), b.adapt(images(4)))
    assert torch.equal(model.bn1.running_mean, tiny().bn1.running_mean)
    assert int(model.bn1.num_batches_tracked) == 0


def test_works_without_batch_norm(no_norm, images) -> None:
    adapter = adapter_of(no_norm())
    assert adapter.adapt(images(3)).isfinite().all()
    assert adapter.rolled_back == 0
