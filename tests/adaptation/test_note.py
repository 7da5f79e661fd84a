"""NOTE: its normalisation and its memory against the equations by plain loops, and how the stream is cut."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.note import NOTE
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import NOTEOptions

NAMES = ["bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"]


def note(model: nn.Module, **options) -> NOTE:
    return NOTE(model, NOTEOptions(**{"capacity": 6, "update_every": 5, "learning_rate": 0.01} | options))


def mean_and_variance(values: list[Tensor]) -> tuple[Tensor, Tensor]:
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def shrunk(d: Tensor, by: Tensor) -> Tensor:
    if d > by:
        return d - by
    return d + by if d < -by else 0 * d


def instance_aware(h: Tensor, bn: dict[str, Tensor], k: float, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output, and the batch's moments; by loops over instances and channels."""
    out, means, variances = torch.zeros_like(h), [], []
    pixels = h.shape[2] * h.shape[3]
    for c in range(h.shape[1]):
        mean, variance = bn["running_mean"][c], bn["running_var"][c]
        if training:
            mean, variance = mean_and_variance(list(h[:, c].flatten()))
        means.append(mean.detach())
        variances.append(variance.detach())
        for b in range(len(h)):
            own_mean, own_variance = mean_and_variance(list(h[b, c].flatten()))
            spread = variance + 1e-5
            mu = mean + shrunk(own_mean - mean, k * (spread / pixels).sqrt())
            sigma2 = variance + shrunk(own_variance - variance, k * spread * math.sqrt(2 / (pixels - 1)))
            sigma2 = sigma2 if sigma2 > 0 else 0 * sigma2
            out[b, c] = (h[b, c] - mu) / (sigma2 + 1e-5).sqrt() * bn["weight"][c] + bn["bias"][c]
    return out, torch.stack(means), torch.stack(variances)


class Oracle:
    """The whole method on the tiny network, sample by sample."""

    def __init__(self, model: nn.Module, options: NOTEOptions) -> None:
        self.p = {name: t.detach().clone() for name, t in model.state_dict().items()}
        self.options = options
        self.memory: list[tuple[Tensor, int]] = []
        self.seen: dict[int, int] = {}
        self.moments = {name: (torch.zeros_like(self.p[name]), torch.zeros_like(self.p[name])) for name in NAMES}
        self.steps = self.count = 0

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        h = x
        for number, stride in ((1, 1), (2, 2)):
            layer = f"bn{number}."
            bn = {name.removeprefix(layer): t for name, t in self.p.items() if name.startswith(layer)}
            h = nn.functional.conv2d(h, self.p[f"conv{number}.weight"], stride=stride, padding=1)
            h, mean, variance = instance_aware(h, bn, self.options.shrinkage, training)
            h = h.clamp(min=0)
            if training:
                m = self.options.momentum
                self.p[layer + "running_mean"] = (1 - m) * bn["running_mean"] + m * mean
                self.p[layer + "running_var"] = (1 - m) * bn["running_var"] + m * variance
        return h.mean(dim=(2, 3)) @ self.p["head.weight"].T + self.p["head.bias"]

    def sample(self, image: Tensor, adapter: NOTE) -> Tensor:
        """One sample of the stream; the adapter is asked for its random generators only."""
        logits = self.logits(image[None])[0]
        label = int(logits.argmax())
        self.count += 1
        self.seen[label] = self.seen.get(label, 0) + 1
        self.remember(image, label, adapter.generator("note", self.count))
        if self.count % self.options.update_every == 0:
            self.learn()
        return logits.detach()

    def remember(self, image: Tensor, label: int, generator: torch.Generator) -> None:
        if len(self.memory) < self.options.capacity:
            self.memory.append((image, label))
            return
        counts: dict[int, int] = {}
        for _, c in self.memory:
            counts[c] = counts.get(c, 0) + 1
        frequent = sorted(c for c in counts if counts[c] == max(counts.values()))
        if label not in frequent:
            victim = frequent[int(torch.randint(len(frequent), (), generator=generator))]
        elif torch.rand((), generator=generator).item() < counts[label] / self.seen[label]:
            victim = label
        else:
            return
        places = [i for i, (_, c) in enumerate(self.memory) if c == victim]
        self.memory[places[int(torch.randint(len(places), (), generator=generator))]] = (image, label)

    def learn(self) -> None:
        for name in NAMES:
            self.p[name].requires_grad_()
        logits = self.logits(torch.stack([image for image, _ in self.memory]), training=True)
        rows = [(row / self.options.temperature).softmax(dim=0) for row in logits]
        loss = sum(-sum(q * q.log() for q in row) for row in rows) / len(rows)
        gradients = torch.autograd.grad(loss, [self.p[name] for name in NAMES])
        self.steps += 1
        for name, g in zip(NAMES, gradients, strict=True):
            m, v = self.moments[name]
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            self.moments[name] = (m, v)
            change = (m / (1 - 0.9**self.steps)) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            self.p[name] = (self.p[name] - self.options.learning_rate * change).detach()


