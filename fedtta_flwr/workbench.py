"""What a client process keeps between visits because it belongs to no client: networks, data, shared noise."""

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from logging import WARNING
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context
from flwr.common.logger import log
from torch import Tensor, nn

from fedtta_flwr import cpu
from fedtta_flwr.adaptation.base import Adapter, classifier
from fedtta_flwr.adaptation.objectives import Objectives, takes_gradient_steps, terms_from
from fedtta_flwr.config import RunConfig, Scalar
from fedtta_flwr.data.build import build_stream, open_data
from fedtta_flwr.data.contracts import ClientStream
from fedtta_flwr.data.datasets import CLEAN, check_files
from fedtta_flwr.descriptors import bn_statistics, chosen_images, mean_features, mean_logits, noise_images
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models.source import load_source
from fedtta_flwr.registry import ADAPTERS
from fedtta_flwr.resolve import make
from fedtta_flwr.seeding import seeded

if TYPE_CHECKING:
    from fedtta_flwr.tgfl import HeadBench

#: what a deployed node may set for itself
NODE_KEYS = ("data-dir", "stream", "device", "checkpoint")


class Workbench:
    """What a process keeps between visits because it belongs to no client."""

    dealt = ""  # each node may have images of its own

    def __init__(self, config: RunConfig) -> None:
        cpu.prepare(config.threads)
        self.config = config
        self.device = choose_device(config.device)
        self.scores = config.score_names()
        self.test_set = open_data(config)
        self.source = load_source(config, self.test_set.classes).to(self.device)
        self.fingerprint = fingerprint_of(self.source)
        self.adapter = make_adapter(config, deepcopy(self.source))
        #: never mixed: what the same adapter does alone, on the same stream; None where that is not scored
        self.lone = make_adapter(config, deepcopy(self.source)) if "local" in self.scores else None
        #: where every client begins
        self.initial = {name: t.clone() for name, t in self.adapter.adapted_state().items()}
        #: of the node whose message is being served; a process may serve several
        self.node_config: Mapping[str, object] = {}
        self._streams: dict[str, ClientStream] = {}
        self._looked_at: set[str] = set()
        self._shared: dict[tuple[str | int, ...], Tensor] = {}

    @property
    def classes(self) -> int:
        """Number of classes K."""
        return self.test_set.classes

    @property
    def steps(self) -> int:
        """How many steps the adapter has taken so far."""
        return self.adapter.steps

    @property
    def rolled_back(self) -> int:
        """How many steps the adapter has taken back so far."""
        return self.adapter.rolled_back

    def check(self) -> None:
        """Find out whether the images can be read, as far as a look at their headers tells.

        Raises
        ------
        DataError
            One cannot.
        """
        check_files(self.test_set)

    def slots(self, client: str) -> int:
        """Return the length of a client's stream."""
        return len(self.stream(client))

    def stream(self, client: str) -> ClientStream:
        """Return a client's stream."""
        if client not in self._streams:
            self._streams[client] = build_stream(self.config, client, self.test_set, self.node_config)
        return self._streams[client]

    def look_at(self, client: str, x: Tensor) -> None:
        """Warn if the first images [B, C, H, W] of a client's own stream are not in [0, 1]: accuracy would just be low.

        The project's own streams cannot be wrong in this.
        """
        if not self.config.stream or client in self._looked_at or not x.numel():
            return
        self._looked_at.add(client)
        low, high = (end.item() for end in x.aminmax())
        if not (x.is_floating_point() and low >= 0 and high <= 1):  # NaN is not, either
            log(
                WARNING,
                "%s: stream = %r: images are %s from %.4g to %.4g; allowed: floating point in [0, 1], input "
                "normalisation is part of the model",
                client,
                self.config.stream,
                str(x.dtype).removeprefix("torch."),
                low,
                high,
            )

    def pursue(self, objectives: Mapping[str, Any]) -> None:
        """Let the adapter add the terms that a strategy asks for to its loss; one without gradient steps cannot."""
        if objectives and self.adapter.objectives is None and takes_gradient_steps(self.adapter):
            Objectives(self.adapter, terms_from(objectives))

    def describe(self, descriptor: str, options: Mapping[str, Any], x: Tensor) -> Tensor | None:
        """Return a descriptor of the adapter's present model or of the batch x [B, C, H, W]; None if none is asked for.

        Options are those of the strategy, and who is described: ``client`` and ``round``.

        Raises
        ------
        ConfigError
            If it is not one of `DESCRIPTORS`, or there is nothing that it could be taken of.
        """
        if not descriptor:
            return None
        check_descriptor(descriptor)
        return DESCRIPTORS[descriptor](self, DESCRIPTOR_OPTIONS | dict(options), x)

    def noise(self, options: Mapping[str, Any], x: Tensor) -> Tensor:
        """Return noise [M, C, H, W] of the form of x: shared by all, or as often drawn anew as is asked for."""
        parts = REDRAW[options["redraw"]]
        purpose = [options[part] for part in parts]
        samples, (c, h, w) = int(options["samples"]), x.shape[1:]
        make = partial(noise_images, self.config.seed, samples, (c, h, w), *purpose)
        return self._latest(("noise", samples, c, h, w, *purpose), make)

    def chosen(self, options: Mapping[str, Any]) -> Tensor:
        """Return the shared clean images [M, C, H, W]."""
        samples, clean = int(options["samples"]), self.test_set.images(CLEAN, self.config.severity)
        return self._latest(("chosen", samples), partial(chosen_images, clean, self.config.seed, samples))

    def head(self, model: nn.Module) -> nn.Module:
        """Return the layer that makes logits of a network's penultimate features."""
        return classifier(model, "a descriptor of features")[1]

    def _latest(self, key: tuple[str | int, ...], make: Callable[[], Tensor]) -> Tensor:
        if key not in self._shared:
            self._shared = {key: make().to(self.device)}  # the latest alone: what is drawn anew does not come again
        return self._shared[key]


