"""Balanced batch normalisation: statistics of every class, and their mean over classes to normalise with.

The mathematics of one layer, and the statistics of all layers of one network; `bbn.py` adapts with them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtta_flwr.adaptation.base import State
from fedtta_flwr.adaptation.layers import BatchNorm, Normalise, normalise_with, sample_moments


@dataclass(frozen=True)
class ClassBatch:
    """Which class each sample of a batch is thought to be of.

    Attributes
    ----------
    labels : Tensor
        int64 [B].
    one_hot : Tensor
        [B, K].
    counts : Tensor
        n_k, [K].
    steps : Tensor
        m_k = min(eta, 1 / n_k), [K]: no class moves further than to the batch's own statistics. An eta of 0 gives 0.
    present : Tensor
        Number of classes with a sample.
    """

    labels: Tensor
    one_hot: Tensor
    counts: Tensor
    steps: Tensor
    present: Tensor

    @classmethod
    def of(cls, labels: Tensor, classes: int, momentum: float, dtype: torch.dtype) -> "ClassBatch":
        """Count the labels [B] of a batch that is not empty; `momentum` is eta, `dtype` that of the statistics."""
        one_hot = F.one_hot(labels, classes).to(dtype)
        counts = one_hot.sum(dim=0)
        steps = (1 / counts.clamp(min=1)).clamp(max=momentum)
        return cls(labels, one_hot, counts, steps, (counts > 0).sum())


def update(class_mean: Tensor, class_var: Tensor, h: Tensor, batch: ClassBatch, share: float) -> tuple[Tensor, Tensor]:
    r"""Return the statistics of every class, [K, C] each, after a batch of features h [B, C, ...].

    With :math:`\gamma` the class-agnostic share, P the classes present, and means over the pixels,

    .. math::
        d_k &= m_k \sum_{b: y_b = k} \mathrm{mean}_{HW}(h_b - \mu_k), \quad
        s_k = \sum_{b: y_b = k} \mathrm{mean}_{HW}((h_b - \mu_k)^2) \\
        \mu_k &\leftarrow \mu_k + (1 - \gamma) d_k + \gamma\,\mathrm{mean}_{j \in P} d_j \\
        \sigma^2_k &\leftarrow \sigma^2_k + (1 - \gamma) (m_k (s_k - n_k \sigma^2_k) - d_k^2) \\
        \sigma^2_k &\leftarrow \sigma^2_k + \gamma\,(\mathrm{mean}_{j \in P}(m_j s_j - d_j^2)
            - \mathrm{mean}_{j \in P}(m_j n_j)\,\sigma^2_k)

    d and s are taken at the old statistics. What rounding leaves below 0, where a channel is constant over a class, is
    0. Of a class that is absent, n, d and s are 0: it
    moves with the class-agnostic part only. Gradients reach h.
    """
    sample_mean, within = sample_moments(h)
    deviation = sample_mean - class_mean[batch.labels]
    one_hot, steps, weight = batch.one_hot.T, batch.steps[:, None], (batch.steps * batch.counts)[:, None]
    d = steps * (one_hot @ deviation)
    spread = steps * (one_hot @ (within + deviation.square())) - d.square()  # m_k s_k - d_k^2
    mean = class_mean + (1 - share) * d
    var = class_var + (1 - share) * (spread - weight * class_var)
    if share:
        mean = mean + share * d.sum(dim=0) / batch.present
        var = var + share * (spread.sum(dim=0) / batch.present - weight.sum() / batch.present * var)
    return mean, var.clamp_(min=0)


def balance(class_mean: Tensor, class_var: Tensor, *, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mean and variance [C] of a mixture of all K classes in equal parts.

    mean_k mu_k, and mean_k sigma2_k + Var_k(mu_k), the latter over K (the papers) or, if `unbiased`, K - 1 (TRIBE's
    code). Taken as deviations from the first class: where all classes are equal, the result is exactly theirs.
    """
    off, off_var = class_mean - class_mean[0], class_var - class_var[0]
    between = off.var(dim=0, correction=int(unbiased))
    return class_mean[0] + off.mean(dim=0), class_var[0] + off_var.mean(dim=0) + between


class BalancedStatistics:
    """The statistics of all BatchNorm layers of one network: of each class, and the balanced ones of all.

    Parameters
    ----------
    layers : dict[str, BatchNorm]
        The layers by name, with the source's running statistics, which every class begins with.
    classes : int
        K.
    share : float
        gamma, the class-agnostic share.
    unbiased : bool
        See `balance`.
    role : str
        Begins the tensors' names; empty: the balanced statistics are the layers' own buffers.
    """

    def __init__(
        self, layers: dict[str, BatchNorm], classes: int, share: float, unbiased: bool = False, role: str = ""
    ) -> None:
        self._share = share
        self._unbiased = unbiased
        #: class_mean [K, C], class_var [K, C], mean [C], var [C] of every layer
        self._tensors: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        #: by name: what to normalise with
        self.balanced: State = {}
        #: by name: what that is made from
        self.per_class: State = {}
        for name, layer in layers.items():
            mean, var = layer.running_mean, layer.running_var
            if mean is None or var is None:
                continue  # it does not track statistics: not one of `batch_norms`
            if role:
                mean, var = mean.clone(), var.clone()
            class_mean, class_var = (t.expand(classes, -1).clone() for t in (mean, var))
            self._tensors[name] = (class_mean, class_var, mean, var)
            of, kind = f"{name}." if name else "", role or "running"
            self.balanced |= {f"{of}{kind}_mean": mean, f"{of}{kind}_var": var}
            prefix = f"{role}_" if role else ""
            self.per_class |= {f"{of}{prefix}class_mean": class_mean, f"{of}{prefix}class_var": class_var}

    @torch.no_grad()
    def rebalance(self) -> None:
        """Recompute the balanced statistics, after others have changed those of the classes."""
        for class_mean, class_var, mean, var in self._tensors.values():
            new_mean, new_var = balance(class_mean, class_var, unbiased=self._unbiased)
            mean.copy_(new_mean)
            var.copy_(new_var)

    def frozen(self) -> Normalise:
        """Normalise with the stored balanced statistics."""

        def normalise(name: str, layer: BatchNorm, h: Tensor) -> Tensor:
            _, _, mean, var = self._tensors[name]
            return F.batch_norm(h, mean, var, layer.weight, layer.bias, False, 0.0, layer.eps)

        return normalise

    def updating(self, batch: ClassBatch) -> Normalise:
        """Move the statistics by a batch, then normalise with them; the gradient goes through this move only."""

        def normalise(name: str, layer: BatchNorm, h: Tensor) -> Tensor:
            class_mean, class_var, mean, var = self._tensors[name]
            new_class_mean, new_class_var = update(class_mean, class_var, h, batch, self._share)
            new_mean, new_var = balance(new_class_mean, new_class_var, unbiased=self._unbiased)
            stored = (class_mean, class_var, mean, var)
            with torch.no_grad():
                for old, new in zip(stored, (new_class_mean, new_class_var, new_mean, new_var), strict=True):
                    old.copy_(new)
            return normalise_with(h, new_mean, new_var, layer)

        return normalise
