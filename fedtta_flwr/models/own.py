"""A network of the user's own: what a function of their package returns, in the place of an architecture."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError, FedTTAError, in_words
from fedtta_flwr.models import MODELS
from fedtta_flwr.models.base import last_linear
from fedtta_flwr.models.checkpoints import dtype_and_shape, fill, read_tensors
from fedtta_flwr.paths import expanded
from fedtta_flwr.registry import call, resolve
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
        fill(model, _untied(model, read_tensors(path)), path, tied=True)
    return model.eval()


def _untied(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors by all their names, of which safetensors keeps but one where several share memory."""
    names: dict[tuple[int, torch.Size], list[str]] = {}
    for name, t in model.state_dict().items():
        names.setdefault((t.data_ptr(), t.shape), []).append(name)
    shared = [group for group in names.values() if len(group) > 1]
    found = {name: tensors[kept] for group in shared for kept in group if kept in tensors for name in group}
    return found | tensors


def try_own(name: str, model: nn.Module, x: Tensor, classes: int) -> None:
    """Let a network of the user's own classify an image before any client is asked.

    Parameters
    ----------
    name : str
        As in the run config.
    model : nn.Module
        In eval mode.
    x : Tensor
        One image of the run's form, [1, 3, H, W].
    classes : int
        K.

    Raises
    ------
    ConfigError
        If it raises, returns no finite logits [1, K], or these are not what its last linear layer returns: many
        adapters and descriptors take that for the classifier.
    """
    found: list[object] = []
    last = last_linear(model)
    hook = last[1].register_forward_hook(lambda _, __, output: found.append(output)) if last else None
    try:
        logits = _output(name, "it", "logits", model, x, classes)
    finally:
        if hook is not None:
            hook.remove()
    if last is not None and not (len(found) == 1 and isinstance(found[0], Tensor) and torch.equal(found[0], logits)):
        raise ConfigError(
            f"model = {name!r}: its logits are not what {last[0]} returns, its last nn.Linear, which adapters take for "
            f"the classifier; define the classifier last, and return what it returns"
        )


def try_extractor(name: str, extractor: nn.Module, x: Tensor, width: int) -> None:
    """Let what is left of such a network without its classifier make features [1, D] of an image, as `try_own`.

    Raises
    ------
    ConfigError
        If it does not.
    """
    _output(name, "without its last nn.Linear, which two heads replace, it", "features", extractor, x, width)


def _output(name: str, it: str, what: str, model: nn.Module, x: Tensor, width: int) -> Tensor:
    """Return what a network makes of an image, if it is finite numbers [1, width]."""
    about = f"model = {name!r}: for images {list(x.shape)} {it}"
    try:
        with torch.inference_mode():
            output: object = model(x)
    except FedTTAError:
        raise
    except Exception as error:  # whatever a network that expects other images says
        raise ConfigError(f"{about} raised {in_words(error)}") from error
    expected = f"expected {what}, float32 {[len(x), width]}"
    if not isinstance(output, Tensor):
        raise ConfigError(f"{about} returned {type(output).__name__}; {expected}")
    if output.shape != (len(x), width) or output.dtype != torch.float32:
        raise ConfigError(f"{about} returned {dtype_and_shape(output)}; {expected}")
    if not output.isfinite().all():
        raise ConfigError(f"{about} returned NaN or infinite {what}; look at its weights, and give it a checkpoint")
    return output
