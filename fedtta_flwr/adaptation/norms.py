"""What adapters do with normalisation layers: run them on batch statistics, find their affine parameters."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter, State, batch_norms
from fedtta_flwr.adaptation.layers import UNNORMALISED, BatchNorm
from fedtta_flwr.errors import ConfigError

#: layers whose affine parameters Tent, EATA and SAR adapt
NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
)


@contextmanager
def batch_statistics(model: nn.Module, *, track: bool = False, momentum: float | None = None) -> Iterator[None]:
    """Let the BatchNorm layers of a model normalise with their input's own statistics.

    A layer whose input has one value per channel, which has no variance, normalises with its running statistics.
    Afterwards all layers are in eval mode.
    Only the layers' mode changes, and only inside the context: buffers are never removed, dropout stays off.

    Parameters
    ----------
    model : nn.Module
        In eval mode, but where dropout shall act.
    track : bool
        Whether the running statistics move towards the batch's, with each layer's own momentum, and the counters
        count. If False, the layers leave them as they are.
    momentum : float, optional
        Instead of the layers' own.
    """
    norms = list(batch_norms(model).values())
    own = [norm.momentum for norm in norms]

    def choose(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        norm.training = inputs[0].numel() > inputs[0].shape[1]

    hooks = [norm.register_forward_pre_hook(choose) for norm in norms]
    for norm in norms:
        norm.track_running_stats = track  # if False, a layer in train mode reads and writes no buffer
        norm.momentum = norm.momentum if momentum is None else momentum
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm, before in zip(norms, own, strict=True):
            norm.track_running_stats, norm.momentum = True, before
            norm.eval()


def affine_parameters(
    model: nn.Module, adapter: str, layers: Mapping[str, BatchNorm] | None = None
) -> dict[str, nn.Parameter]:
    """Return the affine parameters of all normalisation layers, or of these alone, by name; shared ones once.

    Raises
    ------
    ConfigError
        If there are none; `adapter` is the name in the message.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, NORMS)}
    found = parameters_of((norms if layers is None else layers).items())
    if not found:
        kind = "normalisation" if layers is None else "BatchNorm"
        raise ConfigError(
            f"adapter = {adapter!r}: {type(model).__name__} has no {kind} layer with affine parameters; "
            f"choose a model with one, or the adapter {UNNORMALISED}"
        )
    return found


def parameters_of(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Parameter]:
    """Return the layers' own parameters by name; one that several share, under its first."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, layer in layers:
        for name, parameter in layer.named_parameters(recurse=False):
            found.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter))
    return dict(found.values())


class AffineAdapter(Adapter):
    """What Tent and its descendants have in common.

    The affine parameters of all normalisation layers adapt and travel; BatchNorm layers normalise with the statistics
    of the batch at hand, in `predict` as well, so that running statistics are neither used nor changed. LayerNorm
    and GroupNorm normalise each sample by itself as ever, and so does an InstanceNorm that tracks no statistics.
    """

    #: in the message for a model without affine parameters
    name: str

    def select(self) -> State:
        """Return the affine parameters of all normalisation layers."""
        self.affine = affine_parameters(self.model, self.name)
        return dict(self.affine)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return logits [B, K] with the statistics of x [B, C, H, W]; changes nothing."""
        with batch_statistics(self.model):
            logits: Tensor = self.model(x)
        return logits
