"""What a client process keeps between visits because it belongs to no client: networks, data, shared noise."""

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor, nn

from fedtta_flwr.adaptation.base import Adapter
from fedtta_flwr.adaptation.objectives import Objectives, takes_gradient_steps, terms_from
from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.build import build_stream, open_data
from fedtta_flwr.data.contracts import ClientStream
from fedtta_flwr.descriptors import noise_images, noise_logits
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models.source import load_source
from fedtta_flwr.registry import ADAPTERS, make


class Workbench:
    """What a process keeps between visits because it belongs to no client."""

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(config.threads)
        self.config = config
        self.device = choose_device(config.device)
        self.scores = config.score_names()
        self.test_set = open_data(config)
        model = load_source(config, self.test_set.classes).to(self.device)
        self.fingerprint = _fingerprint(model)
        self.source: nn.Module = deepcopy(model)
        self.adapter = make_adapter(config, deepcopy(model))
        #: never mixed: what the same adapter does alone, on the same stream
        self.lone = make_adapter(config, model)
        #: where every client begins
        self.initial = {name: t.clone() for name, t in self.adapter.adapted_state().items()}
        #: of the node whose message is being served; a process may serve several
        self.node_config: Mapping[str, object] = {}
        self._streams: dict[str, ClientStream] = {}
        self._noise: dict[int, Tensor] = {}

    def stream(self, client: str) -> ClientStream:
        """Return a client's stream."""
        if client not in self._streams:
            self._streams[client] = build_stream(self.config, client, self.test_set, self.node_config)
        return self._streams[client]

    def pursue(self, objectives: Mapping[str, Any]) -> None:
        """Let the adapter add the terms that a strategy asks for to its loss; one without gradient steps cannot."""
        if objectives and self.adapter.objectives is None and takes_gradient_steps(self.adapter):
            Objectives(self.adapter, terms_from(objectives))

    def describe(self, descriptor: str, options: dict[str, Any], x: Tensor) -> Tensor | None:
        """Return the descriptor of the adapter's present model, or None if none is asked for."""
        if not descriptor:
            return None
        if descriptor == "noise-logits":
            samples = int(options["samples"])
            if samples not in self._noise:
                c, h, w = x.shape[1:]
                self._noise[samples] = noise_images(self.config.seed, samples, (c, h, w)).to(self.device)
            return noise_logits(self.adapter.predict, self._noise[samples])
        raise ConfigError(f"descriptor {descriptor!r}: unknown; allowed: noise-logits, or none")


_workbenches: dict[int, Workbench] = {}


def workbench(context: Context) -> Workbench:
    """Return this process's workbench for a run, made when the run first comes by."""
    bench = _workbenches.get(context.run_id)
    if bench is None:
        bench = Workbench(RunConfig.from_flat(context.run_config))
        _workbenches.clear()  # one run at a time: an earlier run's networks and images are let go
        _workbenches[context.run_id] = bench
    bench.node_config = context.node_config
    return bench


def choose_device(name: str) -> torch.device:
    """Return the torch device that a run config names.

    Raises
    ------
    ConfigError
        If it is a CUDA device that is not there.
    """
    cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not cuda or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"device = {name!r}: {torch.cuda.device_count()} CUDA devices found; allowed here: auto, cpu"
            + "".join(f", cuda:{i}" for i in range(torch.cuda.device_count()))
        )
    return device


def make_adapter(config: RunConfig, model: nn.Module) -> Adapter:
    """Build the run's adapter around a model, which it owns from then on.

    Raises
    ------
    ConfigError
        If the name is not one of an adapter, or the adapter cannot work with this model.
    """
    adapter: Adapter = make("adapter", config.adapter, ADAPTERS, Adapter, model, config.options(config.adapter))
    return adapter


def _fingerprint(model: nn.Module) -> str:
    """Return a short hash of a model's tensors: all clients must begin from the same ones."""
    digest = hashlib.sha256()
    for name, t in model.state_dict().items():
        digest.update(name.encode() + t.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
