"""Names that a run config may use for strategies, adapters, heads and trackers; nothing of them is imported here."""

from typing import NamedTuple

#: name -> (module:class, one line of explanation)
STRATEGIES: dict[str, tuple[str, str]] = {
    "local": ("fedtta_flwr.strategies.local:Local", "no collaboration: W is the identity"),
    "fedavg": ("fedtta_flwr.strategies.fedavg:FedAvg", "one mean for all, weighted by samples"),
    "fedctta": (
        "fedtta_flwr.strategies.fedctta:FedCTTA",
        "mixtures of clients that answer alike on shared noise (IJCNN 2025)",
    ),
    "fedavg-ft": ("fedtta_flwr.strategies.fedavg_ft:FedAvgFT", "fedavg, then one more step on the same batch"),
    "fedprox": ("fedtta_flwr.strategies.fedprox:FedProx", "fedavg, clients held near it (MLSys 2020)"),
    "moon": ("fedtta_flwr.strategies.moon:MOON", "fedavg, clients' features held near its own (CVPR 2021)"),
    "pfedsd": ("fedtta_flwr.strategies.pfedsd:PFedSD", "fedavg, clients distil their previous model (TPDS 2022)"),
    "fedavgm": ("fedtta_flwr.strategies.fedavgm:FedAvgM", "fedavg with momentum on the server (Hsu et al. 2019)"),
    "ldawa": ("fedtta_flwr.strategies.ldawa:LDAWA", "fedavg, layers weighted by their angle to it (ICCV 2023)"),
    "pfedbbn": (
        "fedtta_flwr.strategies.pfedbbn:PFedBBN",
        "mixtures of clients with similar BatchNorm statistics (2025)",
    ),
    "fedtsa": (
        "fedtta_flwr.strategies.fedtsa:FedTSA",
        "attention over time and clients, trained on their features (KDD 2024)",
    ),
    "fedamp": (
        "fedtta_flwr.strategies.fedamp:FedAMP",
        "attention between clients whose states are near (AAAI 2021)",
    ),
    "pfedgraph": (
        "fedtta_flwr.strategies.pfedgraph:PFedGraph",
        "a collaboration graph from the directions in which clients move (ICML 2023)",
    ),
}


class AdapterEntry(NamedTuple):
    """An adapter's class, and what is to be known of it before it is chosen.

    Attributes
    ----------
    target, text : str
        As of a strategy.
    paper : str
        Where it was published.
    updates : str
        Which tensors it changes.
    keeps : str
        What stays at home from one batch to the next.
    predicts : str
        When its own prediction is made, the score ``tta``.
    uploads : str
        What travels, at the default options.
    """

    target: str
    text: str
    paper: str
    updates: str
    keeps: str
    predicts: str
    uploads: str = "what it updates"


