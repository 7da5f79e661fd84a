"""Training of the two-head task: the shared part, the personal head, and what a client keeps of its training part.

Everything here is a client's own work on its own labelled images; what is averaged over clients is `TwoHeads.shared`
and the statistics that `fedtta_flwr.heads.base.SHARED` names.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.adaptation.norms import batch_statistics
from fedtta_flwr.adaptation.optimizer import Optimizer
from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.heads.base import Fitted, Recipe
from fedtta_flwr.models.base import take_head

#: one pass over a client's images: called for each, it yields x [B, C, H, W] in [0, 1] and labels [B]
Epoch = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class SGD:
    """Step size, momentum and L2 coefficient of stochastic gradient descent; BTFL's values."""

    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 5e-4

    def over(self, *modules: nn.Module) -> Optimizer:
        """Return an optimiser, without a past, of the modules' parameters."""
        parameters = [p for module in modules for p in module.parameters()]
        return Optimizer(
            parameters,
            "sgd",
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )


class TwoHeads(nn.Module):
    """An extractor with a global and a personal head, both linear and without bias.

    Parameters
    ----------
    model : nn.Module
        Its last linear layer's weights are those that both heads begin with, what it does before that is the
        extractor's part. Taken over.
    recipe : Recipe
        Whether there is a head for rotations, and what is shared.

    Raises
    ------
    ConfigError
        If the model has no linear layer.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        head = take_head(model)
        if head is None:
            raise ConfigError(
                f"model {type(model).__name__}: it has no nn.Linear as its classifier, which two heads need; choose "
                f"another"
            )
        weight = head.weight.detach()
        classes, width = weight.shape
        self.recipe = recipe
        self.global_head, self.personal_head = (nn.Linear(width, classes, bias=False) for _ in range(2))
        with torch.no_grad():
            self.global_head.weight.copy_(weight)
            self.personal_head.weight.copy_(weight)
        self.rotation_head = nn.Linear(width, 4, bias=False) if recipe.rotation else None
        if self.rotation_head is not None:
            nn.init.zeros_(self.rotation_head.weight)  # draws nothing, and zeros break no symmetry of a linear map
        self.extractor: nn.Module = model
        self.eval()

    def shared(self) -> dict[str, Tensor]:
        """Return what is averaged over clients, by name: live tensors, no integers, never the personal head."""
        kept = ("personal_head", "global_head") if self.recipe.heads == "fedrep" else ("personal_head",)
        return {name: t for name, t in self.state_dict().items() if t.is_floating_point() and not name.startswith(kept)}

    @torch.no_grad()
    def load_shared(self, state: Mapping[str, Tensor]) -> None:
        """Install a mean of `shared`.

        Raises
        ------
        CheckpointError
            If a name or shape differs.
        """
        live = self.shared()
        shapes = {name: list(t.shape) for name, t in live.items()}
        given = {name: list(t.shape) for name, t in state.items()}
        if shapes != given:
            differing = sorted(n for n in shapes.keys() | given.keys() if shapes.get(n) != given.get(n))
            raise CheckpointError(
                f"shared part: {len(given)} tensors, expected {len(shapes)}; first that differ: "
                f"{', '.join(differing[:3])}"
            )
        for name, t in live.items():
            t.copy_(state[name])


def train_shared(net: TwoHeads, batches: Epoch, epochs: int, sgd: SGD, counts: Tensor) -> float:
    """Train what is shared on one client's images; what else learns meanwhile is the recipe's matter.

    Parameters
    ----------
    net : TwoHeads
        Changed in place.
    batches : Epoch
        The client's training part.
    epochs : int
        Passes. FedRep: all but the last train the personal head, the last the extractor.
    sgd : SGD
        The optimiser.
    counts : Tensor
        [K], the client's images of each class, for the balanced softmax.

    Returns
    -------
    float
        The mean loss of an image in the last pass, in nats but for the recipe's other terms; NaN without a pass.
    """
    recipe = net.recipe
    if recipe.heads == "fedrep":
        personalise(net, batches, epochs - 1, sgd)
        optimizer = sgd.over(net.extractor)
        epochs = 1
    else:
        heads = [net.global_head] if net.rotation_head is None else [net.global_head, net.rotation_head]
        if recipe.heads == "fedrod":
            heads.append(net.personal_head)
        optimizer = sgd.over(net.extractor, *heads)
    net.extractor.train()
    try:
        with batch_statistics(net.extractor, track=True):  # the last batch may be of one image, which has no variance
            for _ in range(epochs):
                total, images = counts.new_zeros((), dtype=torch.float64), 0
                for x, labels in batches():
                    optimizer.minimize(loss := _loss(net, x, labels, counts))
                    total += loss.detach().double() * len(x)
                    images += len(x)
    finally:
        net.eval()
    return float(total) / images if epochs else math.nan


def personalise(net: TwoHeads, batches: Epoch, epochs: int, sgd: SGD) -> None:
    """Train the personal head alone by cross-entropy, over the extractor as it is."""
    optimizer = sgd.over(net.personal_head)
    for _ in range(epochs):
        for x, labels in batches():
            with torch.no_grad():
                z = net.extractor(x)
            optimizer.minimize(F.cross_entropy(personal_logits(net, z), labels))


def personal_logits(net: TwoHeads, z: Tensor) -> Tensor:
    """Return the personal prediction's logits [B, K], by which its head learns, from features [B, D] that it leaves.

    They are the personal head's; FedRoD's learns what the global one lacks, so that they are the sum of both.
    """
    logits: Tensor = net.personal_head(z)
    return logits + net.global_head(z).detach() if net.recipe.heads == "fedrod" else logits


def balanced_softmax(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [B, K] raised by the log class counts [K] (Ren et al., NeurIPS 2020).

    A class that the client has no image of takes no part.
    """
    return F.cross_entropy(logits + counts.to(logits).log(), labels)


