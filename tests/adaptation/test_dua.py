"""DUA against its equations: momentum, statistics and logits, by plain loops in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.dua import DUA
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import DUAOptions


def moments(h: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Mean, biased and unbiased variance of every channel, over Python floats."""
    rows = []
    for channel in range(h.shape[1]):
        values = h[:, channel].flatten().tolist()
        mean = sum(values) / len(values)
        squares = sum((value - mean) ** 2 for value in values)
        rows.append((mean, squares / len(values), squares / (len(values) - 1)))
    means, biased, unbiased = (list(column) for column in zip(*rows, strict=True))
    return means, biased, unbiased


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5, "decay": 0.5, "floor": 0.1}, {"decay": 1.0, "floor": 0.0}])
def test_statistics_follow_the_equations(tiny, images, settings: dict) -> None:
    options = DUAOptions(views=0, **settings)
    adapter, oracle = DUA(tiny(torch.float64), options), tiny(torch.float64).eval()
    m = options.momentum
    for t, count in enumerate((6, 1, 3, 2)):
        x = images(count, seed=t, dtype=torch.float64)
        m = m * options.decay
        rho = m + options.floor
        h = x
        with torch.no_grad():
            for conv, bn in ((oracle.conv1, oracle.bn1), (oracle.conv2, oracle.bn2)):
                h = conv(h)
                means, biased, unbiased = moments(h)
                for c in range(h.shape[1]):
                    bn.running_mean[c] = (1 - rho) * bn.running_mean[c] + rho * means[c]
                    bn.running_var[c] = (1 - rho) * bn.running_var[c] + rho * unbiased[c]
                    scale = bn.weight[c] / (biased[c] + bn.eps) ** 0.5
                    h[:, c] = (h[:, c] - means[c]) * scale + bn.bias[c]
                h = h.clamp(min=0)
            logits = adapter.adapt(x)
            torch.testing.assert_close(logits, oracle(x), rtol=1e-8, atol=1e-10)
        assert adapter.local_state()["momentum"].item() == pytest.approx(m)
        for name, t_ in adapter.adapted_state().items():
            torch.testing.assert_close(t_, oracle.state_dict()[name], rtol=1e-8, atol=1e-10)


def test_a_momentum_of_one_takes_over_the_batch_and_of_zero_nothing(tiny, images) -> None:
    x = images(6)
    full = DUA(tiny(), DUAOptions(momentum=1.0, decay=1.0, floor=0.0, views=0))
    full.adapt(x)
    h = tiny().conv1(x)
    torch.testing.assert_close(full.adapted_state()["bn1.running_mean"], h.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(full.adapted_state()["bn1.running_var"], h.var(dim=(0, 2, 3)))
    none = DUA(tiny(), DUAOptions(momentum=0.0, floor=0.0))
    with torch.no_grad():
        assert torch.equal(none.adapt(x), tiny().eval()(x))


@pytest.mark.parametrize(("count", "expected"), [(1, 64), (10, 60), (64, 64), (100, 100)])
def test_a_batch_is_filled_up_with_views(tiny, images, count: int, expected: int) -> None:
    adapter, sizes = DUA(tiny(), DUAOptions()), []
    adapter.model.conv1.register_forward_hook(lambda *args: sizes.append(len(args[1][0])))
    adapter.adapt(images(count))  # the first step, whose form is looked at, with one image more
    assert sizes[-2:] == [expected, count]


def test_views_are_turned_flipped_and_cropped_images(tiny) -> None:
    adapter = DUA(tiny(), DUAOptions(views=200))
    image = torch.arange(48.0).view(1, 3, 4, 4) / 48 + 0.01
    views = adapter._views(image)
    assert views.shape == (200, 3, 4, 4)
    padded = np.pad(image[0].numpy(), ((0, 0), (4, 4), (4, 4)))
    crops = [padded[:, i : i + 4, j : j + 4] for i in range(9) for j in range(9)]
    turned = [
        {np.rot90(crop[..., ::flip], quarters, axes=(1, 2)).tobytes() for crop in crops for flip in (1, -1)}
        for quarters in range(4)
    ]
    seen = {view.numpy().tobytes() for view in views}
    assert seen <= set.union(*turned)
    for quarters in range(4):
        assert seen & (turned[quarters] - set.union(*turned[:quarters], *turned[quarters + 1 :]))
    assert len(seen) > 50
    oblong = adapter._views(torch.rand(2, 3, 4, 6))
    assert oblong.shape == (200, 3, 4, 6)
    again = DUA(tiny(), DUAOptions(views=200))
    assert torch.equal(again._views(image), views)
    again.identity = (0, "client-01")
    assert not torch.equal(again._views(image), adapter._views(image))


def test_wrong_momenta_and_models_are_refused(no_norm) -> None:
    with pytest.raises(ConfigError, match=r"dua\.floor = 0\.5"):
        DUAOptions(momentum=1.0, floor=0.5)
    with pytest.raises(ConfigError, match="adapter = 'dua'"):
        DUA(no_norm(), DUAOptions())
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten())
    assert list(DUA(model, DUAOptions()).adapted_state()) == ["0.running_mean", "0.running_var"]