_AFFINE = "affine parameters of the normalisation layers"
_STATISTICS = "BatchNorm statistics"
ADAPTERS: dict[str, AdapterEntry] = {
    "source": AdapterEntry(
        "fedtta_flwr.adaptation.source:Source",
        "no adaptation",
        paper="none",
        updates="nothing",
        uploads="nothing",
        keeps="nothing",
        predicts="as the source model",
    ),
    "bn-stats": AdapterEntry(
        "fedtta_flwr.adaptation.bn_stats:BNStats",
        "TTA-bn: BatchNorm statistics replaced by the batch's",
        paper="FedTSA (KDD 2024), FedCTTA (IJCNN 2025), whose alpha is `momentum`; with a share of the source's: "
        "alpha-BN (arXiv 2110.04065), NORM (arXiv 2006.16971)",
        updates=_STATISTICS,
        keeps="nothing",
        predicts="with the batch's statistics",
    ),
    "entropy": AdapterEntry(
        "fedtta_flwr.adaptation.entropy:Entropy",
        "TTA-grad: one SGD step on the prediction entropy over all parameters",
        paper="FedTSA (KDD 2024), FedCTTA (IJCNN 2025)",
        updates=f"all parameters, {_STATISTICS}",
        keeps="nothing; moments, with optimizer = adam",
        predicts="before the step",
    ),
    "dua": AdapterEntry(
        "fedtta_flwr.adaptation.dua:DUA",
        "running statistics with a decaying momentum (CVPR 2022)",
        paper="Mirza et al., CVPR 2022, arXiv 2112.00463",
        updates=_STATISTICS,
        keeps="momentum",
        predicts="with the running statistics",
    ),
    "tent": AdapterEntry(
        "fedtta_flwr.adaptation.tent:Tent",
        "entropy minimisation on the affine parameters (ICLR 2021)",
        paper="Wang et al., ICLR 2021, arXiv 2006.10726",
        updates=_AFFINE,
        keeps="moments",
        predicts="before the step",
    ),
    "eata": AdapterEntry(
        "fedtta_flwr.adaptation.eata:EATA",
        "Tent on reliable, not redundant samples (ICML 2022)",
        paper="Niu et al., ICML 2022, arXiv 2204.02610; ETA at the default fisher-weight",
        updates=_AFFINE,
        keeps="moments, mean prediction, Fisher information",
        predicts="before the step",
    ),
    "sar": AdapterEntry(
        "fedtta_flwr.adaptation.sar:SAR",
        "sharpness-aware Tent on reliable samples (ICLR 2023)",
        paper="Niu et al., ICLR 2023, arXiv 2302.12400",
        updates=f"{_AFFINE}, without the parts named in `sar.skip` (layer4, ...)",
        keeps="momentum, mean entropy",
        predicts="before the step",
    ),
    "shot": AdapterEntry(
        "fedtta_flwr.adaptation.shot:SHOT",
        "information maximisation under a fixed classifier (ICML 2020)",
        paper="Liang et al., ICML 2020, arXiv 2002.08546; SHOT-IM, online",
        updates="all parameters but the classifier's",
        keeps="momentum",
        predicts="after the step",
    ),
    "note": AdapterEntry(
        "fedtta_flwr.adaptation.note:NOTE",
        "instance-aware BN, prediction-balanced memory (NeurIPS 2022)",
        paper="Gong et al., NeurIPS 2022, arXiv 2208.05117",
        updates=f"affine parameters, {_STATISTICS}",
        keeps="moments, memory of images",
        predicts="with the running statistics",
    ),
    "memo": AdapterEntry(
        "fedtta_flwr.adaptation.memo:MEMO",
        "one step per image over its augmented views (NeurIPS 2022)",
        paper="Zhang et al., NeurIPS 2022, arXiv 2110.09506",
        updates="all parameters, for one image at a time",
        uploads="nothing",
        keeps="nothing",
        predicts="after the step",
    ),
    "lame": AdapterEntry(
        "fedtta_flwr.adaptation.lame:LAME",
        "predictions smoothed over neighbours (CVPR 2022)",
        paper="Boudiaf et al., CVPR 2022, arXiv 2201.05718",
        updates="nothing",
        uploads="nothing",
        keeps="nothing",
        predicts="smoothed over the batch",
    ),
    "cotta": AdapterEntry(
        "fedtta_flwr.adaptation.cotta:CoTTA",
        "slow teacher, averaged views, restoration (CVPR 2022)",
        paper="Wang et al., CVPR 2022, arXiv 2203.13591",
        updates="all parameters, of student and teacher",
        keeps="moments",
        predicts="by the teacher, before the step",
    ),
    "rotta": AdapterEntry(
        "fedtta_flwr.adaptation.rotta:RoTTA",
        "robust BN and a balanced memory (CVPR 2023)",
        paper="Yuan et al., CVPR 2023, arXiv 2303.13899",
        updates=f"affine parameters, {_STATISTICS}, of student and teacher",
        keeps="moments, memory of images",
        predicts="by the teacher, before the step",
    ),
    "roid": AdapterEntry(
        "fedtta_flwr.adaptation.roid:ROID",
        "weighted likelihood ratio, weight ensembling (WACV 2024)",
        paper="Marsden et al., WACV 2024, arXiv 2306.00650",
        updates=_AFFINE,
        keeps="moments, mean prediction",
        predicts="corrected by the class prior, before the step",
    ),
    "bbn": AdapterEntry(
        "fedtta_flwr.adaptation.bbn:BBN",
        "balanced BN, filtered distillation: pFedBBN's client, TRIBE (AAAI 2024)",
        paper="pFedBBN, arXiv 2511.18066; TRIBE, AAAI 2024, arXiv 2309.14949",
        updates=f"affine parameters, {_STATISTICS} of every class, of student and teacher",
        keeps="moments, the source's statistics",
        predicts="by the teacher, before the step",
    ),
}


class Service(NamedTuple):
    """A tracker's class, and what it cannot do without.

    Attributes
    ----------
    target : str
        As of a method.
    package : str
        The module that it imports when a run begins.
    """

    target: str
    package: str


#: name, which is also that of the extra that brings the package (tensorboard comes with the project) -> service
TRACKERS: dict[str, Service] = {
    "tensorboard": Service("fedtta_flwr.tracking.tensorboard:TensorBoard", "tensorboard"),
    "mlflow": Service("fedtta_flwr.tracking.mlflow:MLflow", "mlflow"),
    "wandb": Service("fedtta_flwr.tracking.wandb:WeightsAndBiases", "wandb"),
}
#: with task = "tgfl": name -> (module:class, one line of explanation)
HEADS: dict[str, tuple[str, str]] = {
    "global": ("fedtta_flwr.heads.global_:Global", "FedAvg: the head that all clients share (AISTATS 2017)"),
    "personal": ("fedtta_flwr.heads.personal:Personal", "FedAvg+FT: the client's own head on the shared extractor"),
    "fedrep": ("fedtta_flwr.heads.fedrep:FedRep", "a shared extractor, local heads alone (ICML 2021)"),
    "fedrod": ("fedtta_flwr.heads.fedrod:FedRoD", "both heads' logits added, trained side by side (ICLR 2022)"),
    "knn-per": (
        "fedtta_flwr.heads.knn_per:KNNPer",
        "the global head and the nearest training features' labels (ICML 2022)",
    ),
    "fedthe": ("fedtta_flwr.heads.fedthe:FedTHE", "weights by entropy and distance to mean features (ICLR 2023)"),
    "fedthe-plus": (
        "fedtta_flwr.heads.fedthe_plus:FedTHEPlus",
        "fedthe, then steps on each image over its views (ICLR 2023)",
    ),
    "memo": ("fedtta_flwr.heads.memo:MEMO", "personal, after steps on each image over its views (NeurIPS 2022)"),
    "ttt": ("fedtta_flwr.heads.ttt:TTT", "personal, the extractor learning rotations on the stream (ICML 2020)"),
    "btfl": ("fedtta_flwr.heads.btfl:BTFL", "weights by Bayes' rule from discretised likelihoods (KDD 2025)"),
}
