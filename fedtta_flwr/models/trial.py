"""What a network makes of one image, seen before any client is asked."""

import torch
from torch import Tensor, nn

from fedtta_flwr.errors import ConfigError, FedTTAError, in_words
from fedtta_flwr.models.base import last_linear
from fedtta_flwr.models.checkpoints import dtype_and_shape


def try_network(name: str, model: nn.Module, x: Tensor, classes: int) -> Tensor:
    """Let a network classify an image before any client is asked: it may be made for images of another size.

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

    Returns
    -------
    Tensor
        Its logits [1, K].

    Raises
    ------
    ConfigError
        If it raises, or returns no finite logits [1, K].
    """
    return _output(name, "it", "logits", model, x, classes)


def try_own(name: str, model: nn.Module, x: Tensor, classes: int) -> None:
    """Let a network of the user's own do what `try_network` says.

    Raises
    ------
    ConfigError
        As there; or the logits are not what its last linear layer returns: many adapters and descriptors take that for
        the classifier.
    """
    found: list[object] = []
    last = last_linear(model)
    hook = last[1].register_forward_hook(lambda _, __, output: found.append(output)) if last else None
    try:
        logits = try_network(name, model, x, classes)
    finally:
        if hook is not None:
            hook.remove()
    if last is not None and not (len(found) == 1 and isinstance(found[0], Tensor) and torch.equal(found[0], logits)):
        raise ConfigError(
            f"model = {name!r}: its logits are not what {last[0]} returns, its last nn.Linear, which adapters take for "
            f"the classifier; define the classifier last, and return what it returns"
        )


def try_extractor(name: str, extractor: nn.Module, x: Tensor, width: int) -> None:
    """Let what is left of a network without its classifier make features [1, D] of an image, as `try_network`.

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
        with torch.no_grad():
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
