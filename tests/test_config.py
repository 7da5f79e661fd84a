"""The run config: defaults, pyproject.toml, and every wrong key, type, range and combination in one line."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta_flwr.config import SCORES, WHERE, RunConfig, Scalar, describe_keys
from fedtta_flwr.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS
from fedtta_flwr.errors import ConfigError, FedTTAError
from fedtta_flwr.options import EntropyOptions, FedCTTAOptions, NoOptions
from fedtta_flwr.server import check_inputs

DEFAULTS = RunConfig().to_flat()
NAN, INF = float("nan"), float("inf")

#: key -> (a wrong value, what the error says is allowed); every key stands here
WRONG: dict[str, list[tuple[Any, str]]] = {
    "task": [("btfl", "'ftta' or 'tgfl'"), ("", "tgfl"), (1, "tgfl")],
    "strategy": [("fedsgd", "local, fedavg, fedctta"), ("", "local, fedavg"), (3, "string")],
    "adapter": [("tented", "source, bn-stats, entropy"), ("", "bn-stats"), (False, "string")],
    "strategy-options": [(1, "string")],
    "adapter-options": [(1, "string")],
    "head-options": [(1, "string")],
    "head": [("btlf", "global, personal, fedrep"), ("", "global, personal"), (3, "string")],
    "dataset": [(1, "string")],
    "data-dir": [(1, "string")],
    "image-size": [(7, "8"), (1025, "1024"), ("32", "integer")],
    "classes": [(-1, "0"), (100_001, "100000"), (2.5, "integer")],
    "model": [(8, "string"), ("resnet9", "resnet8, resnet20")],
    "checkpoint": [(0, "string")],
    "legacy-no-norm": [(1, "true or false"), ("true", "true or false")],
    "num-clients": [(0, "1"), (-3, "1"), (100_001, "100000"), ("20", "integer"), (2.5, "integer"), (True, "integer")],
    "clients": [("cam/7", "'-'"), ("a,,a", "once"), ("../x", "letters"), ("cam-07", "as many"), (7, "string")],
    "batch-size": [(0, "1"), (-1, "1"), (65_537, "65536"), ("ten", "integer"), (10.0, "integer"), (2**80, "65536")],
    "severity": [(0, "1"), (6, "5"), ("5", "integer"), (2.5, "integer")],
    "corruptions": [("haze", "gaussian_noise"), ("", "fog"), (" , ", "fog"), ("fog,fog", "once"), (5, "string")],
    "scores": [("best", "source, local, pre, tta, post"), ("pre,pre", "once"), (1, "string")],
    "spatial-heterogeneity": [(0.0, "0"), (-0.2, "0"), (1.01, "1"), (NAN, "1"), ("0.2", "number"), (True, "number")],
    "slots-per-corruption": [(-1, "0"), ("all", "integer"), (1.5, "integer")],
    "shift-length": [(0, "1"), (-10, "1"), (0.5, "integer")],
    "group-orders": [("4", "COUNT:ORDER"), ("20:up", "reverse"), ("0:+1", "COUNT"), ("19:+1", "20"), (20, "string")],
    "mixed-domains": [(1, "true or false"), ("no", "true or false")],
    "severity-schedule": [("linear", "'constant' or 'gradual'"), ("", "gradual"), (1, "gradual")],
    "sampling": [("iid", "'fling-iid' or 'disjoint'"), (0, "disjoint")],
    "class-skew": [(-0.1, "0"), (NAN, "finite"), (INF, "finite"), ("0.1", "number")],
    "class-skew-seed": [(-1, "0"), (2**32, str(2**32)), (1.5, "integer")],
    "stream-order": [("sorted", "'shuffled' or 'class-sorted'"), (False, "shuffled")],
    "stream": [("my_module", "my_module:my_stream"), ("a b:c", "my_module:my_stream"), (":f", "my_"), (1, "string")],
    "live-wait": [(-1.0, "0"), (NAN, "finite"), (INF, "finite"), ("1", "number")],
    "rounds": [(-1, "0"), ("all", "integer"), (1.0, "integer")],
    "aggregate-every": [(0, "1"), (0.5, "integer")],
    "bn-pooling": [("exact", "'linear' or 'moments'"), (True, "linear")],
    "reset": [("always", "'never', 'each-shift' or 'collapse'"), (True, "never")],
    "seed": [(-1, "0"), (2**63, str(2**63)), ("0", "integer"), (0.5, "integer"), (False, "integer")],
    "device": [
        ("gpu", "cuda"),
        ("cuda:", "cuda"),
        ("cuda:\u0661", "cuda"),
        ("CPU", "cpu"),
        ("cuda:0 ", "cuda"),
        ("", "auto"),
        (0, "string"),
    ],
    "threads": [(0, "1"), (1025, "1024"), ("2", "integer")],
    "quorum": [(-1, "0"), ("all", "integer"), (0.5, "integer")],
    "clip-updates": [(-0.1, "0"), (NAN, "finite"), (INF, "finite"), ("3", "number")],
    "weight-cap": [(0.0, "0"), (1.1, "1"), (NAN, "1"), ("0.5", "number")],
    "round-timeout": [(0.0, "0"), (-1.0, "0"), (NAN, "finite"), (INF, "finite"), ("60", "number"), (True, "number")],
    "join-timeout": [(0.0, "0"), (-1.0, "0"), (NAN, "finite"), (INF, "finite"), ("60", "number")],
    "checkpoint-every": [(-1, "0"), (0.5, "integer"), ("10", "integer")],
    "resume": [(1, "string")],
    "state-dir": [(1, "string")],
    "output-dir": [(1, "string")],
    "tracking": [("comet", "tensorboard, mlflow, wandb"), ("wandb,wandb", "once"), (1, "string")],
    "entropy.learning-rate": [(0.0, "0"), (-1e-4, "0"), (INF, "finite"), (NAN, "finite"), ("1e-4", "number")],
    "fedctta.temperature": [(0.0, "0"), (-1.0, "0"), (INF, "finite"), (NAN, "finite"), ("1", "number")],
    "fedctta.noise-samples": [(0, "1"), (4097, "4096"), (64.0, "integer"), ("64", "integer")],
    "fedctta.ema": [(-0.1, "0"), (1.0, "1"), (NAN, "1"), ("0.9", "number")],
}
#: another value that is allowed, for every key
OTHER: dict[str, Scalar] = {
    "task": "tgfl",
    "strategy": "local",
    "adapter": "entropy",
    "head": "fedthe-plus",
    "strategy-options": "rate=1",
    "adapter-options": "rate=1",
    "head-options": "rate=1",
    "dataset": "others",
    "data-dir": "/data",
    "image-size": 64,
    "classes": 10,
    "model": "resnet20",
    "checkpoint": "m.safetensors",
    "legacy-no-norm": True,
    "num-clients": 10,
    "clients": ",".join(f"cam-{i}" for i in range(20)),
    "batch-size": 1,
    "severity": 1,
    "corruptions": "fog",
    "scores": "",
    "spatial-heterogeneity": 1.0,
    "slots-per-corruption": 0,
    "shift-length": 1,
    "group-orders": "10:+1,5:reverse,5:random",
    "mixed-domains": True,
    "severity-schedule": "gradual",
    "sampling": "disjoint",
    "class-skew": 0.1,
    "class-skew-seed": 2,
    "stream-order": "class-sorted",
    "stream": "my_module:my_stream",
    "live-wait": 0.0,
    "rounds": 3,
    "aggregate-every": 2,
    "bn-pooling": "moments",
    "reset": "each-shift",
    "seed": 2**63 - 1,
    "device": "cuda:1",
    "threads": 2,
    "quorum": 3,
    "clip-updates": 3.0,
    "weight-cap": 0.25,
    "round-timeout": 1.5,
    "join-timeout": 0.5,
    "checkpoint-every": 10,
    "resume": "/runs/1",
    "state-dir": "/states",
    "output-dir": "/runs/1",
    "tracking": "tensorboard,wandb",
    "entropy.learning-rate": 1e-5,
    "fedctta.temperature": 0.1,
    "fedctta.noise-samples": 1,
    "fedctta.ema": 0.0,
}


# ------------------------------------------------------------------ the tables of the methods: (range, another value)
POSITIVE: list[tuple[Any, str]] = [(0.0, "0"), (-1.0, "0"), (INF, "finite"), (NAN, "finite"), ("1", "number")]
NOT_NEGATIVE: list[tuple[Any, str]] = [(-0.1, "0"), (INF, "finite"), (NAN, "finite"), ("1", "number")]
UNIT: list[tuple[Any, str]] = [(-0.1, "0"), (1.1, "1"), (NAN, "1"), ("1", "number"), (True, "number")]
SHARE: list[tuple[Any, str]] = [(-0.1, "0"), (1.0, "1"), (NAN, "1"), ("1", "number")]
OPEN_UNIT: list[tuple[Any, str]] = [(0.0, "0"), (1.1, "1"), ("1", "number")]
COUNT: list[tuple[Any, str]] = [(0, "1"), (-5, "1"), (1.5, "integer"), ("1", "integer")]
FLAG: list[tuple[Any, str]] = [(1, "true or false"), ("yes", "true or false")]
TEXT: list[tuple[Any, str]] = [(1, "string")]
TEMPERATURE: list[tuple[Any, str]] = [*POSITIVE, ("mean", "or 'median'"), (0.0, "greater than 0, or 'median'")]


def words(*allowed: str) -> list[tuple[Any, str]]:
    return [("none of these", f"'{allowed[0]}'"), (allowed[0].upper(), f"'{allowed[-1]}'"), (1, f"'{allowed[0]}'")]


METHODS: dict[str, dict[str, tuple[list[tuple[Any, str]], Scalar]]] = {
    "entropy": {"loss": (words("entropy", "hard-pl"), "hard-pl"), "optimizer": (words("adam", "sgd"), "adam")},
    "bn-stats": {"momentum": (OPEN_UNIT, 0.1), "source-share": (UNIT, 0.1), "prior": (NOT_NEGATIVE, 16.0)},
    "tent": {"learning-rate": (POSITIVE, 0.1), "optimizer": (words("adam", "sgd"), "sgd")},
    "eata": {
        "learning-rate": (POSITIVE, 0.1),
        "optimizer": (words("adam", "sgd"), "sgd"),
        "entropy-margin": (POSITIVE, 1.0),
        "similarity-margin": (UNIT, 0.1),
        "ema": (SHARE, 0.5),
        "fisher-weight": (NOT_NEGATIVE, 1.0),
        "fisher-samples": (COUNT, 1),
    },
    "sar": {
        "learning-rate": (POSITIVE, 0.1),
        "momentum": (SHARE, 0.0),
        "rho": (POSITIVE, 0.1),
        "entropy-margin": (POSITIVE, 1.0),
        "reset-below": (NOT_NEGATIVE, 0.0),
        "ema": (SHARE, 0.5),
        "skip": (TEXT, ""),
    },
    "shot": {
        "learning-rate": (POSITIVE, 0.1),
        "momentum": (SHARE, 0.0),
        "weight-decay": (NOT_NEGATIVE, 0.0),
        "diversity-weight": (NOT_NEGATIVE, 0.0),
    },
    "note": {
        "learning-rate": (POSITIVE, 0.1),
        "shrinkage": (NOT_NEGATIVE, 0.0),
        "momentum": (OPEN_UNIT, 1.0),
        "capacity": (COUNT, 1),
        "update-every": (COUNT, 1),
        "temperature": (POSITIVE, 2.0),
    },
    "memo": {"learning-rate": (POSITIVE, 0.1), "steps": (COUNT, 2), "views": (COUNT, 1)},
    "lame": {
        "affinity": (words("knn", "rbf", "linear"), "rbf"),
        "neighbours": (COUNT, 1),
        "sigma": (POSITIVE, 2.0),
        "bound-weight": (NOT_NEGATIVE, 0.0),
        "max-steps": (COUNT, 1),
        "tolerance": (NOT_NEGATIVE, 0.0),
    },
    "dua": {
        "momentum": (UNIT, 0.2),
        "decay": (UNIT, 0.5),
        "floor": (UNIT, 0.0),
        "views": ([(-1, "0"), (65_537, "65536"), (1.5, "integer")], 0),
    },
    "cotta": {
        "learning-rate": (POSITIVE, 0.1),
        "teacher-momentum": (UNIT, 0.5),
        "restore": (UNIT, 0.0),
        "augmentations": (COUNT, 1),
        "confidence": (UNIT, 0.72),
        "share-teacher": (FLAG, False),
    },
    "rotta": {
        "learning-rate": (POSITIVE, 0.1),
        "alpha": (UNIT, 0.5),
        "nu": (UNIT, 0.5),
        "capacity": (COUNT, 1),
        "update-every": (COUNT, 1),
        "age-weight": (NOT_NEGATIVE, 0.0),
        "uncertainty-weight": (NOT_NEGATIVE, 0.0),
        "share-teacher": (FLAG, False),
    },
    "roid": {
        "learning-rate": (POSITIVE, 0.1),
        "clip": ([(0.0, "0"), (1.0, "1"), ("1", "number")], 0.5),
        "weighting": (FLAG, False),
        "temperature": (POSITIVE, 1.0),
        "prior-momentum": (SHARE, 0.0),
        "source-momentum": (UNIT, 1.0),
        "consistency": (FLAG, False),
        "prior-correction": (FLAG, False),
    },
    "bbn": {
        "learning-rate": (POSITIVE, 0.1),
        "momentum": (UNIT, 0.05),
        "class-agnostic": (UNIT, 0.1),
        "unbiased": (FLAG, True),
        "entropy-threshold": (POSITIVE, 0.2),
        "consistency": (NOT_NEGATIVE, 0.0),
        "consistency-on": (words("logits", "probabilities"), "probabilities"),
        "average": (words("kept", "batch"), "batch"),
        "literal-views": (FLAG, True),
        "source": (words("balanced", "fixed"), "fixed"),
        "share-class-stats": (FLAG, False),
        "share-teacher": (FLAG, False),
    },
    "knn-per": {"neighbours": (COUNT, 1), "tuned": (FLAG, False), "share": (UNIT, 0.0), "scale": (POSITIVE, 0.1)},
    "fedthe": {
        "history": (OPEN_UNIT, 1.0),
        "present": (UNIT, 0.0),
        "steps": (COUNT, 6),
        "learning-rate": (POSITIVE, 1.0),
    },
    "fedthe-plus": {
        "history": (OPEN_UNIT, 1.0),
        "present": (UNIT, 0.0),
        "steps": (COUNT, 6),
        "learning-rate": (POSITIVE, 1.0),
        "tune-rate": (POSITIVE, 0.1),
        "tune-steps": (COUNT, 1),
        "views": (COUNT, 8),
    },
    "ttt": {
        "learning-rate": (POSITIVE, 0.1),
        "steps": (COUNT, 2),
        "threshold": (UNIT, 0.5),
        "online": (FLAG, False),
    },
    "btfl": {
        "smoothing": (SHARE, 0.4),
        "leave-one-out": (FLAG, True),
        "exponents": (words("paper", "code"), "code"),
        "squash": (NOT_NEGATIVE, 10.0),
        "threshold": (POSITIVE, 5.0),
        "strength": (NOT_NEGATIVE, 0.5),
        "prior": (words("sample", "batch"), "batch"),
        "mix": (words("probabilities", "log"), "log"),
        "sparsity": (NOT_NEGATIVE, 1e-3),
    },
    "fedprox": {"mu": (NOT_NEGATIVE, 0.01)},
    "moon": {"mu": (NOT_NEGATIVE, 0.0), "temperature": (POSITIVE, 1.0)},
    "pfedsd": {"weight": (NOT_NEGATIVE, 0.0), "temperature": (POSITIVE, 2.0)},
    "fedavgm": {
        "momentum": (SHARE, 0.0),
        "learning-rate": (POSITIVE, 0.5),
        "rule": (words("hsu", "ema"), "ema"),
    },
    "ldawa": {"warmup-rounds": ([(-1, "0"), (1.5, "integer"), ("1", "integer")], 0), "renormalise": (FLAG, True)},
}
METHODS |= {
    "fedctta": {
        "metric": (words("euclid", "kl", "ce", "cosine"), "cosine"),
        "indicator": (words("logits", "features"), "features"),
        "images": (words("noise", "chosen", "original"), "chosen"),
        "redraw": (words("never", "each-round", "each-client"), "each-client"),
        "lagged": (FLAG, True),
    },
    "pfedbbn": {"tau": (TEMPERATURE, "median")},
    "fedtsa": {
        "slots": (COUNT, 5),
        "steps": (COUNT, 1),
        "learning-rate": (POSITIVE, 1e-4),
        "augmentation-weight": (NOT_NEGATIVE, 0.1),
        "variant": (words("both", "s-sim", "ts-sim", "wo-time", "wo-aug"), "wo-aug"),
        "masks": (words("sampling", "bernoulli"), "bernoulli"),
        "mix-time": (FLAG, True),
        "warm-start": (FLAG, True),
    },
    "fedamp": {
        "rule": (words("normalised", "original", "cosine"), "original"),
        "self-weight": (UNIT, 0.5),
        "sigma": (TEMPERATURE, "median"),
        "alpha": (POSITIVE, 0.1),
        "weight": (NOT_NEGATIVE, 0.0),
    },
    "pfedgraph": {"lam": (POSITIVE, 0.1), "weight": (NOT_NEGATIVE, 0.0)},
    "tgfl": {
        "train-rounds": (COUNT, 1),
        "epochs": (COUNT, 1),
        "personal-epochs": (COUNT, 2),
        "train-batch": (COUNT, 1),
        "learning-rate": (POSITIVE, 0.1),
        "momentum": (SHARE, 0.5),
        "weight-decay": (NOT_NEGATIVE, 0.0),
        "augment": (FLAG, True),
        "dirichlet": (POSITIVE, 1.0),
        "natural-dataset": ([("cifar10-c", "'cifar10.1', 'arrays' or 'folder'"), (1, "arrays")], "arrays"),
        "natural-dir": (TEXT, "/data"),
    },
}
for method, rows in METHODS.items():
    WRONG |= {f"{method}.{key}": wrong for key, (wrong, _) in rows.items()}
    OTHER |= {f"{method}.{key}": other for key, (_, other) in rows.items()}


def refused(flat: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_flat(flat)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_tables_of_this_file_are_complete() -> None:
    assert set(WRONG) == set(OTHER) == set(DEFAULTS)
    assert all(OTHER[key] != value for key, value in DEFAULTS.items())


def test_defaults_are_valid() -> None:
    assert RunConfig.from_flat({}) == RunConfig() == RunConfig.from_flat(DEFAULTS)


def test_pyproject_holds_every_key_with_its_default() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    flat: dict[str, Any] = {}
    for key, value in project["tool"]["flwr"]["app"]["config"].items():
        flat |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
    assert flat == DEFAULTS
    assert {key: type(value) for key, value in flat.items()} == {key: type(value) for key, value in DEFAULTS.items()}


@pytest.mark.parametrize(("key", "value", "allowed"), [(k, v, a) for k, cases in WRONG.items() for v, a in cases])
def test_a_wrong_value_is_one_line_with_key_value_and_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    text = refused({key: value})
    assert text.startswith(key)
    received, _, rest = text.partition("allowed") if "twice" not in text else text.partition("twice")
    unknown_name = str(value).rpartition(",")[2].strip()  # of a list, the one that is wrong
    assert repr(value) in received or (unknown_name and repr(unknown_name) in received)
    assert allowed in rest


def test_a_value_in_the_place_of_a_table_is_one_line() -> None:
    wanted = "allowed: a table, with keys such as fedctta.NAME (`fedtta list keys`)"
    assert refused({"fedctta": 1}) == f"fedctta = 1: {wanted}"


@pytest.mark.parametrize(("key", "value"), OTHER.items())
def test_an_allowed_value_is_kept(key: str, value: Scalar) -> None:
    config = RunConfig.from_flat({key: value})
    assert config.to_flat() == DEFAULTS | {key: value}
    assert RunConfig.from_flat(config.to_flat()) == config


@pytest.mark.parametrize("key", OTHER)
def test_the_fingerprint_tells_results_apart_not_places(key: str) -> None:
    changed = RunConfig.from_flat({key: OTHER[key]}).fingerprint() != RunConfig().fingerprint()
    assert changed == (key not in WHERE)


def test_the_fingerprint_is_short_and_does_not_change_by_accident() -> None:
    assert len(RunConfig().fingerprint()) == 16
    assert int(RunConfig().fingerprint(), 16) >= 0
    assert RunConfig.from_flat(dict(reversed(DEFAULTS.items()))).fingerprint() == RunConfig().fingerprint()


@pytest.mark.parametrize("key", ["spatial-heterogeneity", "round-timeout", "join-timeout", "fedctta.temperature"])
def test_a_whole_number_is_a_number(key: str) -> None:
    """TOML users write 1 for 1.0; both are the same config."""
    config = RunConfig.from_flat({key: 1})
    assert config == RunConfig.from_flat({key: 1.0})
    assert type(config.to_flat()[key]) is float


@pytest.mark.parametrize(
    "key", ["batchsize", "Batch-Size", "lr", "fedctta.temp", "fedctta.", "fedavg.temperature", "entropy.lr"]
)
def test_an_unknown_key_is_named(key: str) -> None:
    text = refused({key: 1})
    assert text.startswith(key.partition(".")[0])
    assert "unknown" in text
    assert "fedtta list keys" in text


@pytest.mark.parametrize("key", ["batch_size", "fedctta.noise_samples"])
def test_a_key_has_one_spelling(key: str) -> None:
    assert refused({key: 7}).startswith(f"{key!r}: unknown key; did you mean {key.replace('_', '-')}? `fedtta list")


@pytest.mark.parametrize(
    ("key", "meant"), [("fedctta.temprature", "fedctta.temperature"), ("num-client", "num-clients"), ("zzz", "")]
)
def test_a_key_that_is_nearly_one_is_understood(key: str, meant: str) -> None:
    said = f"did you mean {meant}? " if meant else ""
    assert refused({key: 1}) == f"{key}: unknown key; {said}`fedtta list keys` prints the allowed ones"


@pytest.mark.parametrize("key", ["entropy.lr", "entropy.", "entropy.zzz"])
def test_a_table_tells_its_own_keys(key: str) -> None:
    own = "entropy.learning-rate, entropy.loss, entropy.optimizer"
    assert refused({key: 1}) == f"{key}: unknown key; allowed: {own} (`fedtta list keys` explains them)"


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("severity", 9, "1 to 5"),
        ("batch-size", 0, "1 to 65536"),
        ("bn-stats.momentum", 0.0, "above 0 to 1"),
        ("eata.ema", 1.0, "0 to below 1"),
        ("rotta.capacity", 0, "1 to 65536"),
        ("rounds", -1, "greater than or equal to 0"),
    ],
)
def test_a_range_is_told_whole(key: str, value: Scalar, allowed: str) -> None:
    assert refused({key: value}) == f"{key} = {value}: allowed: {allowed}"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"num_clients": 0}, "num_clients = 0: allowed: 1 to 100000"),
        ({"sevrity": 3}, "sevrity: unknown key; did you mean severity? `fedtta list keys` prints the allowed ones"),
        ({"tent": {"learning_rate": 0.0}}, "tent.learning_rate = 0.0: allowed: greater than 0"),
        ({"bn_stats": {"momentum": 2.0}}, "bn_stats.momentum = 2.0: allowed: above 0 to 1"),
    ],
)
def test_a_script_is_told_in_one_line_too(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**fields)
    assert str(caught.value) == line


@pytest.mark.parametrize("table", ["fedctta", "entropy"])
@pytest.mark.parametrize("value", [1, "", True])
def test_a_table_is_no_value(table: str, value: Scalar) -> None:
    text = refused({table: value})
    assert text.startswith(table)
    assert repr(value) in text


def test_a_value_is_no_table() -> None:
    assert "batch-size.x" in refused({"batch-size": 10, "batch-size.x": 1})


@pytest.mark.parametrize("key", ["eata.fisher-samples", "aggregate-every", "fedctta.temperature"])
def test_whole_numbers_have_64_bits_as_in_flowers_messages(key: str) -> None:
    assert refused({key: 2**63}) == f"{key} = {2**63}: allowed: whole numbers of 64 bits, below {2**63}"
    RunConfig.from_flat({key: 2**63 - 1})


def test_several_faults_are_counted() -> None:
    text = refused({"batch-size": 0, "severity": 9, "seed": -1})
    assert text.startswith("batch-size = 0")
    assert "2 more" in text
    # an error in each of several allowed types is one fault
    assert "more" not in refused({"fedctta.temperature": -1.0})
    assert refused({"fedctta.temperature": -1.0, "pfedbbn.tau": "mean"}).endswith("(and 1 more faults)")


def test_a_quorum_of_more_clients_than_there_are_is_refused() -> None:
    text = refused({"num-clients": 4, "spatial-heterogeneity": 0.25, "quorum": 5})
    assert "quorum = 5" in text
    assert "0 to 4" in text
    RunConfig.from_flat({"num-clients": 4, "spatial-heterogeneity": 0.25, "quorum": 4})


def test_less_than_one_group_is_refused() -> None:
    text = refused({"num-clients": 4, "spatial-heterogeneity": 0.1})
    assert "spatial-heterogeneity = 0.1" in text
    assert "num-clients = 4" in text
    assert "0.25" in text
    RunConfig.from_flat({"num-clients": 4, "spatial-heterogeneity": 0.25})
    RunConfig.from_flat({"num-clients": 1, "spatial-heterogeneity": 1.0})


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"mixed-domains": True, "corruptions": "fog"}, ["mixed-domains = true", "two corruptions or more"]),
        ({"mixed-domains": True, "batch-size": 5}, ["mixed-domains = true", "batch-size is 5"]),
        ({"mixed-domains": True, "severity-schedule": "gradual"}, ["severity-schedule = 'gradual'", "'constant'"]),
        ({"mixed-domains": True, "group-orders": "20:+1"}, ["group-orders = '20:+1'", "mixed-domains"]),
        ({"severity-schedule": "gradual", "corruptions": "none"}, ["severity-schedule", "'none'", "constant"]),
        ({"group-orders": "4:+0,3:+1", "num-clients": 8}, ["group-orders", "for 7 clients", "num-clients = 8"]),
        ({"fedctta.indicator": "features", "fedctta.metric": "kl"}, ["fedctta.metric = 'kl'", "euclid, cosine"]),
        ({"fedctta.indicator": "features", "fedctta.metric": "ce"}, ["fedctta.metric = 'ce'", "euclid, cosine"]),
        ({"fedctta.redraw": "each-round", "fedctta.images": "chosen"}, ["fedctta.redraw = 'each-round'", "never"]),
        ({"fedctta.lagged": True, "fedctta.images": "original"}, ["fedctta.lagged = true", "'original'", "false"]),
        ({"dataset": "live"}, ["dataset = 'live'", "classes", "2 or more"]),
        ({"dataset": "live", "classes": 10}, ["dataset = 'live'", "rounds", "1 or more"]),
        ({"dataset": "live", "classes": 10, "rounds": 5, "stream": "a:b"}, ["stream = 'a:b'", "'live'"]),
        (
            {"dataset": "live", "classes": 10, "rounds": 5, "live-wait": 2.0, "round-timeout": 1.0},
            ["live-wait = 2", "round-timeout = 1"],
        ),
        ({"fedtsa.mix-time": True, "fedtsa.variant": "wo-time"}, ["fedtsa.mix-time", "'wo-time'", "both, ts-sim"]),
        ({"fedtsa.mix-time": True, "fedtsa.variant": "s-sim"}, ["fedtsa.mix-time", "'s-sim'", "wo-aug"]),
        ({"fedamp.sigma": "median", "fedamp.rule": "original"}, ["fedamp.sigma = 'median'", "'original'", "a number"]),
        ({"fedtsa.warm-start": True, "fedtsa.variant": "ts-sim"}, ["fedtsa.warm-start", "'ts-sim'", "wo-time"]),
        ({"fedtsa.warm-start": True, "fedtsa.variant": "s-sim"}, ["fedtsa.warm-start", "'s-sim'", "both"]),
    ],
)
def test_a_combination_that_cannot_be_is_refused(flat: dict[str, Any], words: list[str]) -> None:
    text = refused(flat)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"dataset": "cifar"}, ["dataset", "'cifar'", "digits"]),
        ({"data-dir": "/no/such/folder"}, ["data-dir", "/no/such/folder"]),
        ({"model": "resnet20"}, ["model", "'resnet20'", "checkpoint"]),
        ({"model": "resnet20-gn", "adapter": "bn-stats"}, ["checkpoint"]),
        ({"checkpoint": "/no/such.safetensors"}, ["/no/such.safetensors"]),
        ({"batch-size": 798, "slots-per-corruption": 1}, ["batch-size = 798", "797"]),
    ],
)
def test_what_names_a_file_or_data_is_checked_before_anybody_is_asked(flat: dict[str, Any], words: list[str]) -> None:
    config = RunConfig.from_flat(flat)
    with pytest.raises(FedTTAError) as caught:
        check_inputs(config)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_every_key_is_described() -> None:
    rows = describe_keys()
    assert {key: default for key, default, _ in rows} == DEFAULTS
    assert len(rows) == len(DEFAULTS)
    assert all(len(text) > 5 for _, _, text in rows)
    meanings = {key: text for key, _, text in rows}
    assert meanings["spatial-heterogeneity"].endswith(" (> 0, <= 1)")
    assert meanings["tgfl.momentum"].endswith(" (>= 0, < 1)")
    assert not meanings["scores"].endswith(")")
    assert meanings["lame.affinity"].endswith(" (knn, rbf, linear)")
    assert meanings["tgfl.natural-dataset"].endswith(" (cifar10.1, arrays, folder)")
    assert meanings["fedctta.temperature"].endswith(" (> 0)")  # median is in the words
    assert not meanings["fedamp.rule"].endswith(")")  # so are all three


def test_a_config_cannot_be_changed() -> None:
    config = RunConfig()
    with pytest.raises(Exception, match="frozen"):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(Exception, match="frozen"):
        config.fedctta.ema = 0.0  # type: ignore[misc]


def test_options_are_those_of_the_method() -> None:
    config = RunConfig.from_flat({"fedctta.ema": 0.5, "entropy.learning-rate": 0.1})
    assert config.options("fedctta") == FedCTTAOptions(ema=0.5)
    assert config.options("entropy") == EntropyOptions(learning_rate=0.1)
    for method in ("source", "local", "seed", "my_package.module:Class"):
        assert config.options(method) == NoOptions()


def test_lists_may_have_blanks() -> None:
    config = RunConfig.from_flat({"corruptions": " fog , snow,", "scores": "post, pre"})
    assert config.corruption_names() == ("fog", "snow")
    assert config.corruptions == "fog,snow"
    assert config.score_names() == ("pre", "post")  # in the order in which they are reported


def test_no_score_is_allowed() -> None:
    assert RunConfig.from_flat({"scores": ""}).score_names() == ()


@pytest.mark.parametrize("clients", [1, 2, 9, 10, 11, 99, 100, 101, 1000, 1001])
def test_client_names_are_sorted_and_distinct(clients: int) -> None:
    names = RunConfig.from_flat({"num-clients": clients, "spatial-heterogeneity": 1.0}).client_names()
    assert len(set(names)) == clients
    assert list(names) == sorted(names)
    assert [int(name.removeprefix("client-")) for name in names] == list(range(clients))


def test_clients_may_have_names_of_their_own() -> None:
    config = RunConfig.from_flat({"clients": " gate, cam-12,cam-07,", "num-clients": 3, "spatial-heterogeneity": 1.0})
    assert config.client_names() == ("cam-07", "cam-12", "gate")  # the order of the streams and of W
    assert config.clients == "gate,cam-12,cam-07"
    for names, count in (("a,b", 3), ("a,b,c", 2)):
        text = refused({"clients": names, "num-clients": count, "spatial-heterogeneity": 1.0})
        assert f"num-clients = {count}" in text
        assert f"{names.count(',') + 1} of them" in text
    longest = "x" * 64
    assert RunConfig.from_flat({"clients": longest, "num-clients": 1, "spatial-heterogeneity": 1.0}).clients == longest
    for name in ("x" * 65, "..", ".hidden", "-x", "a b", "a/b", "a:b", "a\nb", "\u00e4"):
        refused({"clients": name, "num-clients": 1, "spatial-heterogeneity": 1.0})


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "num-clients": st.integers(3, 50),
            "batch-size": st.integers(1, 100),
            "corruptions": st.lists(st.sampled_from((*CORRUPTIONS, *EXTRA_CORRUPTIONS)), min_size=1, unique=True).map(
                ",".join
            ),
            "scores": st.lists(st.sampled_from(SCORES), unique=True).map(",".join),
            "seed": st.integers(0, 2**63 - 1),
            "spatial-heterogeneity": st.floats(0.25, 1.0),
            "round-timeout": st.floats(1e-3, 1e9),
            "output-dir": st.text(max_size=20),
            "fedctta.ema": st.floats(0, 1, exclude_max=True),
            "fedctta.temperature": st.floats(1e-6, 1e6),
            "entropy.learning-rate": st.floats(1e-9, 10),
        },
    )
)
def test_flat_round_trip(overrides: dict[str, Any]) -> None:
    config = RunConfig.from_flat(overrides)
    flat = config.to_flat()
    assert flat == DEFAULTS | overrides
    assert RunConfig.from_flat(flat) == config
    assert RunConfig.from_flat(flat).fingerprint() == config.fingerprint()


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"num-clients": 1, "spatial-heterogeneity": 1.0}, "num-clients = 1: .* allowed with tgfl: 2 or more"),
        ({"aggregate-every": 2}, "aggregate-every = 2: .* allowed: 1"),
        ({"dataset": "cifar10-c", "data-dir": "/data"}, "task = 'tgfl': dataset = 'cifar10-c' has no clean images"),
        ({"stream": "a:b", "classes": 3}, "task = 'tgfl': stream = 'a:b' has no clean images"),
        ({"tgfl.natural-dir": "/data"}, "tgfl.natural-dir = '/data': .* set tgfl.natural-dataset"),
    ],
)
def test_what_two_heads_cannot_be_trained_with(flat: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat({"task": "tgfl"} | flat)
    RunConfig.from_flat({key: value for key, value in flat.items() if key != "dataset"})  # without the task they may
