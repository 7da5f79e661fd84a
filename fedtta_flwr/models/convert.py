"""Foreign checkpoints into this package's own networks; no code is run, nothing dropped silently.

What is understood: a state dict saved by ``torch.save``, also inside ``{"state_dict": ...}`` and
the like, with or without the prefix of a wrapper, whose names differ from ours by `RULES`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedtta_flwr.errors import CheckpointError
from fedtta_flwr.models import build
from fedtta_flwr.models.base import Classifier
from fedtta_flwr.models.checkpoints import fill, first_bytes
from fedtta_flwr.models.normalize import Normalize

WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
PREFIXES = ("module.", "model.", "net.", "_orig_mod.")  # the last is torch.compile's
COUNTER = ".num_batches_tracked"

# Applied in this order to every name; each is (regular expression, replacement).
RULES: tuple[tuple[str, str], ...] = (
    (r"^(linear|fc|classifier)\.", "head."),
    # Wide ResNets after the paper's PyTorch port
    (r"^(block\d)\.layer\.", r"\1."),
    (r"\.convShortcut\.", ".shortcut."),
    # AugMix's ResNeXt-29
    (r"^conv_1_3x3\.", "conv1."),
    (r"^bn_1\.", "bn1."),
    (r"^stage_(\d)\.", r"layer\1."),
    (r"\.conv_reduce\.", ".conv1."),
    (r"\.bn_reduce\.", ".bn1."),
    (r"\.conv_conv\.", ".conv2."),
    (r"\.bn\.", ".bn2."),
    (r"\.conv_expand\.", ".conv3."),
    (r"\.bn_expand\.", ".bn3."),
)


def convert(
    source: str | Path,
    *,
    architecture: str,
    classes: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[Classifier, list[tuple[str, str]]]:
    """Read a foreign checkpoint into the network ``architecture``.

    Parameters
    ----------
    source : path
        A file of ``torch.save``. Only tensors and plain containers are read, so no code can run.
    architecture : str
        A key of `fedtta_flwr.models.MODELS`.
    classes : int
        Number of classes, K >= 2.
    mean, std : sequence of float
        The input normalisation that the weights were trained with, for pixels in [0, 1].

    Returns
    -------
    model : Classifier
        In eval mode, on the CPU.
    renames : list of (str, str)
        What was changed: (foreign name, name here). A name in parentheses stands for nothing:
        ``("best_prec1", "(not a weight)")``, ``("(absent)", "*.num_batches_tracked = 0")``.

    Raises
    ------
    CheckpointError
        The file is absent, damaged or holds more than tensors, its tensors do not fit, or it says itself what the
        normalisation is, and otherwise.
    ConfigError
        ``architecture``, ``classes`` or the normalisation is not allowed.
    """
    source = Path(source)
    with torch.device("meta"):
        model = build(architecture, classes, mean=mean, std=std)
    tensors, renames = _unwrap(read_torch(source), source)
    tensors = _rename(tensors, renames, source)
    # torch < 0.4.1 did not count batches; the count matters only to layers with momentum=None.
    if uncounted := [k for k in model.state_dict() if k.endswith(COUNTER) and k not in tensors]:
        tensors |= {key: torch.tensor(0) for key in uncounted}
        renames.append(("(absent)", f"*{COUNTER} = 0"))
    for key, value in Normalize(mean, std).state_dict().items():
        own = tensors.setdefault(f"normalize.{key}", value)
        if (says := _in_words(own)) != (given := _in_words(value)):
            raise CheckpointError(
                f"{source}: holds normalize.{key} = {says}, --{key} is {given}; allowed: what it holds"
            )
    fill(model, tensors, source)
    return model, renames


def read_torch(path: Path) -> object:
    """Read a file of ``torch.save`` onto the CPU; never runs code of the file.

    Raises
    ------
    CheckpointError
        When there is no such file, it is damaged, or it holds other things than tensors, numbers,
        strings and plain containers.
    """
    first_bytes(path)
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{path}: refused, it refers to {found[1]}, expected only tensors, since other things "
            "can run code; ask for a file with the state dict alone"
            if found
            else f"{path}: damaged, or no file of torch.save; fetch it again"
        ) from error
    return content


def _unwrap(content: object, source: Path) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    """Take the state dict out of what training scripts put around it."""
    renames: list[tuple[str, str]] = []
    if isinstance(content, Mapping):
        inner = next((key for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is not None:
            renames = [(str(key), "(not a weight)") for key in content if key != inner]
            content = content[inner]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(
            f"{source}: holds {_kind(content)}, expected a state dict: names and tensors; save model.state_dict()"
        )
    if other := [key for key, value in content.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{source}: {other[0]} is {_kind(content[other[0]])}, expected a tensor, or one of "
            f"{', '.join(WRAPPERS)} to hold the state dict; save model.state_dict()"
        )
    if odd := [key for key, t in content.items() if t.layout != torch.strided or t.is_meta]:
        raise CheckpointError(f"{source}: {odd[0]} is sparse or without values, expected a plain tensor; save it dense")
    return {str(key): value for key, value in content.items()}, renames


def _rename(tensors: Mapping[str, Tensor], renames: list[tuple[str, str]], source: Path) -> dict[str, Tensor]:
    """Strip the prefix of a wrapper and apply `RULES`; say so in ``renames``."""
    while prefix := next((prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in tensors)), ""):
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
        renames.append((f"{prefix}*", "*"))
    for dtype in {value.dtype for value in tensors.values() if value.is_floating_point()} - {torch.float32}:
        tensors = {key: value.float() if value.dtype == dtype else value for key, value in tensors.items()}
        renames.append((f"* in {dtype}", "* in torch.float32"))
    result: dict[str, Tensor] = {}
    for old, value in tensors.items():
        new = old
        for pattern, replacement in RULES:
            new = re.sub(pattern, replacement, new)
        if new in result:
            raise CheckpointError(f"{source}: two tensors would be called {new}, one of them {old}; remove one")
        result[new] = value
        if new != old:
            renames.append((old, new))
    return result


def _in_words(numbers: Tensor) -> str:
    return ",".join(f"{number:g}" for number in numbers.flatten().tolist())


def _kind(value: object) -> str:
    return "an empty mapping" if value == {} else f"a {type(value).__name__}"