@pytest.mark.parametrize("shrinkage", [0.0, 0.7, 4.0])
def test_a_stream_is_adapted_to_as_by_the_equations(tiny, images, shrinkage: float) -> None:
    adapter = note(tiny(torch.float64), shrinkage=shrinkage, temperature=1.5, momentum=0.1)
    oracle = Oracle(tiny(torch.float64), adapter.options)
    for seed, count in enumerate((4, 1, 7, 6)):
        x = images(count, size=4, seed=seed, dtype=torch.float64)
        expected = torch.stack([oracle.sample(image, adapter) for image in x])
        torch.testing.assert_close(adapter.adapt(x), expected, rtol=1e-7, atol=1e-9)
    for name, t in adapter.adapted_state().items():
        torch.testing.assert_close(t, oracle.p[name], rtol=1e-6, atol=1e-8)
    local = adapter.local_state()
    assert local["memory.labels"].tolist() == [label for _, label in oracle.memory]
    assert torch.equal(local["memory.images"], torch.stack([image for image, _ in oracle.memory]))
    assert local["memory.seen"].tolist() == [oracle.seen.get(c, 0) for c in range(3)]
    assert oracle.steps == 3


def test_it_does_not_matter_how_the_stream_is_cut_into_batches(tiny, images) -> None:
    x = images(23, dtype=torch.float64)
    results = []
    for size in (1, 4, 5, 23):
        adapter = note(tiny(torch.float64))
        results.append(torch.cat([adapter.adapt(part) for part in x.split(size)]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-7, atol=1e-9)


def test_endless_shrinkage_is_batch_norm_and_none_is_instance_norm(tiny, images) -> None:
    x = images(3, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(note(tiny(torch.float64), shrinkage=1e9).predict(x), tiny(torch.float64).eval()(x))
    layer = nn.BatchNorm2d(3).double()
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(108, 2)).double()
    adapter, seen = note(model, shrinkage=0.0), []
    model[1].register_forward_hook(lambda *args: seen.append(args[1][0]))
    adapter.predict(x)
    variance, mean = torch.var_mean(x, dim=(2, 3), keepdim=True)
    torch.testing.assert_close(seen[0], (x - mean) / (variance + layer.eps).sqrt())


def test_the_memory_is_balanced_over_predictions(tiny) -> None:
    """A stream of one class, then few of others: the others displace the first."""
    adapter = note(tiny(), capacity=6)
    image = torch.zeros(1, 3, 4, 4)
    for label in [0] * 30 + [1] * 3 + [2] * 2:
        adapter._remember(image, [label])
        labels = adapter.local_state()["memory.labels"].tolist()
        assert len(labels) == 6
    assert sorted(labels) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_within_a_class_every_sample_of_the_stream_stays_with_the_same_probability(tiny, classes: int) -> None:
    """Reservoir sampling: of 12 samples of each class, a memory of 4 a class keeps each in a third of the runs."""
    count = 12 * classes
    kept = torch.zeros(count)
    x = torch.arange(float(count)).view(count, 1, 1, 1).expand(count, 3, 2, 2)
    for run in range(300):
        adapter = note(tiny(), capacity=4 * classes)
        adapter.identity = (run,)
        adapter._remember(x, list(range(classes)) * 12)
        kept[adapter.local_state()["memory.images"][:, 0, 0, 0].long()] += 1
    assert kept.sum() == 300 * 4 * classes
    assert ((kept - 100).abs() < 35).all()  # four standard deviations of a binomial


def test_images_of_another_size_empty_the_memory(tiny, images) -> None:
    adapter = note(tiny())
    adapter.adapt(images(4))
    adapter.adapt(images(2, size=8))
    local = adapter.local_state()
    assert local["memory.images"].shape == (6, 3, 8, 8)
    assert sum(label >= 0 for label in local["memory.labels"].tolist()) == 2
    assert adapter.adapt(images(9, size=8)).isfinite().all()


def test_statistics_change_only_from_the_memory(tiny, images) -> None:
    adapter = note(tiny())
    before = {name: t.clone() for name, t in adapter.adapted_state().items()}
    adapter.adapt(images(4))  # no step is due
    adapter.predict(images(8, seed=1))
    assert all(torch.equal(t, before[name]) for name, t in adapter.adapted_state().items())
    adapter.adapt(images(1, seed=2))
    assert not any(torch.equal(t, before[name]) for name, t in adapter.adapted_state().items())


def test_a_model_without_batch_norm_is_refused(no_norm) -> None:
    grouped = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3))
    for model in (no_norm(), grouped):
        with pytest.raises(ConfigError, match="adapter = 'note'"):
            note(model)
