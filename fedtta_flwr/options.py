"""One frozen table of hyper-parameters a method: ``[fedctta]``, ``[entropy]`` ... in the run config.

A method's own file says what it does with them. Keys are the field names with hyphens.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedtta_flwr.errors import ConfigError


def kebab(name: str) -> str:
    """Return the run-config spelling of a field name."""
    return name.replace("_", "-")


class Options(BaseModel):
    """Base of every table: frozen, strict about types, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Unit = Annotated[float, Field(ge=0, le=1)]
AboveZero = Annotated[float, Field(gt=0, le=1)]
Rule = Literal["adam", "sgd"]
Temperature = Positive | Literal["median"]


class EntropyOptions(Options):
    """TTA-grad: one gradient step on the prediction entropy (FedTSA, FedCTTA).

    The published code, unlike the papers: configs/presets/entropy-code.toml.
    """

    learning_rate: Positive = Field(1e-4, description="step size (FedTSA 1e-4, FedCTTA 1e-5, both codes 1e-5)")
    loss: Literal["entropy", "hard-pl"] = Field(
        "entropy", description="entropy, or hard-pl: cross-entropy with the predicted class, as the published code"
    )
    optimizer: Rule = Field("sgd", description="sgd without momentum, or adam as the published code")


class BNStatsOptions(Options):
    """TTA-bn: the batch's statistics, or mixed with the running ones (FedCTTA) or the source's (alpha-BN, NORM)."""

    momentum: AboveZero = Field(
        1.0, description="share of the batch in the running statistics, FedCTTA's alpha; 1.0 = the batch's alone"
    )
    source_share: Unit = Field(0.0, description="share of the source statistics, alpha-BN; 0.0 = the batch's alone")
    prior: NotNegative = Field(0.0, description="N: source share N / (N + batch size); 0.0 = the batch's alone")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.source_share and self.prior:
            raise ConfigError(
                f"bn-stats.prior = {self.prior}: source-share = {self.source_share} already says how much of the "
                f"source is kept; allowed: one of both above 0.0"
            )
        if self.momentum < 1 and (self.source_share or self.prior):
            kept = "source-share" if self.source_share else "prior"
            raise ConfigError(
                f"bn-stats.momentum = {self.momentum}: {kept} mixes the batch's statistics with the source's instead; "
                f"allowed: 1.0, or source-share and prior = 0.0"
            )
        return self


class TentOptions(Options):
    """Tent: entropy minimisation on the normalisation layers' affine parameters."""

    learning_rate: Positive = Field(1e-3, description="step size")
    optimizer: Rule = Field("adam", description="adam, or sgd with momentum 0.9")


class EATAOptions(Options):
    """EATA: Tent on samples that are reliable and not redundant, weighted by their certainty."""

    learning_rate: Positive = Field(1e-3, description="step size (the paper's own: 0.005 with sgd)")
    optimizer: Rule = Field("adam", description="adam, or sgd with momentum 0.9")
    entropy_margin: Positive = Field(0.4, description="E0 in units of ln K: samples with more entropy are left out")
    similarity_margin: Unit = Field(
        0.4, description="samples nearer (cosine) to the mean prediction are left out; CIFAR-100 0.1, ImageNet 0.05"
    )
    ema: Share = Field(0.9, description="share of the past in the mean prediction")
    fisher_weight: NotNegative = Field(0.0, description="of the anti-forgetting term; 0.0 = ETA; EATA 1.0")
    fisher_samples: Annotated[int, Field(ge=1)] = Field(
        2000, description="first samples of the stream from which the Fisher information is estimated"
    )


