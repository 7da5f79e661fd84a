"""The RobustBench zoo (an optional dependency) by its own model ids.

References
----------
Croce et al. RobustBench. NeurIPS 2021 Datasets and Benchmarks (arXiv 2010.09670).
"""

import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtta_flwr.errors import CheckpointError, ConfigError, install
from fedtta_flwr.models import ROBUSTBENCH
from fedtta_flwr.models.base import Classifier, take_head
from fedtta_flwr.models.convert import read_torch
from fedtta_flwr.models.normalize import Normalize


class ZooClassifier(Classifier):
    """A network of the zoo with its normalisation in front and its last linear layer behind.

    Parameters
    ----------
    model : nn.Module
        A network of the zoo, which is changed: the normalisation that it carries moves to
        ``normalize`` and its last linear layer to ``head``.

    Raises
    ------
    ValueError
        When the network does not end in a linear layer, as an ensemble does not.
    """

    def __init__(self, model: nn.Module) -> None:
        probe = torch.linspace(0, 1, 3 * 32 * 32).view(1, 3, 32, 32)
        with torch.no_grad():
            expected = model(probe)
        super().__init__(_take_normalisation(model))
        self.model = model
        head = take_head(model)
        if head is None:
            raise ValueError("it has no linear layer")
        self.head = head
        with torch.no_grad():
            # The zoo's networks are free to do more before, between and after; this would show it.
            same = torch.allclose(self(probe), expected, rtol=1e-4, atol=1e-4)
        if not same:
            raise ValueError("it is not normalisation, network, linear layer")

    def embed(self, x: Tensor) -> Tensor:
        """Map normalised images [B, 3, 32, 32] to features [B, D]."""
        features: Tensor = self.model(x.contiguous())  # some of the zoo's networks take views, which go by layout
        return features


def load_robustbench(
    model_id: str,
    dataset: str,
    threat_model: str = "corruptions",
    model_dir: str | Path | None = None,
    *,
    legacy_no_norm: bool = False,
) -> Classifier:
    """Load a network of the zoo, from ``<model_dir>/<dataset>/<threat_model>/<id>.pt`` if there.

    The file is downloaded when absent; one that was put there by hand works without a network.

    Parameters
    ----------
    model_id : str
        The zoo's own id, e.g. ``"Standard"`` or ``"Hendrycks2020AugMix_ResNeXt"``; may have the
        prefix ``robustbench:``.
    dataset : {"cifar10", "cifar100"}
        What it was trained on.
    threat_model : str
        The zoo's list: ``"corruptions"``, ``"Linf"`` or ``"L2"``.
    model_dir : path, optional
        Where the zoo keeps its files; its own default is ``./models``.
    legacy_no_norm : bool
        Feed pixels in [0, 1] without the network's input normalisation. Wrong, but it is how the
        published CIFAR-100 rows of FedTSA and FedCTTA were made.

    Returns
    -------
    Classifier
        In eval mode, on the CPU.

    Raises
    ------
    ConfigError
        The extra is not installed, the zoo has no such network, it is not one file, or
        ``legacy_no_norm`` finds nothing to remove.
    CheckpointError
        The file is absent and cannot be downloaded, is damaged, or does not fit.
    """
    name = model_id.removeprefix(ROBUSTBENCH)
    utils, models = _zoo(name, dataset, threat_model)
    if name not in models:
        raise ConfigError(
            f"RobustBench has no model {name!r} for {dataset}, {threat_model}; allowed: {', '.join(models)}"
        )
    folder = Path("models" if model_dir is None else model_dir)
    path = folder / dataset / threat_model / f"{name}.pt"
    source = models[name]["gdrive_id"]
    if not isinstance(source, str):
        raise ConfigError(
            f"RobustBench model {name} is an ensemble or kept by timm, expected one network in one file; choose another"
        )
    if not path.is_file():
        _download(utils, source, path)
    # The zoo's own loading runs a file's code with torch < 2.6; so it may see only harmless files.
    read_torch(path)
    try:
        model = utils.load_model(name, model_dir=folder, dataset=dataset, threat_model=threat_model)
        classifier = ZooClassifier(model)
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path}: does not fit RobustBench model {name}: {reason}; give another file or model"
        ) from error
    if legacy_no_norm:
        if classifier.normalize.is_identity:
            raise ConfigError(
                f"RobustBench model {name} has no input normalisation that can be removed; leave legacy-no-norm out"
            )
        classifier.normalize = Normalize([0.0] * 3, [1.0] * 3)
    return classifier.eval()


def _zoo(name: str, dataset: str, threat_model: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Import the zoo, which takes seconds; return its loader and its list of models."""
    try:
        # The zoo imports `autoattack`, whose release on the package index is `pyautoattack`.
        if importlib.util.find_spec("autoattack") is None:
            for suffix in ("", ".state"):
                sys.modules[f"autoattack{suffix}"] = importlib.import_module(f"pyautoattack{suffix}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside the zoo's own dependencies
            utils = importlib.import_module("robustbench.utils")
    except ImportError as error:
        raise ConfigError(
            f"model {ROBUSTBENCH}{name} needs an extra that is not installed ({error}): {install('robustbench')}"
        ) from error
    enums = importlib.import_module("robustbench.model_zoo.enums")
    try:
        models = utils.all_models[enums.BenchmarkDataset(dataset)]
        return utils, models[enums.ThreatModel(threat_model)]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"RobustBench has no models for {dataset}, {threat_model}") from error


def _download(utils: Any, source: str, path: Path) -> None:
    """Fetch a file from where the zoo keeps it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # what a kill leaves is not taken for the file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        utils.download_gdrive_new(source, part)
        reason = "nothing came"
        part.replace(path)
    except Exception as error:  # whatever the network and the server's pages can do
        reason = type(error).__name__
    finally:
        part.unlink(missing_ok=True)
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file, and it cannot be downloaded ({reason}); put the zoo's file "
            f"there by hand, from https://drive.google.com/uc?id={source}"
        )


def _take_normalisation(model: nn.Module) -> Normalize:
    """Move the input normalisation out of a network, exactly; identity when it has none."""
    for names in (("mu", "sigma"), ("mean", "std")):
        mean, std = (getattr(model, name, None) for name in names)
        if isinstance(mean, Tensor) and isinstance(std, Tensor):
            normalize = Normalize(mean.flatten().tolist(), std.flatten().tolist())
            mean.zero_()  # (x - 0) / 1 is x, to the last bit
            std.fill_(1)
            return normalize
    return Normalize([0.0] * 3, [1.0] * 3)