def turn(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return square images [B, C, H, H], the b-th by b mod 4 quarters of a turn, and how many quarters, [B]."""
    quarters = torch.arange(len(x), device=x.device) % 4
    turned = x.clone()
    for q in range(1, 4):
        turned[q::4] = x[q::4].rot90(q, dims=(-2, -1))
    return turned, quarters


def bits(features: Tensor) -> Tensor:
    """Return BTFL's bits (eq. 5), bool: round(tanh(relu(z))) = 1 where z is above atanh(1/2)."""
    return features > 0.5493061443340549


@torch.no_grad()  # not inference mode: a predictor may compute gradients with them
def statistics(net: TwoHeads, batches: Epoch, needs: Collection[str]) -> dict[str, Tensor]:
    """Return the needed statistics of `Fitted` that a client can make alone: by one pass, if any is of its images."""
    makers: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of features and labels
        "dle-personal": lambda z, _: (~bits(z)).float().mean(0, dtype=torch.float64).float(),
        "entropy-personal": lambda z, _: entropy(net.personal_head(z)).mean(),
        "entropy-global": lambda z, _: entropy(net.global_head(z)).mean(),
        "feature-personal": lambda z, _: z.mean(0),
        "features": lambda z, _: z,
        "labels": lambda _, labels: labels,
    }
    found: dict[str, Tensor] = {}
    if makers.keys() & needs:
        z, labels = (torch.cat(part) for part in zip(*((net.extractor(x), y) for x, y in batches()), strict=True))
        found = {name: make(z, labels) for name, make in makers.items() if name in needs}
    if net.rotation_head is not None and "rotation-head" in needs:
        found["rotation-head"] = net.rotation_head.weight.detach().clone()
    return found


def fitted(net: TwoHeads, found: Mapping[str, Tensor]) -> Fitted:
    """Return what a predictor is made from; it owns the extractor from here on.

    Parameters
    ----------
    net : TwoHeads
        Trained.
    found : Mapping[str, Tensor]
        The client's `statistics` and those of all clients.
    """
    shared, own = (head.weight.detach().clone() for head in (net.global_head, net.personal_head))
    return Fitted(net.extractor, shared, own, dict(found))


def _loss(net: TwoHeads, x: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    recipe = net.recipe
    z = net.extractor(x)
    if recipe.heads == "fedrep":
        loss = F.cross_entropy(net.personal_head(z), labels)
    elif recipe.loss == "balanced":
        loss = balanced_softmax(net.global_head(z), labels, counts)
    else:
        loss = F.cross_entropy(net.global_head(z), labels)
    if recipe.heads == "fedrod":
        loss = loss + F.cross_entropy(personal_logits(net, z.detach()), labels)
    if recipe.sparsity:
        loss = loss + recipe.sparsity * z.abs().sum(dim=1).mean()
    if net.rotation_head is not None:
        turned, quarters = turn(x)
        loss = loss + F.cross_entropy(net.rotation_head(net.extractor(turned)), quarters)
    return loss