class SAROptions(Options):
    """SAR: sharpness-aware entropy minimisation on reliable samples, with recovery from collapse."""

    learning_rate: Positive = Field(1e-3, description="step size")
    momentum: Share = Field(0.9, description="of SGD")
    rho: Positive = Field(0.05, description="radius of the neighbourhood in which the loss shall be flat")
    entropy_margin: Positive = Field(0.4, description="E0 in units of ln K: samples with more entropy are left out")
    reset_below: NotNegative = Field(
        0.2, description="nats: a mean entropy below it is a collapse and resets to the source; 0.0 = never"
    )
    ema: Share = Field(0.9, description="share of the past in the mean entropy")
    skip: str = Field(
        "layer4,blocks.9,blocks.10,blocks.11,norm",
        description="parts of the network that stay as they are: module names, separated by commas; norm is the "
        "network's own, beside its blocks, none within them",
    )


class SHOTOptions(Options):
    """SHOT-IM online: information maximisation on everything but the classifier."""

    learning_rate: Positive = Field(0.01, description="step size of SGD")
    momentum: Share = Field(0.9, description="of SGD, with Nesterov's look-ahead where it is above 0.0")
    weight_decay: NotNegative = Field(1e-3, description="L2 coefficient")
    diversity_weight: NotNegative = Field(1.0, description="of the entropy of the mean prediction, which is maximised")


class NOTEOptions(Options):
    """NOTE: instance-aware batch normalisation and a prediction-balanced memory."""

    learning_rate: Positive = Field(1e-4, description="step size of Adam")
    shrinkage: NotNegative = Field(
        4.0, description="k: standard errors by which an instance may differ and still be normalised like all"
    )
    momentum: AboveZero = Field(0.01, description="of the running statistics")
    capacity: Annotated[int, Field(ge=1, le=65_536)] = Field(64, description="images in the memory")
    update_every: Annotated[int, Field(ge=1)] = Field(64, description="samples between two steps")
    temperature: Positive = Field(1.0, description="of the softmax whose entropy is minimised")


class MEMOOptions(Options):
    """MEMO: for every image alone, one step on the entropy of the mean prediction over its views."""

    learning_rate: Positive = Field(0.005, description="step size of SGD")
    steps: Annotated[int, Field(ge=1, le=100)] = Field(1, description="per image")
    views: Annotated[int, Field(ge=1, le=1024)] = Field(32, description="augmentations of an image")


class LAMEOptions(Options):
    """LAME: predictions smoothed over the batch's nearest neighbours; the network stays as it is."""

    affinity: Literal["knn", "rbf", "linear"] = Field("knn", description="how alike two samples' features are")
    neighbours: Annotated[int, Field(ge=1)] = Field(
        5, description="knn: neighbours; rbf: the width is sigma times the mean distance to this neighbour"
    )
    sigma: Positive = Field(1.0, description="relative width of the rbf affinity")
    bound_weight: NotNegative = Field(1.0, description="lambda: weight of the neighbours; 0.0 = the plain predictions")
    max_steps: Annotated[int, Field(ge=1)] = Field(100, description="bound of the iterations")
    tolerance: NotNegative = Field(1e-8, description="relative change of the objective at which they end")


class DUAOptions(Options):
    """DUA: running statistics that follow the stream with a decaying momentum."""

    momentum: Unit = Field(0.1, description="initial momentum of the running statistics")
    decay: Unit = Field(0.94, description="factor of the momentum at every batch")
    floor: Unit = Field(0.005, description="added to the decaying momentum, so that it never ends")
    views: Annotated[int, Field(ge=0, le=65_536)] = Field(
        64, description="augmented images a batch is filled up to, at least one of each; 0 = the batch itself"
    )

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.momentum * self.decay + self.floor > 1:
            raise ConfigError(
                f"dua.floor = {self.floor}: momentum * decay + floor is above 1; allowed: at most "
                f"{1 - self.momentum * self.decay:g}"
            )
        return self


