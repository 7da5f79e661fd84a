"""The visit of a client with two heads: train, measure, or predict a test set, as the round's number says.

Of a client's own work `Memory` keeps the heads that are not shared and, once measured, the statistics of its training
part. A process keeps what belongs to no client: the network, the images and how they are shared out (`HeadBench`).
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial

import numpy as np
import torch
from flwr.app import ConfigRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtta_flwr import cpu
from fedtta_flwr.adaptation.augment import crop_and_flip
from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.build import open_benchmark
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.heads.base import SHARED, VALIDATION, Predictor, ask
from fedtta_flwr.heads.training import (
    SGD,
    Epoch,
    TwoHeads,
    fitted,
    personal_logits,
    personalise,
    statistics,
    train_shared,
)
from fedtta_flwr.heads.trial import try_out
from fedtta_flwr.memory import NO_SLOT, Cursor, Memory, Remembered
from fedtta_flwr.models import MODELS, build
from fedtta_flwr.models.checkpoints import load
from fedtta_flwr.models.own import build_own
from fedtta_flwr.models.trial import try_extractor, try_own
from fedtta_flwr.paths import expanded
from fedtta_flwr.phases import MEASURE, TRAIN, phase_of, phases
from fedtta_flwr.plugins import is_own, plugin_code
from fedtta_flwr.records import BINS, CLIENTS, STATISTICS, from_arrays, to_arrays
from fedtta_flwr.registry import HEADS
from fedtta_flwr.resolve import resolve
from fedtta_flwr.seeding import seeded, torch_rng
from fedtta_flwr.visited import Visited
from fedtta_flwr.workbench import choose_device, fingerprint_of

#: data set -> mean and standard deviation of its channels, for the input normalisation; others have the last line's
NORMALISATION: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "": ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
}
OWN_HEADS = ("personal_head.", "global_head.")
Labelled = tuple[Tensor, Tensor]  #: images [N, C, H, W] in [0, 1] and labels [N]
FEW = 256  # images of a pass that only measures


class HeadBench:
    """What a process keeps between visits because it belongs to no client.

    Parameters
    ----------
    config : RunConfig
        With ``task = "tgfl"``.

    Raises
    ------
    ConfigError, DataError, CheckpointError
        As `open_benchmark`; or model or head cannot be used.
    """

    def __init__(self, config: RunConfig) -> None:
        cpu.prepare(config.threads)
        self.config = config
        self.device = choose_device(config.device)
        self.data = open_benchmark(config)
        self.classes = self.data.classes
        method = resolve("head", config.head, HEADS, config.head_options)
        if not (isinstance(method, type) and issubclass(method, Predictor)):
            raise ConfigError(f"head = {config.head!r}: no subclass of fedtta_flwr.heads.base.Predictor; make it one")
        self.method: type[Predictor] = method
        self.options = config.options(config.head)
        recipe = self.method.recipe(self.options)
        self.net = TwoHeads(_begin(config, self.classes), recipe).to(self.device)
        self.fingerprint = fingerprint_of(self.net)
        #: trainings; those whose heads were left as they were before, since they came to be no numbers
        self.steps = self.rolled_back = 0
        #: where every client begins
        self.initial = {name: t.clone() for name, t in self.net.state_dict().items()}

    @property
    def measured(self) -> list[str]:
        """Of the statistics that the method needs, those that clients send, in the order of their descriptor."""
        return [own for own, mean in SHARED.items() if mean in self.method.needs]

    @property
    def dealt(self) -> str:
        """A short hash of the images that are dealt out to all clients (`Benchmark.fingerprint`)."""
        return self.data.fingerprint

    def check(self) -> None:
        """Find out whether the images can be read (`Benchmark.check`)."""
        self.data.check()

    def slots(self, client: str) -> int:
        """Return the number of rounds, which is the same for every client."""
        return len(phases(self.config))

    def adapted_state(self) -> dict[str, Tensor]:
        """Return what a client receives: what is shared, the mean of what was measured, and of how many clients."""
        width = self.net.personal_head.in_features
        none = {STATISTICS: torch.zeros(len(self.measured) * width), CLIENTS: torch.zeros(())}
        return {name: t.clone() for name, t in self.net.shared().items()} | none

    def sgd(self) -> SGD:
        """Return the optimiser of a run."""
        table = self.config.tgfl
        return SGD(table.learning_rate, table.momentum, table.weight_decay)


def visit_heads(
    bench: HeadBench,
    client: str,
    request: ConfigRecord,
    received: dict[str, Tensor] | None,
    memory: Memory,
) -> Visited:
    """One client's visit: what the round's phase asks for, from what was received and what is remembered."""
    config, net, result = bench.config, bench.net, Visited()
    number = int(request["round"])  # type: ignore[arg-type]
    phase = phase_of(config, number)
    resumed = client in request["resuming"]  # type: ignore[operator]
    known = memory.recall(client, int(request["resume"]) if resumed else None)  # type: ignore[arg-type]
    result.forgot = known is None and number > 1
    shared = {name: t for name, t in (received or {}).items() if name not in (STATISTICS, CLIENTS)}
    net.load_state_dict(bench.initial)
    if shared:
        net.load_shared(shared)
    parts = {part: from_arrays(record) for part, record in (known.parts if known is not None else {}).items()}
    if "heads" in parts:
        net.load_state_dict(parts["heads"], strict=False)
    elif "global_head.weight" in shared:
        net.personal_head.load_state_dict({"weight": shared["global_head.weight"]})
    remembered, before = {}, _own_heads(net)
    if phase == TRAIN:
        _train(bench, client, number, result)
        _undo_where_not_finite(bench, before)
    else:
        own = parts.get("statistics")
        if own is None:  # it is the round for that, or the client has missed it
            images = _placed(bench, bench.data.training(client))
            _personalise(bench, images, client, number)
            _undo_where_not_finite(bench, before)
            own = statistics(net, in_order(images), _alone(bench))
        if phase == MEASURE:
            result.samples = bench.data.training_size(client)
            result.descriptor = torch.cat([torch.zeros(0), *(own[name].cpu() for name in bench.measured)])
        else:
            _predict(bench, client, phase, own, received or bench.adapted_state(), result)
        remembered["statistics"] = to_arrays(own)
    result.memory = Remembered(Cursor(number, NO_SLOT, number), {"heads": to_arrays(_own_heads(net))} | remembered)
    return result


def _train(bench: HeadBench, client: str, round_: int, result: Visited) -> None:
    """Train on the client's images: the personal head on what was received, then what is shared."""
    images = _placed(bench, bench.data.training(client))
    if bench.net.recipe.heads == "apart":
        _personalise(bench, images, client, round_)
    counts = torch.bincount(images[1], minlength=bench.classes)
    epochs = bench.config.tgfl.epochs
    if bench.net.recipe.heads == "fedrep":
        epochs = max(2, epochs)  # the last one trains the extractor, those before the head
    with seeded(bench.device, bench.config.seed, client, round_, "dropout"):
        batches = shuffled(bench, images, client, round_, "shared")
        result.loss = train_shared(bench.net, batches, epochs, bench.sgd(), counts)
    result.samples = len(images[1])
    result.state = {name: t.to("cpu", copy=True) for name, t in bench.net.shared().items()}


