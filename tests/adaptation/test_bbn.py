"""BBN against its equations on a tiny network in float64, variant by variant."""

import math

import pytest
import torch

from fedtta_flwr.adaptation import bbn
from fedtta_flwr.adaptation.bbn import BBN
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import BBNOptions
from tests.adaptation.oracle import Adam, detached, entropy, leaves, network, softmax
from tests.adaptation.test_balanced_norm import by_loops

F64 = torch.float64
LAYERS = ("bn1", "bn2")


class Statistics:
    """Per-class and balanced statistics of one role, by plain formulas."""

    def __init__(self, model, unbiased: bool) -> None:
        layers = {name: model.get_submodule(name) for name in LAYERS}
        self.means = {n: torch.stack([layer.running_mean.clone()] * 3) for n, layer in layers.items()}
        self.vars = {n: torch.stack([layer.running_var.clone()] * 3) for n, layer in layers.items()}
        self.mean = {n: layer.running_mean.clone() for n, layer in layers.items()}
        self.var = {n: layer.running_var.clone() for n, layer in layers.items()}
        self.unbiased = unbiased

    def frozen(self, name: str, h):
        return (h - self.mean[name].view(1, -1, 1, 1)) / (self.var[name].view(1, -1, 1, 1) + 1e-5).sqrt()

    def moving(self, labels: list[int], eta: float, share: float):
        def normalise(name: str, h):
            means, variances = by_loops(self.means[name], self.vars[name], h, labels, eta, share)
            mean = sum(means) / 3
            var = sum(variances) / 3 + sum((m - mean) ** 2 for m in means) / (2 if self.unbiased else 3)
            self.means[name], self.vars[name] = means.detach(), variances.detach()
            self.mean[name], self.var[name] = mean.detach(), var.detach()
            return (h - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + 1e-5).sqrt()

        return normalise

    def named(self, prefix: str = "") -> dict[str, torch.Tensor]:
        kind = prefix or "running_"
        return {
            f"{n}.{kind}{what}": values[n] for n in LAYERS for what, values in (("mean", self.mean), ("var", self.var))
        } | {
            f"{n}.{prefix}class_{what}": values[n]
            for n in LAYERS
            for what, values in (("mean", self.means), ("var", self.vars))
        }


@pytest.fixture
def mirrored(monkeypatch) -> None:
    monkeypatch.setattr(bbn, "strong", lambda x, generator: x.flip(-1) * 0.8)


def sharpened(model):
    """Logits so far apart that classes and certainty differ from sample to sample."""
    x = torch.rand(8, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=F64)
    with torch.no_grad():
        model.head.weight.mul_(200)
        model.head.bias.sub_(model.eval()(x).mean(dim=0))
    return model


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t.detach(), rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