class CoTTAOptions(Options):
    """CoTTA: a slow teacher, averaged over views where the source is unsure, and random restoration."""

    learning_rate: Positive = Field(1e-3, description="step size of Adam on all parameters")
    teacher_momentum: Unit = Field(0.999, description="share of the past in the teacher's moving average")
    restore: Unit = Field(0.01, description="probability with which a weight returns to its source value")
    augmentations: Annotated[int, Field(ge=1, le=1024)] = Field(32, description="views that the teacher averages")
    confidence: Unit = Field(
        0.92, description="the views are used if the source's mean confidence is below it; CIFAR-100 0.72"
    )
    share_teacher: bool = Field(True, description="whether the teacher travels too; if not, it follows the student")


class RoTTAOptions(Options):
    """RoTTA: robust batch normalisation and a memory balanced by class, age and uncertainty."""

    learning_rate: Positive = Field(1e-3, description="step size of Adam on the affine parameters")
    alpha: Unit = Field(0.05, description="share of the batch in the robust statistics")
    nu: Unit = Field(0.001, description="share of the student in the teacher's moving average")
    capacity: Annotated[int, Field(ge=1, le=65_536)] = Field(64, description="images in the memory")
    update_every: Annotated[int, Field(ge=1)] = Field(64, description="samples between two steps")
    age_weight: NotNegative = Field(1.0, description="lambda_t: weight of age among the reasons to forget an image")
    uncertainty_weight: NotNegative = Field(1.0, description="lambda_u: weight of uncertainty among these reasons")
    share_teacher: bool = Field(True, description="whether the teacher travels too; if not, it follows the student")


class ROIDOptions(Options):
    """ROID: weighted soft likelihood ratio, weight ensembling, consistency and prior correction."""

    learning_rate: Positive = Field(1e-3, description="step size of Adam on the affine parameters")
    clip: Annotated[float, Field(gt=0, lt=1)] = Field(0.99, description="highest probability in the loss")
    weighting: bool = Field(True, description="whether samples are weighted by diversity and certainty")
    temperature: Positive = Field(1 / 3, description="of the weights exp(diversity * certainty / temperature)")
    prior_momentum: Share = Field(0.9, description="share of the past in the mean prediction")
    source_momentum: Unit = Field(0.99, description="weight ensembling: share of the student, the rest is the source")
    consistency: bool = Field(True, description="whether an augmented view shall be predicted alike")
    prior_correction: bool = Field(True, description="whether predictions are corrected by the batch's class prior")


class BBNOptions(Options):
    """Balanced BN with confidence-filtered distillation and consistency: pFedBBN's client; TRIBE's values.

    The paper's literal variants: ``literal-views = true``, ``average = "batch"``, ``consistency-on = "probabilities"``,
    ``source = "fixed"``. CIFAR-100: ``momentum = 0.05``, ``class-agnostic = 0.1``, ``entropy-threshold = 0.2``.
    """

    learning_rate: Positive = Field(1e-3, description="step size of Adam on the affine parameters")
    momentum: Unit = Field(0.01, description="eta: step of a class's statistics for each of its samples")
    class_agnostic: Unit = Field(0.0, description="gamma: share of a class's step that all classes take")
    unbiased: bool = Field(False, description="whether the variance between classes is over K - 1, as TRIBE's code")
    entropy_threshold: Positive = Field(
        0.05, description="in units of ln K: samples with less entropy are learned from"
    )
    consistency: NotNegative = Field(0.5, description="lambda: weight of the distance between teacher and source")
    consistency_on: Literal["logits", "probabilities"] = Field("logits", description="what that distance is taken of")
    average: Literal["kept", "batch"] = Field(
        "kept", description="losses are means over the samples that pass, or divided by the batch size (eqs. 5 and 6)"
    )
    literal_views: bool = Field(
        False, description="true: the teacher, not the student, sees the augmented view (eq. 5)"
    )
    source: Literal["balanced", "fixed"] = Field(
        "balanced", description="whether the source model's statistics follow the stream as the others do"
    )
    share_class_stats: bool = Field(True, description="whether statistics of every class travel, or the balanced alone")
    share_teacher: bool = Field(True, description="whether the teacher's statistics travel beside the student's")


