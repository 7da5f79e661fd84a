"""A network of the user's own: what a function of their package returns, in the place of an architecture."""

from pathlib import Path

import torch
from torch import Tensor, nn

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError, FedTTAError
from fedtta_flwr.models import MODELS
from fedtta_flwr.models.base import last_linear
from fedtta_flwr.models.checkpoints import fill, read_tensors
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
    function = resolve("model", config.model, MODELS)
    with seeded(torch.device("cpu"), config.seed, "weights"):
        model = call("model", config.model, function, classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model = {config.model!r}: returned {type(model).__name__}; return a torch.nn.Module")
    for name, t in model.state_dict().items():
        if not isinstance(t, Tensor) or (t.is_floating_point() and t.dtype != torch.float32):
            found = str(t.dtype).removeprefix("torch.") if isinstance(t, Tensor) else type(t).__name__
            raise ConfigError(f"model = {config.model!r}: {name} is {found}; allowed: float32 (model.float())")
    if config.legacy_no_norm:
        raise ConfigError(
            f"legacy-no-norm = true: what input normalisation {config.model!r} has is not known; allowed: false"
        )
    if config.checkpoint:
        path = Path(config.checkpoint).expanduser()
        fill(model, read_tensors(path), path)
    return model.eval()


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
        If it raises, returns no logits [1, K], or these are not what its last linear layer returns: many adapters and
        descriptors take that for the classifier.
    """
    found: list[object] = []
    last = last_linear(model)
    hook = last[1].register_forward_hook(lambda _, __, output: found.append(output)) if last else None
    try:
        with torch.inference_mode():
            logits = model(x)
    except FedTTAError:
        raise
    except Exception as error:  # whatever a network that expects other images says
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"model = {name!r}: for images {list(x.shape)} it raised {text}") from error
    finally:
        if hook is not None:
            hook.remove()
    if not isinstance(logits, Tensor) or logits.shape != (len(x), classes) or logits.dtype != torch.float32:
        returned = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"model = {name!r}: for images {list(x.shape)} it returned {returned.removeprefix('torch.')}; expected "
            f"logits, float32 {[len(x), classes]}"
        )
    if last is not None and not (len(found) == 1 and isinstance(found[0], Tensor) and torch.equal(found[0], logits)):
        raise ConfigError(
            f"model = {name!r}: its logits are not what {last[0]} returns, its last nn.Linear, which adapters take for "
            f"the classifier; define the classifier last, and return what it returns"
        )
