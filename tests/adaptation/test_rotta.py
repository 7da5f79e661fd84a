"""RoTTA: its memory against the algorithm sample by sample, its steps against the equations in float64."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta_flwr.adaptation import rotta
from fedtta_flwr.adaptation.cstu import CSTU
from fedtta_flwr.adaptation.rotta import RoTTA
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import RoTTAOptions
from tests.adaptation.oracle import Adam, by_moments, cross_entropy, detached, entropy, leaves, network, softmax


@dataclass
class Item:
    sample: int
    label: int
    entropy: float
    age: int = 0


class PlainMemory:
    """The paper's algorithm 1, one list of items per class."""

    def __init__(self, capacity: int, classes: int, by_age: float = 1.0, by_entropy: float = 1.0) -> None:
        self.capacity, self.classes, self.by_age, self.by_entropy = capacity, classes, by_age, by_entropy
        self.items: list[list[Item]] = [[] for _ in range(classes)]

    def score(self, item: Item) -> float:
        timeliness = 1 / (1 + math.exp(-item.age / self.capacity))
        return self.by_age * timeliness + self.by_entropy * item.entropy / math.log(self.classes)

    def add(self, item: Item) -> None:
        own = self.items[item.label]
        if len(own) < self.capacity / self.classes:
            if sum(map(len, self.items)) < self.capacity:
                own.append(item)
            else:
                most = max(map(len, self.items))
                self.replace([i for items in self.items if len(items) == most for i in items], item)
        else:
            self.replace(own, item)
        for i in self.all():
            i.age += 1

    def replace(self, candidates: list[Item], item: Item) -> None:
        worst = max(candidates, key=self.score)
        if self.score(worst) > self.score(item):
            self.items[worst.label].remove(worst)
            self.items[item.label].append(item)

    def all(self) -> list[Item]:
        return [i for items in self.items for i in items]


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 12),
    classes=st.integers(2, 15),
    favourite=st.floats(0, 1),
    weights=st.sampled_from([(1.0, 1.0), (0.0, 1.0), (0.3, 2.0)]),
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_the_memory_is_that_of_the_algorithm(capacity, classes, favourite, weights, cuts, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    memory, plain = CSTU(capacity, classes, *weights), PlainMemory(capacity, classes, *weights)
    samples, begin = {}, 0
    for count in cuts:
        labels = torch.randint(classes, (count,), generator=g)
        labels[torch.rand(count, generator=g) < favourite] = 0
        entropies = torch.rand(count, generator=g, dtype=torch.float64) * math.log(classes)
        samples |= {place: begin + i for place, i in memory.insert(labels, entropies).items()}
        for i in range(count):
            plain.add(Item(begin + i, int(labels[i]), float(entropies[i])))
        begin += count
        found = {
            (samples[p], int(memory.labels[p]), float(memory.uncertainties[p]), int(memory.ages[p]))
            for p in memory.occupied().tolist()
        }
        assert found == {(i.sample, i.label, i.entropy, i.age) for i in plain.all()}
        assert len(found) <= capacity


def test_more_classes_than_places_keep_one_of_each_at_most() -> None:
    memory = CSTU(4, 10)
    memory.insert(torch.arange(30) % 10, torch.linspace(2, 0.1, 30))
    labels = memory.labels.tolist()
    assert len(set(labels)) == 4


def moving(moments: dict[str, torch.Tensor], alpha: float):
    """RobustBN's training pass, channel by channel: moves the moments that it is given."""

    def normalise(name: str, h: torch.Tensor) -> torch.Tensor:
        channels = []
        for c in range(h.shape[1]):
            values = h[:, c]
            mean = values.sum() / values.numel()
            var = ((values - mean) ** 2).sum() / values.numel()
            mean = (1 - alpha) * moments[f"{name}.running_mean"][c] + alpha * mean
            var = (1 - alpha) * moments[f"{name}.running_var"][c] + alpha * var
            channels.append((values - mean) / (var + 1e-5).sqrt())
            moments[f"{name}.running_mean"][c] = mean.detach()
            moments[f"{name}.running_var"][c] = var.detach()
        return torch.stack(channels, dim=1)

    return normalise


@pytest.fixture
def mirrored(monkeypatch) -> None:
    monkeypatch.setattr(rotta, "strong", lambda x, generator: x.flip(-1) * 0.8)


def test_steps_are_those_of_the_equations(tiny, images, mirrored) -> None:
    alpha, nu, every, capacity = 0.2, 0.3, 5, 4
    adapter = RoTTA(
        tiny(torch.float64),
        RoTTAOptions(
            learning_rate=0.02, alpha=alpha, nu=nu, update_every=every, capacity=capacity, share_teacher=False
        ),
    )
    model = tiny(torch.float64)
    student = leaves(model)
    adapted = [name for name in student if "bn" in name]
    moments = {n: t.clone() for n, t in model.state_dict().items() if "running" in n}
    teacher, teacher_moments = detached(student), {n: t.clone() for n, t in moments.items()}
    adam, memory, seen = Adam(adapted, 0.02), PlainMemory(capacity, 3), []
    for seed, count in enumerate((4, 7, 1, 9)):
        x = images(count, seed=seed, dtype=torch.float64)
        expected = network(teacher, x, by_moments(teacher_moments))
        before = {n: t.clone() for n, t in adapter.adapted_state().items()}
        for b in range(count):
            seen.append(x[b])
            p = softmax(expected[b])
            memory.add(Item(len(seen) - 1, int(p.argmax()), float(-(p * (p + 1e-6).log()).sum())))
            if len(seen) % every:
                continue
            items = memory.all()
            kept = torch.stack([seen[i.sample] for i in items])
            target = network(teacher, kept, moving(teacher_moments, alpha)).detach()
            logits = network(student, kept.flip(-1) * 0.8, moving(moments, alpha))
            ages = [i.age / capacity for i in items]
            terms = [
                math.exp(-a) / (1 + math.exp(-a)) * cross_entropy(target[i], logits[i]) for i, a in enumerate(ages)
            ]
            student = adam.step(student, sum(terms) / len(terms))
            teacher = {n: (1 - nu) * teacher[n] + nu * student[n].detach() for n in teacher}

        torch.testing.assert_close(adapter.adapt(x), expected, rtol=1e-9, atol=1e-11)
        assert (seed == 0) == all(torch.equal(before[n], t) for n, t in adapter.adapted_state().items()) or seed == 2
        for name in adapted:
            torch.testing.assert_close(adapter.adapted_state()[name], student[name].detach(), rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(adapter.local_state()[f"teacher.{name}"], teacher[name], rtol=1e-7, atol=1e-9)
        for name, t in moments.items():
            torch.testing.assert_close(adapter.adapted_state()[name], t, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(
                adapter.local_state()[f"teacher.{name}"], teacher_moments[name], rtol=1e-9, atol=1e-11
            )


def test_statistics_change_from_memory_samples_alone(tiny, images) -> None:
    """Whether batch A is only predicted does not matter; before a step is due, nothing moves."""
    adapter, other = (RoTTA(tiny(), RoTTAOptions(update_every=6, capacity=4)) for _ in range(2))
    other.predict(images(50, seed=9))
    for a in (adapter, other):
        a.adapt(images(5, seed=1))
    assert all(torch.equal(t, tiny().state_dict()[n]) for n, t in adapter.adapted_state().items() if n[:2] == "bn")
    for a in (adapter, other):
        a.adapt(images(3, seed=2))
    for name, t in adapter.adapted_state().items():
        assert torch.equal(t, other.adapted_state()[name])
    assert not torch.equal(adapter.adapted_state()["bn1.running_mean"], tiny().bn1.running_mean)
    assert len(adapter.memory.occupied()) <= 4


def test_a_batch_cut_in_parts_leaves_the_same_memory(tiny, images) -> None:
    whole, parts = (RoTTA(tiny(), RoTTAOptions(update_every=100, capacity=5)) for _ in range(2))
    x = images(12)
    whole.adapt(x)
    for part in x.split([5, 1, 6]):
        parts.adapt(part)
    for name, t in whole.local_state().items():
        assert torch.allclose(t.double(), parts.local_state()[name].double()), name


def test_images_of_another_size_empty_the_memory(tiny, images) -> None:
    adapter = RoTTA(tiny(), RoTTAOptions(update_every=4, capacity=5))
    adapter.adapt(images(3, size=6))
    adapter.adapt(images(3, size=8))
    assert adapter.images.shape == (5, 3, 8, 8)
    assert 1 <= len(adapter.memory.occupied()) <= 3


def test_where_the_teacher_lives(tiny) -> None:
    adapter = RoTTA(tiny(), RoTTAOptions())
    student = [name for name in adapter.adapted_state() if not name.startswith("teacher.")]
    assert sorted(student) == sorted(n for n in tiny().state_dict() if "bn" in n and not n.endswith("tracked"))
    assert [n for n in adapter.adapted_state() if n not in student] == [f"teacher.{n}" for n in student]
    assert not any(n.startswith("teacher") for n in adapter.local_state())


def test_a_model_without_batch_norm_is_refused_in_one_line(no_norm) -> None:
    with pytest.raises(ConfigError, match=r"rotta.*NoNorm") as caught:
        RoTTA(no_norm(), RoTTAOptions())
    assert "\n" not in str(caught.value)


def test_entropy_of_the_oracle() -> None:
    assert entropy(torch.zeros(4, dtype=torch.float64)) == pytest.approx(math.log(4))
