"""A network of the user's own: what a function of their package returns, in the place of an architecture."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import CheckpointError, ConfigError, in_words
from fedtta_flwr.models import MODELS
from fedtta_flwr.models.base import last_linear
from fedtta_flwr.models.checkpoints import ANOTHER, dtype_and_shape, fill, read_tensors
from fedtta_flwr.paths import expanded
from fedtta_flwr.resolve import call, resolve
from fedtta_flwr.seeding import seeded


def build_own(config: RunConfig, classes: int) -> nn.Module:
    """Call the user's function with the number of classes K, and fill what it returns from the checkpoint, if any.

    Without one the weights are those that the function gives it. What it draws from torch's global generator depends
    on the run's seed alone.

    Parameters
    ----------
    config : RunConfig
        Whose ``model`` is ``package.module:function``.
    classes : int
        K.

    Returns
    -------
    nn.Module
        From images [B, 3, H, W] in [0, 1] to logits [B, K]; float32, in eval mode.

    Raises
    ------
    ConfigError
        If the operator has not allowed the package, the function raises, or returns no network of float32.
    CheckpointError
        If the checkpoint is no safetensors file of the network's ``state_dict()``.
    """
    cpu = torch.device("cpu")
    with seeded(cpu, config.seed, "import"):  # which may make a network, too: in every process the same one
        function = resolve("model", config.model, MODELS)
    with seeded(cpu, config.seed, "weights"):
        model = call("model", config.model, function, classes)
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(f"model = {config.model!r}: returned {type(model).__name__}; return a plain torch.nn.Module")
    if "_parameters" not in vars(model):
        raise ConfigError(f"model = {config.model!r}: {type(model).__name__}.__init__ must call super().__init__()")
    for name, t in model.state_dict().items():
        if not isinstance(t, Tensor) or is_lazy(t):
            found = type(t).__name__
        elif t.is_floating_point() and t.dtype != torch.float32:
            found = str(t.dtype).removeprefix("torch.")
        else:
            continue
        raise ConfigError(f"model = {config.model!r}: {name} is {found}; allowed: float32 (model.float())")
    try:
        model = deepcopy(model).cpu()  # the function may return the same object again
    except Exception as error:
        why = in_words(error)
        raise ConfigError(f"model = {config.model!r}: it cannot be copied, for each client process: {why}") from error
    if config.legacy_no_norm:
        raise ConfigError(
            f"legacy-no-norm = true: what input normalisation {config.model!r} has is not known; allowed: false"
        )
    if config.checkpoint:
        path = expanded("checkpoint", config.checkpoint)
        tensors = _untied(model, read_tensors(path))
        _check_classes(model, tensors, classes, path)
        fill(model, tensors, path, tied=True)
    return model.eval()


def _check_classes(model: nn.Module, tensors: Mapping[str, Tensor], classes: int, path: Path) -> None:
    """Say so where the classifier of a file is the network's but for the number of classes."""
    name, head = last_linear(model) or ("", None)
    weight = tensors.get(f"{name}.weight")
    if head is None or weight is None or weight.dim() != 2 or head.out_features != classes:
        return
    if len(weight) != classes and weight.shape[1] == head.in_features:
        raise CheckpointError(
            f"{path}: the data has {classes} classes, the file {len(weight)} ({name}.weight is "
            f"{dtype_and_shape(weight)}); {ANOTHER}, or set classes = {len(weight)} if the data set leaves that open"
        )


def _untied(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors by all their names, of which safetensors keeps but one where several share memory."""
    names: dict[tuple[int, torch.Size], list[str]] = {}
    for name, t in model.state_dict().items():
        names.setdefault((t.data_ptr(), t.shape), []).append(name)
    shared = [group for group in names.values() if len(group) > 1]
    found = {name: tensors[kept] for group in shared for kept in group if kept in tensors for name in group}
    return found | tensors