class KNNPerOptions(Options):
    """kNN-Per: the global head's prediction and that of the nearest training features."""

    neighbours: Annotated[int, Field(ge=1)] = Field(10, description="training features that are asked")
    tuned: bool = Field(True, description="choose share for each client: 0 to 0.9, by its validation part")
    share: Unit = Field(0.5, description="lambda: of the neighbours in the prediction, where it is not tuned")
    scale: Positive = Field(1.0, description="a neighbour counts exp(-distance / (features * scale))")


class FedTHEOptions(Options):
    """FedTHE: the two heads' weights by a few steps on entropy and on the distance to the mean features."""

    history: AboveZero = Field(0.1, description="alpha: share of a sample in the moving average of the features")
    present: Unit = Field(0.1, description="beta: share of the sample itself beside that average")
    steps: Annotated[int, Field(ge=1, le=1000)] = Field(20, description="of Adam on the weights, a sample")
    learning_rate: Positive = Field(0.1, description="step size of Adam")


class FedTHEPlusOptions(FedTHEOptions):
    """FedTHE+: then steps of MEMO on extractor and heads, a sample."""

    tune_rate: Positive = Field(5e-4, description="step size of SGD on extractor and heads")
    tune_steps: Annotated[int, Field(ge=1, le=100)] = Field(3, description="of it, a sample")
    views: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="augmentations of an image")


class TTTOptions(Options):
    """TTT: the extractor follows the stream by telling how an image is rotated."""

    learning_rate: Positive = Field(1e-3, description="step size of SGD")
    steps: Annotated[int, Field(ge=1, le=100)] = Field(1, description="per image")
    threshold: Unit = Field(
        1.0, description="images sure, by this probability, to stand upright are not learned from; 1.0 = learn from all"
    )
    online: bool = Field(True, description="whether steps last until the test set ends, or for their image alone")


class BTFLOptions(Options):
    """BTFL: the global head's share by Bayes' rule, from discretised likelihoods and from the samples before.

    The published code, unlike the paper: configs/presets/btfl-code.toml.
    """

    smoothing: Share = Field(
        0.0, description="share of a fair coin in every bit's frequency; 0.0 is the paper (published code 0.4)"
    )
    leave_one_out: bool = Field(
        False, description="whether the mean frequencies are those of the other clients; false is the paper"
    )
    exponents: Literal["paper", "code"] = Field(
        "paper", description="of the likelihoods: by entropies relative to themselves, or, code, to training's"
    )
    squash: NotNegative = Field(0.0, description="kb: bound of the corrected ratio, less 1; 0.0 = none, the paper")
    threshold: Positive = Field(16.0, description="lambda: counts above it in sum are pruned")
    strength: NotNegative = Field(1.0, description="rho: what pruned counts keep in sum, above 1 each")
    prior: Literal["sample", "batch"] = Field(
        "sample", description="whether counts grow after every sample, whatever the batches, or after every batch"
    )
    mix: Literal["probabilities", "log"] = Field("probabilities", description="what of the heads is averaged")
    sparsity: NotNegative = Field(0.0, description="sigma: weight of the features' L1 norm in training")


