"""Plain second versions of what the adapters are made of: the tiny network, Adam, cross-entropies, by loops."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Params = dict[str, Tensor]


def network(p: Params, x: Tensor, normalise: Callable[[str, Tensor], Tensor]) -> Tensor:
    """The network of conftest as a function of its parameters; `normalise` is BatchNorm without the affine map."""
    for number, stride in ((1, 1), (2, 2)):
        h = normalise(f"bn{number}", F.conv2d(x, p[f"conv{number}.weight"], stride=stride, padding=1))
        h = h * p[f"bn{number}.weight"].view(1, -1, 1, 1) + p[f"bn{number}.bias"].view(1, -1, 1, 1)
        x = h.clamp(min=0)
    return x.mean(dim=(2, 3)) @ p["head.weight"].T + p["head.bias"]


def by_batch(_: str, h: Tensor) -> Tensor:
    """Normalise with the batch's own moments, channel by channel."""
    channels = []
    for c in range(h.shape[1]):
        values = h[:, c]
        mean = values.sum() / values.numel()
        variance = ((values - mean) ** 2).sum() / values.numel()
        channels.append((values - mean) / (variance + 1e-5).sqrt())
    return torch.stack(channels, dim=1)


def logits_of(p: Params, x: Tensor) -> Tensor:
    """The network with batch statistics."""
    return network(p, x, by_batch)


def entropy_of(row: Tensor) -> Tensor:
    """-sum_k p_k log p_k of softmax(row), differentiable."""
    p = row.exp() / row.exp().sum()
    return -sum(q * q.log() for q in p)


def by_moments(moments: Params) -> Callable[[str, Tensor], Tensor]:
    """Normalise with given ``NAME.running_mean`` and ``NAME.running_var``."""

    def normalise(name: str, h: Tensor) -> Tensor:
        mean, var = (moments[f"{name}.running_{kind}"].view(1, -1, 1, 1) for kind in ("mean", "var"))
        return (h - mean) / (var + 1e-5).sqrt()

    return normalise


def softmax(row: Tensor) -> Tensor:
    e = (row - row.max().detach()).exp()
    return e / e.sum()


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """-sum_k softmax(target)_k log softmax(logits)_k of one sample, [K] each."""
    p, q = softmax(target), softmax(logits)
    return -sum((p[k] * q[k].log() for k in range(len(p))), start=torch.zeros((), dtype=logits.dtype))


def entropy(row: Tensor) -> float:
    return float(cross_entropy(row.detach(), row.detach()))


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1), parameter by parameter."""

    def __init__(self, names: list[str], rate: float) -> None:
        self.names, self.rate, self.t = names, rate, 0
        self.m: dict[str, Tensor | float] = dict.fromkeys(names, 0.0)
        self.v: dict[str, Tensor | float] = dict.fromkeys(names, 0.0)

    def step(self, p: Params, loss: Tensor) -> Params:
        """Return new leaf parameters; those that are not named stay."""
        gradients = torch.autograd.grad(loss, [p[name] for name in self.names])
        self.t += 1
        new = dict(p)
        for name, g in zip(self.names, gradients, strict=True):
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g * g
            m_hat, v_hat = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.999**self.t)
            new[name] = (p[name].detach() - self.rate * m_hat / (v_hat.sqrt() + 1e-8)).requires_grad_()
        return new


def leaves(model: torch.nn.Module) -> Params:
    """Copies of a model's parameters that gradients can be taken for."""
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def detached(p: Params) -> Params:
    return {name: t.detach().clone() for name, t in p.items()}