VARIANTS = {
    "tribe": {},
    "share": {"class_agnostic": 0.3, "momentum": 0.3},
    "unbiased": {"unbiased": True, "momentum": 0.2},
    "paper": {"literal_views": True, "average": "batch", "consistency_on": "probabilities", "source": "fixed"},
    "strict": {"entropy_threshold": 0.7},
    "paper-unsure": {"literal_views": True, "average": "batch", "entropy_threshold": 1e-6},
    "at-home": {"share_class_stats": False, "share_teacher": False},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_steps_are_those_of_the_equations(tiny, images, mirrored, variant: dict) -> None:
    options = BBNOptions(**({"learning_rate": 0.02, "momentum": 0.1, "entropy_threshold": 2.0} | variant))
    adapter, model = BBN(sharpened(tiny(F64)), options), sharpened(tiny(F64))
    params = leaves(model)
    source, adapted = detached(params), [name for name in params if "bn" in name]
    teacher_stats, student_stats, source_stats = (Statistics(model, options.unbiased) for _ in range(3))
    adam, kept_some = Adam(adapted, 0.02), []
    for seed, count in enumerate((5, 1, 7, 4)):
        x = images(count, seed=seed, dtype=F64)
        first = network(params, x, teacher_stats.frozen).detach()
        labels = [int(row.argmax()) for row in first]
        moves = labels, options.momentum, options.class_agnostic
        view = x.flip(-1) * 0.8
        for_teacher, for_student = (view, x) if options.literal_views else (x, view)
        fixed = options.source == "fixed"
        anchor = network(source, x, source_stats.frozen if fixed else source_stats.moving(*moves))
        teacher = network(params, for_teacher, teacher_stats.moving(*moves))
        student = network(params, for_student, student_stats.moving(*moves))
        kept = [b for b in range(count) if entropy(teacher[b]) < options.entropy_threshold * math.log(3)]
        kept_some.append(len(kept))
        if kept or options.average == "batch":
            distilled = sum(-softmax(student[b])[int(teacher[b].argmax())].log() for b in kept)
            given = softmax if options.consistency_on == "probabilities" else (lambda row: row)
            distances = [((given(teacher[b]) - given(anchor[b])) ** 2).sum() / 3 for b in range(count)]
            if options.average == "batch":
                loss = distilled / count + 0.5 * sum(distances) / count
            else:
                loss = distilled / len(kept) + 0.5 * sum(distances[b] for b in kept) / len(kept)
            params = adam.step(params, loss)

        before = adapter.predict(x)
        reported = adapter.adapt(x)
        assert torch.equal(before, reported)
        torch.testing.assert_close(reported, first, rtol=1e-8, atol=1e-10)
        state = adapter.adapted_state() | adapter.local_state()
        check(state, {name: params[name] for name in adapted})
        check(state, student_stats.named() | teacher_stats.named("teacher_"))
        if not fixed:
            check(state, source_stats.named("source_"))
    if variant == VARIANTS["strict"]:
        assert min(kept_some) < max(kept_some)
    elif variant == VARIANTS["paper-unsure"]:
        assert kept_some == [0, 0, 0, 0]
    else:
        assert kept_some == [5, 1, 7, 4]


def test_a_teacher_that_is_sure_of_nothing_leaves_the_parameters(tiny, images) -> None:
    adapter = BBN(tiny(), BBNOptions(entropy_threshold=1e-6, momentum=0.5))
    for seed in range(2):
        adapter.adapt(images(6, seed=seed))
    assert not any(adapter.local_state()[name].any() for name in adapter.local_state() if "optimizer" in name)
    for name in ("bn1.weight", "bn2.bias"):
        assert torch.equal(adapter.adapted_state()[name], tiny().get_parameter(name))
    for kind in ("running", "teacher"):  # the statistics have moved all the same
        assert not torch.equal(adapter.adapted_state()[f"bn1.{kind}_mean"], tiny().bn1.running_mean)
    assert adapter.rolled_back == 0


def names(adapter: BBN) -> set[str]:
    return {name.split(".")[1] for name in adapter.adapted_state()}


def test_what_travels(tiny) -> None:
    affine, balanced = {"weight", "bias"}, {"running_mean", "running_var"}
    per_class = {"class_mean", "class_var"}
    for share_class in (True, False):
        for share_teacher in (True, False):
            adapter = BBN(tiny(), BBNOptions(share_class_stats=share_class, share_teacher=share_teacher))
            expected = affine | balanced | (per_class if share_class else set())
            if share_teacher:
                expected |= {"teacher_mean", "teacher_var"}
                expected |= {"teacher_class_mean", "teacher_class_var"} if share_class else set()
            assert names(adapter) == expected
            everything = affine | balanced | per_class | {"teacher_mean", "teacher_var"}
            everything |= {"teacher_class_mean", "teacher_class_var"}
            at_home = {name.split(".")[1] for name in adapter.local_state() if name.startswith("bn")}
            assert {name for name in at_home if not name.startswith("source")} == everything - expected
    assert adapter.adapted_state()["bn2.running_mean"].shape == (5,)
    assert BBN(tiny(), BBNOptions()).adapted_state()["bn2.class_var"].shape == (3, 5)


def test_a_received_mixture_is_balanced_anew(tiny, images) -> None:
    a, b, mixed = (BBN(tiny(), BBNOptions(momentum=0.5)) for _ in range(3))
    a.adapt(images(6, seed=1))
    b.adapt(images(6, seed=2) * 0.3)
    mixture = {name: (t + b.adapted_state()[name]) / 2 for name, t in a.adapted_state().items()}
    mixed.load_adapted_state(mixture)
    state = mixed.adapted_state()
    for layer in LAYERS:
        for role, prefix in (("running_", ""), ("teacher_", "teacher_")):
            means, variances = state[f"{layer}.{prefix}class_mean"], state[f"{layer}.{prefix}class_var"]
            assert torch.equal(means, mixture[f"{layer}.{prefix}class_mean"])
            expected = variances.mean(dim=0) + means.var(dim=0, correction=0)
            torch.testing.assert_close(state[f"{layer}.{role}var"], expected)
            torch.testing.assert_close(state[f"{layer}.{role}mean"], mixture[f"{layer}.{role}mean"])
    # its own state is not changed by coming back
    own = {name: t.clone() for name, t in a.adapted_state().items()}
    a.load_adapted_state(own)
    assert all(torch.equal(t, own[name]) for name, t in a.adapted_state().items())


def test_a_mixture_reaches_the_predictions_if_the_teacher_travels(tiny, images) -> None:
    x = images(5, seed=3)
    for shared in (True, False):
        adapter, other = (BBN(tiny(), BBNOptions(momentum=0.5, share_teacher=shared)) for _ in range(2))
        other.adapt(images(6) * 0.2)
        affine = {n: t for n, t in adapter.adapted_state().items() if n.endswith(("weight", "bias"))}
        before = adapter.predict(x)
        adapter.load_adapted_state(other.adapted_state() | affine)
        assert torch.equal(before, adapter.predict(x)) is not shared


def test_it_begins_as_the_source(tiny, images) -> None:
    with torch.no_grad():
        expected = tiny().eval()(images(4))
    adapter = BBN(tiny(), BBNOptions())
    assert torch.equal(adapter.predict(images(4)), expected)
    assert torch.equal(adapter.adapt(images(4)), expected)


def test_an_absent_class_keeps_its_statistics(tiny, images) -> None:
    adapter = BBN(tiny(), BBNOptions(momentum=0.5))
    labels = set(adapter.adapt(images(4)).argmax(dim=1).tolist())
    absent = [k for k in range(3) if k not in labels]
    assert absent
    for layer in LAYERS:
        own = tiny().get_submodule(layer).running_mean
        assert torch.equal(adapter.adapted_state()[f"{layer}.class_mean"][absent], own.expand(len(absent), -1))


def test_a_model_without_batch_norm_is_refused_in_one_line(no_norm) -> None:
    with pytest.raises(ConfigError, match=r"bbn.*NoNorm") as caught:
        BBN(no_norm(), BBNOptions())
    assert "\n" not in str(caught.value)


def test_under_autocast_statistics_stay_float32(tiny, images) -> None:
    adapter = BBN(tiny(), BBNOptions(entropy_threshold=2.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = adapter.adapt(images(6))
    assert logits.isfinite().all()
    assert all(t.dtype == torch.float32 for t in adapter.adapted_state().values())
    assert adapter.rolled_back == 0