class FedCTTAOptions(Options):
    """FedCTTA: clients that answer alike on shared noise help each other.

    The published code, unlike the paper: configs/presets/fedctta-code.toml.
    """

    temperature: Temperature = Field(
        1.0,
        description="softmax(-distance / temperature), 1.0 in the paper; or median: that of a round's distances to the "
        "nearest other client",
    )
    metric: Literal["euclid", "kl", "ce", "cosine"] = Field(
        "euclid", description="distance of two answers; kl and ce need logits, and give the same weights"
    )
    indicator: Literal["logits", "features"] = Field("logits", description="what the mean is taken of")
    images: Literal["noise", "chosen", "original"] = Field(
        "noise",
        description="what is answered: shared noise; clean images of the data set, the same for all; or, by the source "
        "model, the client's own batch",
    )
    noise_samples: Annotated[int, Field(ge=1, le=4096)] = Field(
        64, description="noise (or chosen) images that every client answers"
    )
    redraw: Literal["never", "each-round", "each-client"] = Field(
        "never", description="when the noise is drawn anew; each-client: in every round, and for every client its own"
    )
    ema: Share = Field(0.9, description="share of the previous rounds in a client's mean answer; 0.0 is the paper")
    lagged: bool = Field(
        False,
        description="whether the images are answered before the client adapts, not after; where all begin alike with "
        "redraw = each-client only, or all answer alike for ever",
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.indicator == "features" and self.metric in ("kl", "ce"):
            raise ConfigError(
                f"fedctta.metric = {self.metric!r}: features are no distribution over classes; allowed with indicator "
                f"= 'features': euclid, cosine"
            )
        if self.redraw != "never" and self.images != "noise":
            raise ConfigError(
                f"fedctta.redraw = {self.redraw!r}: there is no noise with images = {self.images!r}; allowed: never"
            )
        if self.lagged and self.images == "original":
            raise ConfigError(
                "fedctta.lagged = true: the source model, which answers with images = 'original', never adapts; "
                "allowed: false"
            )
        return self


class PFedBBNOptions(Options):
    """pFedBBN: clients with similar balanced BatchNorm statistics help each other."""

    tau: Temperature = Field(
        1.0,
        description="softmax(-distance / tau), not given in the paper; or median: that of a round's distances between "
        "two clients",
    )


class FedProxOptions(Options):
    """FedProx: clients are held near the mean that they received."""

    mu: NotNegative = Field(1.0, description="weight of the proximal term (codes of FTTA 1.0, for CoTTA 0.01)")


class MOONOptions(Options):
    """MOON: features like those of the received model, unlike those of the client's previous one."""

    mu: NotNegative = Field(1.0, description="weight of the contrastive term")
    temperature: Positive = Field(0.5, description="of its softmax")


class PFedSDOptions(Options):
    """pFedSD: clients distil their own previous model."""

    weight: NotNegative = Field(1.0, description="of the distillation term")
    temperature: Positive = Field(1.0, description="of the softmaxes that it compares")


class FedAvgMOptions(Options):
    """FedAvgM: the clients' mean is followed with momentum."""

    momentum: Share = Field(0.9, description="share of the past velocity")
    learning_rate: Positive = Field(1.0, description="of the server: step size along the velocity")
    rule: Literal["hsu", "ema"] = Field(
        "hsu", description="velocity = momentum * velocity + delta, or ema: + (1 - momentum) * delta, as codes of FTTA"
    )


class LDAWAOptions(Options):
    """L-DAWA: layers weighted by their angle to the last mean."""

    warmup_rounds: Annotated[int, Field(ge=0)] = Field(2, description="first rounds that are FedAvg (codes of FTTA 1)")
    renormalise: bool = Field(False, description="whether a layer's shares sum to 1; false = as published, it shrinks")


class FedTSAOptions(Options):
    """FedTSA: attention over time and clients, trained every round on the clients' mean features.

    The published code, unlike the paper: configs/presets/fedtsa-code.toml.
    """

    slots: Annotated[int, Field(ge=1)] = Field(
        10, description="T: the last rounds, this one included, that W is made from"
    )
    steps: Annotated[int, Field(ge=1)] = Field(100, description="of Adam on the attention, every round")
    learning_rate: Positive = Field(1e-3, description="step size of Adam")
    augmentation_weight: NotNegative = Field(
        1.0, description="lambda: weight of the distance to what masked attention makes of the features"
    )
    variant: Literal["both", "s-sim", "ts-sim", "wo-time", "wo-aug"] = Field(
        "both",
        description="both: the method; wo-time: over clients alone; wo-aug: no masks; ts-sim: untrained; s-sim: "
        "untrained and over clients alone",
    )
    masks: Literal["sampling", "bernoulli"] = Field(
        "sampling", description="sampling: fixed shares of the cells, as the published code; bernoulli: as the paper"
    )
    mix_time: bool = Field(
        False, description="whether BatchNorm statistics are first mixed over the client's own slots"
    )
    warm_start: bool = Field(False, description="whether training goes on from the last round's attention")

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        if self.mix_time and self.variant in ("s-sim", "wo-time"):
            raise ConfigError(
                f"fedtsa.mix-time = true: variant = {self.variant!r} has no attention over time; allowed: both, "
                f"ts-sim, wo-aug"
            )
        if self.warm_start and self.variant in ("s-sim", "ts-sim"):
            raise ConfigError(
                f"fedtsa.warm-start = true: variant = {self.variant!r} is not trained; allowed: both, wo-time, wo-aug"
            )
        return self


class FedAMPOptions(Options):
    """FedAMP: the nearer two clients' states, the more they attend to each other."""

    rule: Literal["normalised", "original", "cosine"] = Field(
        "normalised",
        description="normalised: the others share what self-weight leaves; original: the paper's; cosine: HeurFedAMP "
        "as pFedGraph compares with it, self-weight 0.3",
    )
    self_weight: Unit = Field(0.3, description="normalised, cosine: what a client keeps of its own state")
    sigma: Temperature = Field(
        1.0,
        description="scale of the mean squared distances; the larger, the more equal weights; or, normalised, median: "
        "that of a round's distances to the nearest other client",
    )
    alpha: Positive = Field(1.0, description="original: factor of the others' weights; divides the local term")
    weight: NotNegative = Field(1.0, description="lambda, of the local term; 0.0 = none")

    @model_validator(mode="after")
    def _has_a_scale(self) -> Self:
        if self.sigma == "median" and self.rule == "original":
            raise ConfigError(
                "fedamp.sigma = 'median': rule = 'original' divides the others' weights by sigma, too, and would leave "
                "no client one of its own; allowed: a number, or rule = 'normalised'"
            )
        return self


class PFedGraphOptions(Options):
    """pFedGraph: a collaboration graph between the samples' shares and the most similar clients."""

    lam: Positive = Field(0.8, description="lambda: large = shares of samples, small = the most similar clients alone")
    weight: NotNegative = Field(0.01, description="of the local term; 0.0 = none")


class TGFLOptions(Options):
    """Two heads on one extractor (BTFL, FedTHE and what they are compared with): training, and the data's partition."""

    train_rounds: Annotated[int, Field(ge=1, le=100_000)] = Field(
        10, description="rounds of federated training before anything is predicted (BTFL: 130 with the CNN)"
    )
    epochs: Annotated[int, Field(ge=1, le=1000)] = Field(
        5, description="passes over a client's training part, extractor and global head, a round"
    )
    personal_epochs: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="passes of the personal head alone over the received extractor, a round"
    )
    train_batch: Annotated[int, Field(ge=1, le=65_536)] = Field(32, description="samples a step of training")
    learning_rate: Positive = Field(0.01, description="of SGD, in training")
    momentum: Share = Field(0.0, description="of SGD, in training")
    weight_decay: NotNegative = Field(5e-4, description="of SGD, in training")
    augment: bool = Field(False, description="whether training images are cropped and flipped at random")
    dirichlet: Positive = Field(0.1, description="concentration of the clients' class shares; small = few classes each")
    natural_dataset: Literal["", "cifar10.1", "arrays", "folder"] = Field(
        "", description="naturally shifted images of the same classes, for the shifted test sets; empty = none"
    )
    natural_dir: str = Field("", description="their folder")


class NoOptions(Options):
    """A method without hyper-parameters."""
