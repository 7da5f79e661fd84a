"""NOTE: robust continual test-time adaptation (Gong et al., NeurIPS 2022, arXiv 2208.05117)."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter, State, classifier, reshape_in_place, statistics
from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.layers import (
    BatchNorm,
    normalised_by,
    pooled,
    require_plain_batch_norms,
    sample_moments,
    widened,
)
from fedtta_flwr.adaptation.norms import affine_parameters, batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.options import NOTEOptions


class NOTE(Adapter):
    r"""Normalise an instance by itself where it differs from all, and learn from a memory balanced over predictions.

    *Instance-aware batch normalisation* (eqs. 3-6). For the layer's moments :math:`\bar\mu, \bar\sigma^2`, those of
    one instance's channel of L pixels :math:`\tilde\mu, \tilde\sigma^2` (unbiased), and soft shrinkage
    :math:`\psi(d; \lambda) = \mathrm{sign}(d) \max(|d| - \lambda, 0)`,

    .. math::
        \mu = \bar\mu + \psi\Big(\tilde\mu - \bar\mu;\; k \sqrt{\bar\sigma^2 / L}\Big), \quad
        \sigma^2 = \bar\sigma^2 + \psi\Big(\tilde\sigma^2 - \bar\sigma^2;\; k \bar\sigma^2 \sqrt{2 / (L - 1)}\Big)

    replace the moments with which the layer normalises, at least 0 for the variance. The layer's are the running
    statistics when predicting and those of the memory when learning; a map of one pixel has no instance's moments.

    *Prediction-balanced reservoir sampling* (algorithm 1). A sample enters the memory of N with its predicted class. If
    the memory is full, it takes the place of a random one of the most frequent classes in it; if its own class is
    one of those, that of a random one of its own class, with the probability that a uniform sample of this class's
    stream would stay: (of it in the memory) / (of it in the stream so far).

    After every 64 samples, one step of Adam on the mean entropy of the memory's predictions, over the affine
    parameters of the BatchNorm layers, in whose forward pass the running statistics move with momentum 0.01. A batch is
    cut where a step falls due, and samples enter the memory one by one: what is predicted does not depend on how the
    stream is cut into batches. The logits are those before a sample's own step.

    Affine parameters and running statistics travel; memory, counts and moments stay at home. An image of another size
    than those in the memory empties it.

    Parameters
    ----------
    model : nn.Module
        A source model with BatchNorm; its last linear layer tells the number of classes. It should have been trained
        with such layers, as in the paper; one trained with BatchNorm loses little at k = 4.
    options : NOTEOptions
        Normalisation, memory and optimiser.

    Raises
    ------
    ConfigError
        If the model has no BatchNorm layer that tracks statistics, or none with affine parameters.
    """

    FREE = -1

    def __init__(self, model: nn.Module, options: NOTEOptions) -> None:
        require_plain_batch_norms(model, "note")
        super().__init__(model, options)
        self.options: NOTEOptions = options
        self.optimizer = Optimizer(list(self.affine.values()), "adam", learning_rate=options.learning_rate)
        weight = next(iter(self.affine.values())).detach()
        self.images = weight.new_zeros((options.capacity, 0))
        self.labels = torch.full((options.capacity,), self.FREE)
        #: samples of each predicted class in the stream
        self.seen = torch.zeros(classifier(model, "note")[1].out_features, dtype=torch.int64)
        self.keep(self.optimizer.state | {"memory.labels": self.labels, "memory.seen": self.seen})
        self.keep({"memory.images": self.images}, growing=True)

    def select(self) -> State:
        """Return the affine parameters and the statistics of all BatchNorm layers."""
        layers = require_plain_batch_norms(self.model, "note")
        self.affine = affine_parameters(self.model, "note", layers)
        return dict(self.affine) | statistics(self.model)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return logits [B, K] under instance-aware normalisation with the running statistics; changes nothing."""
        with self._instance_aware():
            logits: Tensor = self.model(x)
        return logits

    def step(self, x: Tensor) -> Tensor:
        """Predict, remember and, whenever it is due, learn; return the logits [B, K]."""
        parts: list[Tensor] = []
        while len(x):
            until_due = self.options.update_every - int(self.seen.sum()) % self.options.update_every
            part, x = x[:until_due], x[until_due:]
            parts.append(self.predict(part))
            self._remember(part, parts[-1].argmax(dim=1).tolist())
            if len(part) == until_due:
                self._learn()
        return torch.cat(parts)

    @torch.no_grad()
    def _remember(self, x: Tensor, classes: Sequence[int]) -> None:
        """Let samples [B, C, H, W] with their predicted classes into the memory, one after the other."""
        if self.images.shape[1:] != x.shape[1:]:
            reshape_in_place(self.images, (len(self.images), *x.shape[1:]))
            self.labels.fill_(self.FREE)
        labels, seen = self.labels.tolist(), self.seen.tolist()
        counts = Counter(labels)
        number = sum(seen) + 1  # of the first of these samples in the stream
        places: dict[int, int] = {}  # place in the memory -> sample
        for i, label in enumerate(classes):
            seen[label] += 1
            place = self._place(labels, counts, label, seen[label], number=number + i)
            if place is not None:
                counts[labels[place]] -= 1
                counts[label] += 1
                labels[place], places[place] = label, i
        self.labels.copy_(torch.tensor(labels))
        self.seen.copy_(torch.tensor(seen))
        if places:
            self.images[list(places)] = x[list(places.values())]

    def _place(self, labels: list[int], counts: Counter[int], label: int, seen: int, number: int) -> int | None:
        """Return where the stream's sample of this number goes, None if it does not."""
        if counts[self.FREE]:
            return labels.index(self.FREE)
        most = max(counts.values())
        generator = self.generator("note", number)
        if counts[label] < most:
            full = sorted(c for c, count in counts.items() if count == most)
            victim = full[int(torch.randint(len(full), (), generator=generator))]
        elif float(torch.rand((), generator=generator)) < most / seen:
            victim = label
        else:
            return None
        candidates = [place for place, c in enumerate(labels) if c == victim]
        return candidates[int(torch.randint(len(candidates), (), generator=generator))]

    @torch.enable_grad()
    def _learn(self) -> None:
        """Take one step on the memory, and let the running statistics move towards it."""
        memory = self.images[self.labels.to(self.images.device) != self.FREE]
        with batch_statistics(self.model, track=True, momentum=self.options.momentum), self._instance_aware():
            logits = self.model(memory)
        self.optimizer.minimize(entropy(logits / self.options.temperature).mean())

    def _instance_aware(self) -> AbstractContextManager[None]:
        return normalised_by(self.model, self._normalise)

    def _normalise(self, _: str, layer: BatchNorm, h: Tensor) -> Tensor:
        """Return what an instance-aware layer makes of h [B, C, ...], in train mode with the batch's moments."""
        pixels = math.prod(h.shape[2:])
        lone = pixels == 1 or not len(h)
        if layer.training or lone:
            with torch.set_grad_enabled(lone and torch.is_grad_enabled()):
                plain: Tensor = type(layer).forward(layer, h)  # in train mode it moves the running statistics
            if lone:
                return plain
        wide = widened(h)
        own_mean, within = sample_moments(wide)
        if layer.training:
            mean, variance = pooled(own_mean, within)
            variance = variance * _unbiased(len(h) * pixels)
        else:
            mean, variance = layer.running_mean, layer.running_var  # type: ignore[assignment]
        moments = mean, variance, own_mean, within * _unbiased(pixels)
        mean, variance, own_mean, own_variance = (_column(t, h.dim()) for t in moments)
        # As in the published code, eps keeps the standard error of a constant channel above 0 (and its slope finite).
        k, spread = self.options.shrinkage, variance + layer.eps
        mean = mean + _shrink(own_mean - mean, k * (spread / pixels).sqrt())
        variance = variance + _shrink(own_variance - variance, k * math.sqrt(2 / (pixels - 1)) * spread)
        scale = (variance.clamp(min=0) + layer.eps).rsqrt()
        shift = -mean * scale
        if layer.affine:
            weight, bias = _column(layer.weight, h.dim()), _column(layer.bias, h.dim())
            scale, shift = scale * weight, shift * weight + bias
        out = torch.addcmul(shift, wide, scale)
        return out.to(h.dtype)


def _column(values: Tensor, dims: int) -> Tensor:
    """Return values a channel, [C] or [B, C], in a shape that spreads over [B, C, ...]."""
    return values.view(-1, values.shape[-1], *[1] * (dims - 2))


def _unbiased(number: int) -> float:
    """Return by what the biased variance of so many values is to be multiplied."""
    return number / (number - 1)


def _shrink(difference: Tensor, threshold: Tensor) -> Tensor:
    """Soft shrinkage: move towards 0 by the threshold and stop there."""
    return difference.sign() * (difference.abs() - threshold).relu()
