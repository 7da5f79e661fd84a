"""What every predictor of the two-head task is made of and promises."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import Options
from fedtta_flwr.seeding import torch_rng

#: statistic that a client uploads -> the name under which the uniform mean of all clients' comes back
SHARED: Mapping[str, str] = {"dle-personal": "dle-global", "feature-personal": "feature-global"}
#: statistic of all training images, too large to be kept and made whenever it is needed -> that of the validation part
VALIDATION: Mapping[str, str] = {"features": "validation-features", "labels": "validation-labels"}
#: all that a predictor may need (`Fitted`); the last where its recipe trains it
NEEDS = frozenset(
    {
        *SHARED,
        *SHARED.values(),
        *VALIDATION,
        *VALIDATION.values(),
        "clients",
        "entropy-personal",
        "entropy-global",
        "rotation-head",
    }
)


@dataclass(frozen=True)
class Recipe:
    """How a method's extractor and heads are trained; the defaults are BTFL's, with FedAvg.

    Attributes
    ----------
    loss : str
        Of the global head: ``plain`` cross-entropy, or ``balanced`` by the client's own class counts.
    heads : str
        ``apart``: the shared part first, the personal head after it, on the frozen extractor; ``fedrep``: the personal
        head is the only one, trained before the extractor; ``fedrod``: the personal head learns beside the global one
        what that one lacks.
    sparsity : float
        Weight of the features' L1 norm, mean over the batch.
    rotation : bool
        Whether a head for self-supervision, four rotations of the image, is trained and shared too.
    """

    loss: Literal["plain", "balanced"] = "plain"
    heads: Literal["apart", "fedrep", "fedrod"] = "apart"
    sparsity: float = 0.0
    rotation: bool = False


@dataclass(frozen=True)
class Fitted:
    """What training leaves at one client: all that a predictor may use.

    Attributes
    ----------
    extractor : nn.Module
        V: images [B, C, H, W] in [0, 1] to features [B, D]; in eval mode, frozen.
    global_head, personal_head : Tensor
        [K, D], without bias.
    statistics : dict[str, Tensor]
        By name, those that the predictor `needs`:

        - ``dle-personal`` [D], ``dle-global`` [D]: frequency of a zero bit for each feature in the client's training
          part, and the uniform mean of all clients'; ``clients`` []: of how many, 0 where this
          client missed the measuring.
        - ``entropy-personal`` [], ``entropy-global`` []: mean entropy in nats of each head on the training part.
        - ``feature-personal`` [D], ``feature-global`` [D]: mean features, as the frequencies.
        - ``features`` [M, D], ``labels`` [M]: the training part itself, seen by the extractor;
          ``validation-features``, ``validation-labels``: the validation part, which is in none of its test sets.
        - ``rotation-head`` [4, D].
    """

    extractor: nn.Module
    global_head: Tensor
    personal_head: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)


class Predictor(ABC):
    """Predicts test samples by two heads on one extractor.

    What it makes of a sample depends on that sample and on those before it since `reset`, not on how they are cut into
    batches, unless its own text says so. A method with a state (priors, averages) forgets it in `reset`; one that
    tunes the extractor leaves it as it was after every sample or in `reset`.

    Parameters
    ----------
    fitted : Fitted
        What training left; the predictor owns its extractor from here on.
    options : Options
        The method's own frozen hyper-parameters.

    Attributes
    ----------
    needs : frozenset of str
        The statistics that it reads; no others are made for it.
    weights : Tensor or None
        [B], the global head's share in the last batch's predictions; None where there is no such share.
    identity : tuple
        The run's seed and whom it serves; every random draw depends on it (`generator`).

    Raises
    ------
    ConfigError
        If a statistic is missing or the heads do not fit each other.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, fitted: Fitted, options: Options) -> None:
        if missing := sorted(self.needs - fitted.statistics.keys()):
            raise ConfigError(
                f"head {type(self).__name__}: training left no {', '.join(missing)}; train again with this head"
            )
        if fitted.global_head.shape != fitted.personal_head.shape or fitted.global_head.dim() != 2:
            raise ConfigError(
                f"head {type(self).__name__}: global head {list(fitted.global_head.shape)}, personal head "
                f"{list(fitted.personal_head.shape)}; allowed: both [classes, features]"
            )
        self.extractor = fitted.extractor.eval().requires_grad_(False)
        self.fitted = fitted
        self.options = options
        self.weights: Tensor | None = None
        self.identity: tuple[str | int, ...] = (0,)
        self.seen = 0

    @classmethod
    def recipe(cls, options: Options) -> Recipe:
        """Return how the method is trained."""
        del options
        return Recipe()

    @abstractmethod
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K] for images x [B, C, H, W] in [0, 1]."""

    def reset(self) -> None:
        """Forget what was seen: called before each test set, in which samples are counted from 0."""
        self.seen = 0
        self.weights = None

    def logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the global and the personal head's logits, both [B, K], for features [B, D]."""
        return F.linear(features, self.fitted.global_head), F.linear(features, self.fitted.personal_head)

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return the CPU generator of one draw; make `seen`, or the sample's place in the set, part of the purpose."""
        seed, *whom = self.identity
        return torch_rng(int(seed), *whom, *purpose)


def ask(predictor: Predictor, x: Tensor) -> Tensor:
    """Return a predictor's probabilities [B, K] for images x [B, C, H, W].

    Raises
    ------
    ConfigError
        If they, or the weights beside them, are of another form, or a weight is no share.
    """
    probabilities = predictor.predict(x)
    classes = len(predictor.fitted.global_head)
    answers: dict[str, tuple[object, list[int]]] = {"predict returned": (probabilities, [len(x), classes])}
    if predictor.weights is not None:
        answers["weights is"] = predictor.weights, [len(x)]
    for what, (found, expected) in answers.items():
        form = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if form != expected:
            raise ConfigError(f"head {type(predictor).__name__}: {what} {form}, expected a tensor {expected}")
    if predictor.weights is not None and not ((predictor.weights >= 0) & (predictor.weights <= 1)).all():
        raise ConfigError(
            f"head {type(predictor).__name__}: weights has {predictor.weights.tolist()[:3]}; allowed: shares of the "
            f"global head, 0 to 1"
        )
    return probabilities
