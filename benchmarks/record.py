"""What the reproduction record is made of: networks, benchmarks, and how each is scaled down."""

from dataclasses import dataclass

TABLES = ("main", "claims", "collaboration", "costs")
BALANCED_TABLES = ("main", "claims", "major-and-minor", "collaboration", "costs")


@dataclass(frozen=True)
class Network:
    """A pretrained network: its file, what it is, its normalisation, its accuracy on clean test images in %."""

    file: str
    architecture: str
    classes: int
    mean: str
    std: str
    words: str


IMAGENET = (".485,.456,.406", ".229,.224,.225")
NETWORKS = {
    "r20": Network("akamaster_resnet20-12fca82f.th", "resnet20-a", 10, *IMAGENET, "akamaster's ResNet-20"),
    "r56": Network("akamaster_resnet56-4bfd9763.th", "resnet56-a", 10, *IMAGENET, "akamaster's ResNet-56"),
    "r20-100": Network(
        "chenyaofo_cifar100_resnet20.pth",
        "resnet20",
        100,
        ".5070,.4865,.4409",
        ".2673,.2564,.2761",
        "chenyaofo's ResNet-20 for CIFAR-100",
    ),
}


@dataclass(frozen=True)
class Part:
    """A part of the record.

    Attributes
    ----------
    spec : str
        Its file in configs/bench.
    data : str
        ``cifar10-c``, ``cifar100-c``, or ``clean`` for the folder of ``--data``.
    config : str
        Run config that scales it down.
    only : tuple of str
        What is run of it: axis=point.
    words : str
        How it is scaled down.
    tables : tuple of str
        What it shows of its report.
    """

    spec: str
    network: str = "r20"
    data: str = "cifar10-c"
    config: str = ""
    only: tuple[str, ...] = ()
    words: str = ""
    tables: tuple[str, ...] = TABLES


BN_ROWS = tuple(f"strategy={name}" for name in ("No-Adapt", "Local", "FedAvg", "pFedGraph", "FedTSA", "FedCTTA"))
FOUR = "corruptions='gaussian_noise,glass_blur,contrast,jpeg_compression'"
SHORT = """FedTSA's memory of 10 slots and FedCTTA's smoothing over rounds (ema 0.9) span several corruptions here,
which costs them: with CIFAR-100, from 3 slots to the paper's 50, Local and FedAvg gain 0.6 to 0.9 points, FedTSA 1.5
(NIID) and 1.6 (IID), FedCTTA 1.2 and 2.5."""
PARTS = {
    "bn": Part(
        "record-cifar10-bn",
        words="""5 slots of each corruption, where the papers have 50: batch statistics have no memory, so a slot is as
good as another. Not so for FedTSA's memory of 10 slots and FedCTTA's smoothing over rounds (ema 0.9): both span two
corruptions here.""",
    ),
    "bn-full": Part(
        "fedctta-table1-cifar10",
        only=("adapter=bn", *BN_ROWS),
        words="As long as in the paper: all 10,000 images of each of the 15 corruptions.",
    ),
    "grad-full": Part(
        "fedctta-table1-cifar10",
        only=("adapter=grad", *BN_ROWS[1:]),
        words="""As long as in the paper: all 10,000 images of each of the 15 corruptions. No-Adapt, which has no
adapter, is in the table above.""",
    ),
    "bn-r56": Part(
        "fedctta-table1-cifar10",
        network="r56",
        config="slots-per-corruption=3 shift-length=3",
        only=("adapter=bn", *BN_ROWS),
        words=f"3 slots of each corruption, where the paper has 50. {SHORT}",
    ),
    "bn-cifar100": Part(
        "fedctta-table1-cifar100",
        network="r20-100",
        data="cifar100-c",
        config="slots-per-corruption=3 shift-length=3 legacy-no-norm=false",
        only=("adapter=bn", *BN_ROWS),
        words=f"""3 slots of each corruption, where the paper has 50; its network is an AugMix ResNeXt, trained for
corruptions. {SHORT}""",
    ),
    "bn-cifar100-full": Part(
        "fedctta-table1-cifar100",
        network="r20-100",
        data="cifar100-c",
        config="legacy-no-norm=false",
        only=("adapter=bn", *BN_ROWS),
        words="""As long as in the paper: all 10,000 images of each of the 15 corruptions; the paper's network is an
AugMix ResNeXt, trained for corruptions.""",
    ),
    "grad": Part(
        "record-cifar10-grad",
        words="""5 corruptions of 20 slots. `post` is predicted with running statistics, which follow a new corruption
over tens of slots: few corruptions, long runs. The step is 1e-4, as FedTSA's paper has it; FedCTTA's has 1e-5, as the
table of full length.""",
    ),
    "spatial": Part(
        "fedctta-fig2-spatial",
        config="slots-per-corruption=3 shift-length=3",
        only=("seed=0",),
        words=f"3 slots of each corruption, where the paper has 50. {SHORT}",
    ),
    "temporal": Part(
        "fedctta-fig2-temporal",
        config=f"{FOUR} slots-per-corruption=20",
        only=("seed=0", "heterogeneity=TH 0.1", "heterogeneity=TH 0.5", "heterogeneity=TH 1"),
        words="4 corruptions of 20 slots, where the paper has 15 of 50.",
    ),
    "interval": Part(
        "fedctta-fig5-interval",
        config=f"{FOUR} slots-per-corruption=25 shift-length=25",
        only=("seed=0", *(f"interval=every {k}" for k in (1, 2, 5, 10, 25))),
        words="4 corruptions of 25 slots, where the paper has 15 of 50.",
    ),
    "batch": Part(
        "fedctta-fig5-batch",
        config=FOUR,
        only=("seed=0",),
        words="4 corruptions, where the paper has 15.",
    ),
    "metric": Part(
        "fedctta-table4",
        data="clean",
        config=f"{FOUR} slots-per-corruption=10 shift-length=10",
        only=("seed=0",),
        words="4 corruptions of 10 slots, where the paper has 15 of 50; they are laid over clean images as these come.",
    ),
    "balanced": Part(
        "record-cifar10-balanced",
        config="corruptions='gaussian_noise,contrast' slots-per-corruption=5 shift-length=5",
        only=("seed=0", "strategy=None", "strategy=FedAvg", "strategy=pFedBBN"),
        words="""2 corruptions of 5 slots, where the paper has 15. With 20 images of a class in a slot BBN's statistics
(eta 0.01) go a fifth of the way a slot: in five slots they do not arrive at a corruption where all classes come
evenly. Seeds 0 and 1 of BBN were run with other strong views than seed 2, which makes no difference to it
(docs/adapters.md, "On a real stream").""",
        tables=BALANCED_TABLES,
    ),
    "balanced-full": Part(
        "pfedbbn-table1-cifar10",
        only=("adapter=Tent", "adapter=BBN", "strategy=None", "strategy=FedAvg", "strategy=pFedBBN"),
        words="""As long as in the paper: 1,000 images of each of the 15 corruptions for each client. With seed
0 at delta 0.01 BBN was run with other strong views than elsewhere, which makes no difference to it (docs/adapters.md,
"On a real stream").""",
        tables=BALANCED_TABLES,
    ),
}
