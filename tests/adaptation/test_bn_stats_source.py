"""TTA-bn with a share of the source or of the running statistics: alpha-BN, NORM and FedCTTA by their equations."""

import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.bn_stats import BNStats
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import BNStatsOptions, NoOptions


def mixed(model: nn.Module, x: Tensor, share: float) -> tuple[dict[str, list[float]], Tensor]:
    """Statistics and logits of the tiny network, value by value over Python floats."""
    found: dict[str, list[float]] = {}
    for number in (1, 2):
        conv, bn = getattr(model, f"conv{number}"), getattr(model, f"bn{number}")
        h = conv(x).detach()
        means, variances = [], []
        for c in range(h.shape[1]):
            values = h[:, c].flatten().tolist()
            mean = sum(values) / len(values)
            variance = sum((value - mean) ** 2 for value in values) / len(values)
            means.append(share * bn.running_mean[c].item() + (1 - share) * mean)
            variances.append(share * bn.running_var[c].item() + (1 - share) * variance)
            h[:, c] = (h[:, c] - means[c]) / (variances[c] + bn.eps) ** 0.5 * bn.weight[c].item() + bn.bias[c].item()
        found[f"bn{number}.running_mean"], found[f"bn{number}.running_var"] = means, variances
        x = h.clamp(min=0)
    return found, model.head(x.mean(dim=(2, 3))).detach()


@pytest.mark.parametrize("options", [{"source_share": 0.9}, {"source_share": 0.25}, {"prior": 16.0}, {"prior": 0.5}])
def test_statistics_and_logits_are_those_of_the_equations(tiny, images, options: dict) -> None:
    """In every batch, and whatever mixture came from the server meanwhile."""
    adapter = BNStats(tiny(), BNStatsOptions(**options))
    for seed, count in enumerate((8, 3, 1)):
        x = images(count, seed=seed)
        share = options.get("source_share", options.get("prior", 0) / (options.get("prior", 0) + count))
        expected, logits = mixed(tiny().double(), x.double(), share)
        torch.testing.assert_close(adapter.adapt(x).double(), logits, rtol=2e-5, atol=2e-5)
        for name, t in adapter.adapted_state().items():
            torch.testing.assert_close(t.tolist(), expected[name], rtol=2e-5, atol=2e-6)
        adapter.load_adapted_state({name: t + 1 for name, t in adapter.adapted_state().items()})


@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_a_momentum_moves_what_was_received(tiny, images, momentum: float) -> None:
    """FedCTTA, eqs. 3-4: from a mixture that came from the server, and from where the batch before ended."""
    adapter, model = BNStats(tiny(), BNStatsOptions(momentum=momentum)), tiny().double()
    for seed, count in enumerate((8, 3, 1, 5)):
        if seed % 2:
            adapter.load_adapted_state({name: t + 1 for name, t in adapter.adapted_state().items()})
        model.load_state_dict(adapter.adapted_state(), strict=False)
        x = images(count, seed=seed)
        expected, logits = mixed(model, x.double(), 1 - momentum)
        torch.testing.assert_close(adapter.adapt(x).double(), logits, rtol=2e-5, atol=2e-5)
        for name, t in adapter.adapted_state().items():
            torch.testing.assert_close(t.tolist(), expected[name], rtol=2e-5, atol=2e-6)
        assert torch.equal(adapter.adapt(x), adapter.predict(x))  # the layers normalise with what they have moved to
    assert adapter.local_state() == {}


def test_no_share_is_the_batchs_alone(tiny, images) -> None:
    a, b = BNStats(tiny(), BNStatsOptions()), BNStats(tiny(), NoOptions())
    for seed, count in enumerate((6, 1, 3)):
        assert torch.equal(a.adapt(images(count, seed=seed)), b.adapt(images(count, seed=seed)))
        h = tiny().conv1(images(count, seed=seed))
        variance, mean = torch.var_mean(h.double(), dim=(0, 2, 3), correction=0)
        torch.testing.assert_close(a.adapted_state()["bn1.running_mean"], mean.float())
        torch.testing.assert_close(a.adapted_state()["bn1.running_var"], variance.float())
    assert a.local_state() == {}


def test_the_whole_share_is_the_source(tiny, images) -> None:
    adapter = BNStats(tiny(), BNStatsOptions(source_share=1.0))
    with torch.no_grad():
        assert torch.equal(adapter.adapt(images(5)), tiny().eval()(images(5)))


def test_one_value_per_channel_keeps_what_is_there(tiny, images) -> None:
    adapter = BNStats(tiny(), BNStatsOptions(source_share=0.5))
    before = {name: t.clone() for name, t in adapter.adapted_state().items()}
    adapter.adapt(images(1, size=1))
    assert all(torch.equal(t, before[name]) for name, t in adapter.adapted_state().items())


def test_both_shares_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bn-stats\.prior = 16\.0: source-share = 0\.1"):
        BNStatsOptions(source_share=0.1, prior=16.0)


@pytest.mark.parametrize("other", [{"source_share": 0.1}, {"prior": 16.0}])
def test_a_momentum_beside_a_share_of_the_source_is_refused_in_one_line(other: dict) -> None:
    with pytest.raises(
        ConfigError, match=r"bn-stats\.momentum = 0\.5: (source-share|prior) mixes .*; allowed"
    ) as caught:
        BNStatsOptions(momentum=0.5, **other)
    assert "\n" not in str(caught.value)
