"""Where the source model comes from: a checkpoint, the one that ships with the package, or training."""

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.contracts import to_tensor
from fedtta_flwr.data.digits import source_part, test_part
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models import ROBUSTBENCH, build
from fedtta_flwr.models.base import Classifier
from fedtta_flwr.models.checkpoints import file_hash, load, save
from fedtta_flwr.models.normalize import Normalize
from fedtta_flwr.models.own import build_own
from fedtta_flwr.paths import expanded, in_home
from fedtta_flwr.plugins import is_own
from fedtta_flwr.seeding import derive_seed, seeded

EMBEDDED_DATASET, EMBEDDED_MODEL, EMBEDDED_FILE = "digits", "resnet8", "digits-resnet8.safetensors"
#: SHA-256 of the shipped file; another checkout's file of the same name is not it
EMBEDDED_HASH = "ad60ac3dea7427b4094edf85e6aa761a319e69c17734852f75948fe43b17020f"
EPOCHS, BATCH, LEARNING_RATE = 20, 64, 1e-3


def load_source(config: RunConfig, classes: int) -> nn.Module:
    """Return the source model of a run on a data set of so many classes.

    Raises
    ------
    ConfigError
        If no checkpoint is named and there is no embedded one for the data set and model; if RobustBench has no such
        model or is not installed; if a network of the user's own cannot be used (`build_own`); or if there is no input
        normalisation that ``legacy-no-norm`` could remove.
    CheckpointError
        If the checkpoint cannot be used.
    """
    if config.model.startswith(ROBUSTBENCH):
        return _from_zoo(config, classes)
    if is_own(config.model):
        return build_own(config, classes)
    model = _from_file(config, classes)
    if config.legacy_no_norm:
        normalize = model.normalize
        if normalize.is_identity:
            raise ConfigError(
                f"legacy-no-norm = true: {config.checkpoint or config.model} has no input normalisation that could "
                f"be left out; allowed: false"
            )
        model.normalize = Normalize([0.0] * normalize.channels, [1.0] * normalize.channels)
    return model


def _from_zoo(config: RunConfig, classes: int) -> Classifier:
    trained_on = {10: "cifar10", 100: "cifar100"}.get(classes)
    if trained_on is None:
        raise ConfigError(f"model = {config.model!r}: made for 10 or 100 classes, {config.dataset} has {classes}")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", config.model.removeprefix(ROBUSTBENCH)):
        raise ConfigError(f"model = {config.model!r}: allowed: {ROBUSTBENCH}ID, e.g. {ROBUSTBENCH}Standard")
    from fedtta_flwr.models.robustbench import load_robustbench

    folder = expanded("checkpoint", config.checkpoint) if config.checkpoint else cache_dir() / "robustbench"
    return load_robustbench(config.model, trained_on, model_dir=folder, legacy_no_norm=config.legacy_no_norm)


def _from_file(config: RunConfig, classes: int) -> Classifier:
    if config.checkpoint:
        return load(expanded("checkpoint", config.checkpoint), architecture=config.model, classes=classes)
    if (config.dataset, config.model) != (EMBEDDED_DATASET, EMBEDDED_MODEL):
        raise ConfigError(
            f"checkpoint is empty: allowed only with dataset = {EMBEDDED_DATASET!r} and model = "
            f"{EMBEDDED_MODEL!r} (found {config.dataset!r}, {config.model!r}); name a .safetensors file"
        )
    return load(embedded_checkpoint(), architecture=config.model, classes=classes)


def embedded_checkpoint(report: Callable[[str], None] = print) -> Path:
    """Return the path of the embedded default's source model; train it if it is nowhere to be found.

    Looked for beside this file, in the installed distribution (the copy of the package that Flower ships to a
    simulation cannot hold it), and in the user's cache.
    """
    for path in _candidates():
        if path.is_file() and file_hash(path) == EMBEDDED_HASH:
            return path
    cached = cache_dir() / f"digits-resnet8-{_recipe_hash()}.safetensors"
    if not cached.is_file():
        report(f"training the embedded source model once (under a minute): {cached}")
        train_digits(cached, EMBEDDED_MODEL)
    return cached


def cache_dir() -> Path:
    """Return the folder for what can be made again: $XDG_CACHE_HOME/fedtta, or ~/.cache/fedtta."""
    return Path(os.environ.get("XDG_CACHE_HOME") or in_home(".cache")) / "fedtta"


def train_digits(
    path: Path,
    architecture: str,
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> float:
    """Train a source model on the digits' source part and save it.

    Adam with a cosine schedule from 1e-3, batches of 64, no augmentation; input normalised by the source part's own
    mean and standard deviation.

    Parameters
    ----------
    path : Path
        Where the .safetensors file is written, at once and whole.
    architecture : str
        One of `fedtta_flwr.models.MODELS`.
    epochs : int
        Passes over the 1,000 source images.
    seed : int
        Of initialisation and batch order.
    report : callable
        Receives one line an epoch.

    Returns
    -------
    float
        Accuracy in percent on the clean test part.
    """
    # One thread: the weights then depend on no number of cores, and a network this small gains nothing from more.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _train(architecture, epochs, seed, report)
        x, y = _tensors(*test_part())
        with torch.no_grad():
            correct = int((model(x).argmax(dim=1) == y).sum())
    finally:
        torch.set_num_threads(threads)
    accuracy = 100 * correct / len(y)
    about = {"architecture": architecture, "classes": "10", "trained-on": "digits"}
    save(model, path, about | {"accuracy": f"{accuracy:.2f}"})
    return accuracy


def _train(architecture: str, epochs: int, seed: int, report: Callable[[str], None]) -> Classifier:
    x, y = _tensors(*source_part())
    mean, std = x.mean(dim=(0, 2, 3)).tolist(), x.std(dim=(0, 2, 3)).tolist()
    generator = torch.Generator().manual_seed(derive_seed(seed, "batches"))
    with seeded(x.device, seed, "weights"):
        model = build(architecture, 10, mean=mean, std=std).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps = epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.split(torch.randperm(len(x), generator=generator), BATCH):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += loss.item() * len(rows)
        report(f"epoch {epoch + 1}/{epochs}: loss {total / len(x):.4f}")
    return model.eval()


def _tensors(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    x = to_tensor(images)
    return x.contiguous(), torch.from_numpy(labels)


def _candidates() -> list[Path]:
    inside = Path("models") / EMBEDDED_FILE
    found = [Path(__file__).parents[1] / inside]
    try:
        distribution = importlib.metadata.distribution("fedtta-flwr")
    except importlib.metadata.PackageNotFoundError:
        return found
    found.append(Path(str(distribution.locate_file("fedtta_flwr"))) / inside)
    origin = distribution.read_text("direct_url.json")
    if origin:  # an editable installation: the files are where it was installed from
        url = urlparse(json.loads(origin).get("url", ""))
        if url.scheme == "file":
            found.append(Path(unquote(url.path)) / "fedtta_flwr" / inside)
    return found


def _recipe_hash() -> str:
    """Return a hash of what the trained model depends on: this file and the network's."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for name in ("source.py", "resnet.py", "normalize.py"):
        digest.update((here / name).read_bytes())
    return digest.hexdigest()[:16]
