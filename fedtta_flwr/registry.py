"""Names that a run config may use for strategies and adapters, and how they become classes.

Nothing heavy is imported before a name is resolved. A class of the user's own package is named
``my_package.my_module:MyClass``; since a run config may come from somebody else, such an import needs the
operator's consent: the environment variable ``FEDTTA_PLUGINS`` lists the packages that may be imported.
"""

import importlib
import os
import traceback
from pathlib import Path
from typing import Any

from fedtta_flwr.errors import ConfigError, FedTTAError

#: name -> (module:class, one line of explanation)
STRATEGIES: dict[str, tuple[str, str]] = {
    "local": ("fedtta_flwr.strategies.local:Local", "no collaboration: W is the identity"),
    "fedavg": ("fedtta_flwr.strategies.fedavg:FedAvg", "one mean for all, weighted by samples"),
    "fedctta": (
        "fedtta_flwr.strategies.fedctta:FedCTTA",
        "mixtures of clients that answer alike on shared noise (IJCNN 2025)",
    ),
}
ADAPTERS: dict[str, tuple[str, str]] = {
    "source": ("fedtta_flwr.adaptation.source:Source", "no adaptation"),
    "bn-stats": (
        "fedtta_flwr.adaptation.bn_stats:BNStats",
        "TTA-bn: BatchNorm statistics replaced by the batch's",
    ),
    "entropy": (
        "fedtta_flwr.adaptation.entropy:Entropy",
        "TTA-grad: one SGD step on the prediction entropy over all parameters",
    ),
    "dua": ("fedtta_flwr.adaptation.dua:DUA", "running statistics with a decaying momentum (CVPR 2022)"),
    "tent": ("fedtta_flwr.adaptation.tent:Tent", "entropy minimisation on the affine parameters (ICLR 2021)"),
    "eata": ("fedtta_flwr.adaptation.eata:EATA", "Tent on reliable, not redundant samples (ICML 2022)"),
    "sar": ("fedtta_flwr.adaptation.sar:SAR", "sharpness-aware Tent on reliable samples (ICLR 2023)"),
    "shot": ("fedtta_flwr.adaptation.shot:SHOT", "information maximisation under a fixed classifier (ICML 2020)"),
    "note": ("fedtta_flwr.adaptation.note:NOTE", "instance-aware BN, prediction-balanced memory (NeurIPS 2022)"),
    "memo": ("fedtta_flwr.adaptation.memo:MEMO", "one step per image over its augmented views (NeurIPS 2022)"),
    "lame": ("fedtta_flwr.adaptation.lame:LAME", "predictions smoothed over neighbours (CVPR 2022)"),
    "cotta": ("fedtta_flwr.adaptation.cotta:CoTTA", "slow teacher, averaged views, restoration (CVPR 2022)"),
    "rotta": ("fedtta_flwr.adaptation.rotta:RoTTA", "robust BN and a balanced memory (CVPR 2023)"),
    "roid": ("fedtta_flwr.adaptation.roid:ROID", "weighted likelihood ratio, weight ensembling (WACV 2024)"),
    "bbn": (
        "fedtta_flwr.adaptation.bbn:BBN",
        "balanced BN, filtered distillation: pFedBBN's client, TRIBE (AAAI 2024)",
    ),
}
PLUGIN_VARIABLE = "FEDTTA_PLUGINS"


def check_name(kind: str, name: str, known: dict[str, tuple[str, str]]) -> str:
    """Return `name` if it may be used.

    Raises
    ------
    ConfigError
        If it is neither known nor an import that the operator allowed.
    """
    if name in known:
        return name
    module, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier():
        raise ConfigError(
            f"{kind} = {name!r}: unknown; allowed: {', '.join(known)}, or package.module:Class of "
            f"your own (see `fedtta list`)"
        )
    package = module.partition(".")[0]
    allowed = [p.strip() for p in os.environ.get(PLUGIN_VARIABLE, "").split(",") if p.strip()]
    if package not in allowed:
        raise ConfigError(
            f"{kind} = {name!r}: importing package {package!r} is not allowed here (allowed: "
            f"{', '.join(allowed) or 'none'}); the operator permits it with {PLUGIN_VARIABLE}={package}"
        )
    return name


def resolve(kind: str, name: str, known: dict[str, tuple[str, str]]) -> Any:
    """Import and return the class behind a checked name.

    Raises
    ------
    ConfigError
        If the name is not allowed, or the import fails.
    """
    check_name(kind, name, known)
    target = known[name][0] if name in known else name
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a package of the user's own may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{kind} = {name!r}: cannot be imported: {text}") from error


def make(kind: str, name: str, known: dict[str, tuple[str, str]], base: type, *arguments: Any) -> Any:
    """Return an object of the class behind a checked name.

    Parameters
    ----------
    kind : str
        The key of the run config, for messages.
    name : str
        Its value.
    known : dict
        The names that need no consent.
    base : type
        What the class must be a subclass of.
    *arguments
        Of its constructor.

    Raises
    ------
    ConfigError
        If the name is not allowed, the import fails, what it names is no such class, or one of the user's own raises.
    """
    found = resolve(kind, name, known)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{kind} = {name!r}: no subclass of {base.__module__}.{base.__name__}; make it one")
    try:
        return found(*arguments)
    except Exception as error:
        if name in known or isinstance(error, FedTTAError):
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        inside = traceback.extract_tb(error.__traceback__)[1:]
        where = f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""
        given = ", ".join(type(argument).__name__ for argument in arguments)
        raise ConfigError(
            f"{kind} = {name!r}: {found.__name__}({given}) raised {text}{where}; put it right there"
        ) from error