#: what a strategy may ask for: logits or penultimate features of the adapted model on shared images, those of the
#: source model on the batch, or the batch's statistics in the adapted model's BatchNorm layers
DESCRIPTORS: dict[str, Callable[[Workbench, Mapping[str, Any], Tensor], Tensor]] = {
    "noise-logits": lambda b, o, x: mean_logits(b.adapter.answer, b.noise(o, x)),
    "noise-features": lambda b, o, x: mean_features(b.adapter.answer, b.head(b.adapter.model), b.noise(o, x)),
    "chosen-logits": lambda b, o, x: mean_logits(b.adapter.answer, b.chosen(o)),
    "chosen-features": lambda b, o, x: mean_features(b.adapter.answer, b.head(b.adapter.model), b.chosen(o)),
    "logit-mean": lambda b, o, x: mean_logits(b.source, x),
    "feature-mean": lambda b, o, x: mean_features(b.source, b.head(b.source), x),
    "bn-statistics": lambda b, o, x: bn_statistics(b.adapter.model, x),
}
#: options of a descriptor, with their defaults: how many shared images, how often noise is drawn anew, and whether it
#: is taken before a client adapts
DESCRIPTOR_OPTIONS: dict[str, Scalar] = {"samples": 64, "redraw": "never", "lagged": False}
#: on what noise depends
REDRAW: dict[str, list[str]] = {"never": [], "each-round": ["round"], "each-client": ["round", "client"]}


def check_descriptor(descriptor: object, options: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Find out whether clients can be asked for a descriptor; an empty one asks for none.

    Raises
    ------
    ConfigError
        If there is none of this name, or an option is not one of `DESCRIPTOR_OPTIONS`.
    """
    if descriptor not in ("", *DESCRIPTORS):
        raise ConfigError(f"descriptor {descriptor!r}: unknown; allowed: {', '.join(DESCRIPTORS)}, or '' for none")
    if not isinstance(options, Mapping):
        raise ConfigError(f'descriptor_options is a {type(options).__name__}; allowed: a mapping, {{"samples": 64}}')
    for key, value in options.items():
        allowed = {
            "samples": ("a whole number above 0", type(value) is int and value > 0),
            "redraw": (", ".join(REDRAW), value in list(REDRAW)),
            "lagged": ("True, False", isinstance(value, bool)),
        }
        if key not in allowed:
            raise ConfigError(f"descriptor_options: {key!r} is unknown; allowed: {', '.join(allowed)}")
        if not allowed[key][1]:
            raise ConfigError(f"descriptor_options: {key} = {value!r}; allowed: {allowed[key][0]}")


_workbenches: dict[tuple[object, ...], "Workbench | HeadBench"] = {}


def workbench(context: Context) -> "Workbench | HeadBench":
    """Return this process's workbench for a run, made when the run first comes by."""
    key = (context.run_id, *(context.node_config.get(name) for name in NODE_KEYS))
    bench = _workbenches.get(key)
    if bench is None:
        config = local_config(context)
        if config.task == "tgfl":
            from fedtta_flwr.tgfl import HeadBench

            bench = HeadBench(config)
        else:
            bench = Workbench(config)
        for stale in [other for other in _workbenches if other[0] != context.run_id]:
            del _workbenches[stale]  # one run at a time: an earlier run's networks and images are let go
        _workbenches[key] = bench
    if isinstance(bench, Workbench):
        bench.node_config = context.node_config  # streams depend on it, and on nothing else of the context
    return bench


def local_config(context: Context) -> RunConfig:
    """Return a run's config with what its node says otherwise: where its data and its processor are, never how.

    A node's own ``stream`` takes the place of the run's data set, whichever that is. Its own ``checkpoint`` is a copy
    of the run's, in another place: the server compares them (`fingerprint_of`).

    Raises
    ------
    ConfigError
        As `RunConfig.from_flat`.
    """
    flat = dict(context.run_config) | {key: context.node_config[key] for key in NODE_KEYS if key in context.node_config}
    if "stream" in context.node_config:
        flat.pop("dataset", None)
    return RunConfig.from_flat(flat)


def choose_device(name: str) -> torch.device:
    """Return the torch device that a run config names, and prepare this process for it.

    Raises
    ------
    ConfigError
        If it is a CUDA device that is not there.
    """
    cuda = torch.cuda.is_available()
    # cuDNN's fastest ways add gradients up as they come: no run would be the same twice, or go on to the same result.
    torch.backends.cudnn.deterministic = True
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
    own, options = config.adapter_options, config.options(config.adapter)
    device = next(iter(model.state_dict().values()), torch.zeros(())).device
    with seeded(device, config.seed, "adapter"):  # one of the user's own may draw weights, the same ones everywhere
        adapter: Adapter = make("adapter", config.adapter, ADAPTERS, Adapter, model, options, options=own)
    if not hasattr(adapter, "_check"):
        raise ConfigError(f"adapter = {config.adapter!r}: __init__ must call super().__init__(model, options)")
    return adapter


def fingerprint_of(model: nn.Module) -> str:
    """Return a short hash of a model's tensors: all clients must begin from the same ones."""
    digest = hashlib.sha256()
    for name, t in model.state_dict().items():
        digest.update(name.encode() + t.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