def _placed(bench: HeadBench, part: tuple[Tensor, NDArray[np.int64]]) -> Labelled:
    """Return a part of a client's data where the network is."""
    images, y = part
    return images.to(bench.device), torch.from_numpy(y).to(bench.device)


def _personalise(bench: HeadBench, images: Labelled, client: str, round_: int) -> None:
    epochs = bench.config.tgfl.personal_epochs
    personalise(bench.net, shuffled(bench, images, client, round_, "personal"), epochs, bench.sgd())


def _undo_where_not_finite(bench: HeadBench, before: Mapping[str, Tensor]) -> None:
    """Give the client the heads that it had before, where those that stay at home are no numbers any more.

    What is shared the server screens, and sends anew; from these the client would never come back.
    """
    bench.steps += 1
    if not all(t.isfinite().all() for t in _own_heads(bench.net).values()):
        bench.net.load_state_dict(before, strict=False)
        bench.rolled_back += 1


def _predict(
    bench: HeadBench, client: str, name: str, own: Mapping[str, Tensor], received: Mapping[str, Tensor], result: Visited
) -> None:
    """Predict one of the client's test sets in order, and count what was right."""
    images, y = bench.data.test(client, name)
    x, labels = images.to(bench.device), torch.from_numpy(y)
    found = {key: t.to(bench.device) for key, t in own.items()} | _of_all(bench, received)
    if bench.method.needs & VALIDATION.keys():
        found |= statistics(bench.net, in_order(_placed(bench, bench.data.training(client))), VALIDATION)
    if bench.method.needs & {*VALIDATION.values()}:
        validation = _placed(bench, bench.data.validation(client))
        made = statistics(bench.net, in_order(validation), VALIDATION)
        found |= {VALIDATION[own]: t for own, t in made.items()}
    net = deepcopy(bench.net)  # the predictor may tune it
    with seeded(bench.device, bench.config.seed, client, name, "head"):  # one of the user's own may draw something
        predictor: Predictor = bench.method(fitted(net, found), bench.options)
    predictor.identity = (bench.config.seed, client)
    predictor.reset()
    probabilities, weights = [], []
    for batch in torch.split(x, bench.config.batch_size):
        probabilities.append(ask(predictor, batch))
        if predictor.weights is not None:
            weights.append(predictor.weights)
    result.domains.append(name)
    result.count("seen", torch.bincount(labels, minlength=bench.classes))
    result.score("tta", torch.cat(probabilities), labels)
    alone: dict[str, Callable[[Tensor], Tensor]] = {
        "source": bench.net.global_head,
        "local": partial(personal_logits, bench.net),
    }
    if "global_head.weight" not in bench.net.shared():
        del alone["source"]  # FedRep trains none
    if scores := [score for score in bench.config.score_names() if score in alone]:
        with torch.no_grad():
            z = torch.cat([bench.net.extractor(batch) for batch in torch.split(x, FEW)])
            for score in scores:
                result.score(score, alone[score](z), labels)
    if weights:
        result.histogram = torch.histc(torch.cat(weights).float().cpu(), BINS, 0.0, 1.0).to(torch.int32)


def _of_all(bench: HeadBench, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what was measured as the mean of all clients, by the names that predictors know."""
    names = [SHARED[own] for own in bench.measured]
    means = received[STATISTICS].to(bench.device).reshape(len(names), -1) if names else ()
    return dict(zip(names, means, strict=True)) | {CLIENTS: received[CLIENTS].to(bench.device)}


def _alone(bench: HeadBench) -> set[str]:
    """Return the statistics that a client makes once and remembers; its images' features are made when needed."""
    return {*bench.method.needs, *bench.measured} - {*VALIDATION, *VALIDATION.values()}


def shuffled(bench: HeadBench, images: Labelled, client: str, round_: int, purpose: str) -> Epoch:
    """Return passes over a client's images, each in an order of its own, augmented if the run config says so."""
    x, labels = images
    generator = torch_rng(bench.config.seed, client, round_, purpose)

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(x), generator=generator).to(x.device)
        for rows in torch.split(order, bench.config.tgfl.train_batch):
            batch = crop_and_flip(x[rows], generator) if bench.config.tgfl.augment else x[rows]
            yield batch, labels[rows]

    return epoch


def in_order(images: Labelled) -> Epoch:
    """Return a pass over images as they lie."""
    return lambda: zip(*(torch.split(part, FEW) for part in images), strict=True)


def check_heads(config: RunConfig) -> HeadBench:
    """Find out what is wrong with data, network and head while nobody has been asked anything yet.

    The network is asked for one image without its classifier, one of the user's own also as a whole. A head of the
    user's own predicts one, for which it is otherwise asked when all training is over.

    Returns
    -------
    HeadBench
        As every client has it at the start.
    """
    with plugin_code(config.head):
        bench = HeadBench(config)
        bench.check()
        names = config.client_names()
        training = bench.data.training(names[0])
        image = training[0][:1]
        if is_own(config.model):
            try_own(config.model, _begin(config, bench.classes), image, bench.classes)
        try_extractor(config.model, bench.net.extractor, image.to(bench.device), bench.net.global_head.in_features)
        height, width = image.shape[2:]
        if bench.net.recipe.rotation and height != width:
            raise ConfigError(
                f"head = {config.head!r}: learns from rotated images, which must be square; found {height} x {width}: "
                f"choose another head, or crop them"
            )
        if config.head not in HEADS:
            batches = in_order(_placed(bench, training))
            try_out(config.head, bench.method, bench.options, bench.net, batches, len(names))
    return bench


def _begin(config: RunConfig, classes: int) -> nn.Module:
    """Return the network with which all clients begin: from a checkpoint, or drawn by the run's seed."""
    if is_own(config.model):
        return build_own(config, classes)
    if config.model not in MODELS:
        raise ConfigError(f"model = {config.model!r}: it cannot be trained here; allowed: {', '.join(MODELS)}")
    if config.checkpoint:
        return load(expanded("checkpoint", config.checkpoint), architecture=config.model, classes=classes)
    mean, std = NORMALISATION.get(config.dataset, NORMALISATION[""])
    with seeded(torch.device("cpu"), config.seed, "weights"):
        return build(config.model, classes, mean=mean, std=std)


def _own_heads(net: TwoHeads) -> dict[str, Tensor]:
    """Return the heads that stay at home."""
    shared = net.shared().keys()
    return {
        name: t.clone() for name, t in net.state_dict().items() if name.startswith(OWN_HEADS) and name not in shared
    }
