"""The run config: every key with its type, unit, range, default and one-line meaning.

The same keys stand in ``[tool.flwr.app.config]`` of pyproject.toml (Flower lets a run override only what stands
there); a test keeps both equal. Flower hands the config over flat (``fedctta.temperature``): see `RunConfig.from_flat`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from fedtta_flwr.data.checks import check_streams
from fedtta_flwr.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS
from fedtta_flwr.data.orders import parse_group_orders
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.models import MODELS, ROBUSTBENCH
from fedtta_flwr.options import (
    BBNOptions,
    BNStatsOptions,
    BTFLOptions,
    CoTTAOptions,
    DUAOptions,
    EATAOptions,
    EntropyOptions,
    FedAMPOptions,
    FedAvgMOptions,
    FedCTTAOptions,
    FedProxOptions,
    FedTHEOptions,
    FedTHEPlusOptions,
    FedTSAOptions,
    KNNPerOptions,
    LAMEOptions,
    LDAWAOptions,
    MEMOOptions,
    MOONOptions,
    NoOptions,
    NOTEOptions,
    Options,
    PFedBBNOptions,
    PFedGraphOptions,
    PFedSDOptions,
    ROIDOptions,
    RoTTAOptions,
    SAROptions,
    SHOTOptions,
    TentOptions,
    TGFLOptions,
    TTTOptions,
    kebab,
)
from fedtta_flwr.registry import ADAPTERS, HEADS, STRATEGIES, TRACKERS
from fedtta_flwr.resolve import check_name, names_in

SCORES = ("source", "local", "pre", "tta", "post")
#: also the name of a folder, and of a file
CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_WORDS = "a letter or digit, then letters, digits, '.', '_' and '-', at most 64 in all"
Scalar = str | int | float | bool
#: keys that only say where and how often something is written
WHERE = ("output-dir", "state-dir", "checkpoint-every", "resume", "tracking")


class RunConfig(BaseModel):
    """Everything that decides the result of a run; immutable once validated."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True)

    task: Literal["ftta", "tgfl"] = Field(
        "ftta",
        description="ftta: clients adapt a source model, by strategy and adapter; tgfl: two heads are trained "
        "federatedly and combined sample by sample, by head",
    )
    strategy: str = Field("fedctta", description="how clients collaborate (`fedtta list`)")
    adapter: str = Field("bn-stats", description="how a client adapts (`fedtta list`)")
    head: str = Field("btfl", description="with task = tgfl: how the heads' predictions are combined (`fedtta list`)")
    strategy_options: str = Field(
        "", description="values of attributes of a strategy of your own: 'name=value name=value'; empty = its own"
    )
    adapter_options: str = Field("", description="the same of an adapter of your own")
    head_options: str = Field("", description="the same of a head of your own")
    dataset: str = Field("digits", description="what the streams are made of (`fedtta list`)")
    data_dir: str = Field("", description="folder of the data set; empty where none is needed")
    image_size: Annotated[int, Field(ge=8, le=1024)] = Field(
        32, description="pixels a side to which the images of `folder` and `live` are resized"
    )
    classes: Annotated[int, Field(ge=0, le=100_000)] = Field(
        0, description="number of classes; 0 = as many as the data set has; `live` and an own stream need it"
    )
    model: str = Field("resnet8", description="source model: an architecture (`fedtta list models`)")
    checkpoint: str = Field(
        "",
        description="source model, .safetensors; empty = the embedded one (digits, resnet8), or what a network of "
        "your own brings; with task = tgfl where training begins, empty = drawn by seed; with robustbench:ID the zoo's "
        "folder of models, empty = ~/.cache/fedtta/robustbench",
    )
    legacy_no_norm: bool = Field(
        False, description="leave the model's input normalisation out, as the published CIFAR-100 rows did"
    )
    num_clients: Annotated[int, Field(ge=1, le=100_000)] = Field(20, description="clients")
    clients: str = Field(
        "",
        description="their own names, separated by commas, num-clients of them, sorted as texts (cam-10 before cam-2), "
        "which is the order of groups; empty = client-00, client-01, ...",
    )
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = Field(10, description="samples per slot")
    severity: Annotated[int, Field(ge=1, le=5)] = Field(5, description="of every corruption")
    corruptions: str = Field(
        "gaussian_noise,shot_noise,defocus_blur,brightness,contrast,pixelate",
        description="in the order of their appearance, separated by commas",
    )
    scores: str = Field(
        "source,local,pre,tta,post",
        description="what is scored, separated by commas; each may cost a forward pass",
    )
    spatial_heterogeneity: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="SH: groups of clients that see different corruptions, divided by clients"
    )
    slots_per_corruption: Annotated[int, Field(ge=0)] = Field(
        8, description="batches of each corruption that a client sees; 0 = all samples"
    )
    shift_length: Annotated[int, Field(ge=1)] = Field(
        8, description="slots between two shifts of a client's corruption; TH = 1 / shift-length"
    )
    group_orders: str = Field(
        "",
        description="orders of the corruptions, e.g. 4:+0,3:+1,3:reverse (or COUNT:random); empty = from "
        "spatial-heterogeneity",
    )
    mixed_domains: bool = Field(False, description="every batch holds all corruptions, instead of one after the other")
    severity_schedule: Literal["constant", "gradual"] = Field(
        "constant",
        description="gradual: between two shifts up from 1 to severity and down to 1 again; with fewer "
        "slots than 2 * severity - 1 some levels are left out, and if they are even in number the highest",
    )
    sampling: Literal["fling-iid", "disjoint"] = Field(
        "fling-iid", description="fling-iid: clients draw independently and overlap; disjoint: no sample twice"
    )
    class_skew: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="delta of the Dirichlet distribution of a client's classes; 0.0 = no skew"
    )
    class_skew_seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        1, description="of the class skew alone: the published partitions have 1 whatever the run's seed"
    )
    stream_order: Literal["shuffled", "class-sorted"] = Field(
        "shuffled", description="of a client's samples within each corruption"
    )
    stream: str = Field(
        "", description="my_module:my_stream, a function (config, client) of your own; empty = cut from the data set"
    )
    live_wait: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1.0, description="seconds a slot that `live` waits for full batches, divided among the clients of a node"
    )
    rounds: Annotated[int, Field(ge=0)] = Field(0, description="0 = to the end of the streams; `live` needs a number")
    aggregate_every: Annotated[int, Field(ge=1)] = Field(
        1, description="slots that a client adapts to between two aggregations"
    )
    bn_pooling: Literal["linear", "moments"] = Field(
        "linear",
        description="variances in a mixture: linear = their weighted mean, as published; moments = those of the mixed "
        "data (law of total variance)",
    )
    reset: Literal["never", "each-shift", "collapse"] = Field(
        "never",
        description="never: continual adaptation; each-shift: back to the source model, memories and moments "
        "included, whenever a client's corruption changes (it has to be told); collapse: when a client has come "
        "to predict hardly anything but one class; the server's memory stays",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of every random draw")
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = Field(
        "auto", description="auto, cpu, cuda or cuda:N; auto = CUDA where there is one"
    )
    threads: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="CPU threads per client process; fixed, so that sums do not depend on it"
    )
    quorum: Annotated[int, Field(ge=0)] = Field(
        0,
        description="clients that must have adapted in a round for it to mix their states, and that must be there at "
        "the start once join-timeout is over; 0 = all at the start, then any number",
    )
    clip_updates: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0,
        description="largest norm of a client's change in a round, in medians of the clients' changes: a larger one is "
        "scaled down before it is mixed; 0.0 = any",
    )
    weight_cap: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="largest weight of another client in a mixture; what is above goes to the client's own state"
    )
    round_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        3600.0, description="seconds after which a round goes on without those who have not replied"
    )
    join_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        300.0, description="seconds to wait at the start for all clients to be there"
    )
    checkpoint_every: Annotated[int, Field(ge=0)] = Field(
        0, description="rounds between two checkpoints in the run directory; 0 = none"
    )
    resume: str = Field("", description="run directory of a run that shall go on from its last checkpoint")
    state_dir: str = Field(
        "",
        description="folder in which clients keep their own states, to find them again after a restart; one in the "
        "node config comes first; empty = in memory only",
    )
    output_dir: str = Field("", description="run directory; absolute or ~; empty = a new one in ~/fedtta-runs")
    tracking: str = Field(
        "", description="who else is told how the run goes, separated by commas: tensorboard, mlflow, wandb"
    )
    entropy: EntropyOptions = EntropyOptions()
    bn_stats: BNStatsOptions = BNStatsOptions()
    tent: TentOptions = TentOptions()
    eata: EATAOptions = EATAOptions()
    sar: SAROptions = SAROptions()
    shot: SHOTOptions = SHOTOptions()
    note: NOTEOptions = NOTEOptions()
    memo: MEMOOptions = MEMOOptions()
    lame: LAMEOptions = LAMEOptions()
    dua: DUAOptions = DUAOptions()
    cotta: CoTTAOptions = CoTTAOptions()
    rotta: RoTTAOptions = RoTTAOptions()
    roid: ROIDOptions = ROIDOptions()
    bbn: BBNOptions = BBNOptions()
    knn_per: KNNPerOptions = KNNPerOptions()
    fedthe: FedTHEOptions = FedTHEOptions()
    fedthe_plus: FedTHEPlusOptions = FedTHEPlusOptions()
    ttt: TTTOptions = TTTOptions()
    btfl: BTFLOptions = BTFLOptions()
    fedctta: FedCTTAOptions = FedCTTAOptions()
    fedprox: FedProxOptions = FedProxOptions()
    moon: MOONOptions = MOONOptions()
    pfedsd: PFedSDOptions = PFedSDOptions()
    fedavgm: FedAvgMOptions = FedAvgMOptions()
    ldawa: LDAWAOptions = LDAWAOptions()
    pfedbbn: PFedBBNOptions = PFedBBNOptions()
    fedtsa: FedTSAOptions = FedTSAOptions()
    fedamp: FedAMPOptions = FedAMPOptions()
    pfedgraph: PFedGraphOptions = PFedGraphOptions()
    tgfl: TGFLOptions = TGFLOptions()

    @field_validator("strategy")
    @classmethod
    def _strategy(cls, value: str) -> str:
        return check_name("strategy", value, STRATEGIES)

    @field_validator("adapter")
    @classmethod
    def _adapter(cls, value: str) -> str:
        return check_name("adapter", value, ADAPTERS)

    @field_validator("head")
    @classmethod
    def _head(cls, value: str) -> str:
        return check_name("head", value, HEADS)

    @field_validator("model")
    @classmethod
    def _model(cls, value: str) -> str:
        zoo = value.startswith(ROBUSTBENCH)
        return value if zoo else check_name("model", value, {**MODELS, f"{ROBUSTBENCH}ID": ""})

    @field_validator("corruptions")
    @classmethod
    def _corruptions(cls, value: str) -> str:
        return _checked_list("corruptions", value, ("none", *CORRUPTIONS, *EXTRA_CORRUPTIONS))

    @field_validator("clients")
    @classmethod
    def _clients(cls, value: str) -> str:
        names = names_in(value)
        for i, name in enumerate(names):
            if not CLIENT_NAME.fullmatch(name):
                raise ConfigError(f"clients: {name!r}: allowed: {NAME_WORDS}")
            if name in names[:i]:
                raise ConfigError(f"clients: {name!r} stands there twice; name each once")
        return ",".join(names)

    @field_validator("group_orders")
    @classmethod
    def _group_orders(cls, value: str) -> str:
        parse_group_orders(value)
        return value

    @field_validator("stream")
    @classmethod
    def _stream(cls, value: str) -> str:
        module, _, function = value.partition(":")
        if value and not (all(part.isidentifier() for part in module.split(".")) and function.isidentifier()):
            raise ConfigError(f"stream = {value!r}: no name of a function; allowed: empty, or my_module:my_stream")
        return value

    @field_validator("scores")
    @classmethod
    def _scores(cls, value: str) -> str:
        return _checked_list("scores", value, SCORES, may_be_empty=True)

    @field_validator("tracking")
    @classmethod
    def _tracking(cls, value: str) -> str:
        return _checked_list("tracking", value, tuple(TRACKERS), may_be_empty=True)

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(data)
        except ValidationError as error:
            raise ConfigError(_one_line(error)) from None

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.clients and len(self.clients.split(",")) != self.num_clients:
            raise ConfigError(
                f"clients = {self.clients!r}: {len(self.clients.split(','))} of them, but num-clients = "
                f"{self.num_clients}; allowed: as many names"
            )
        if self.quorum > self.num_clients:
            raise ConfigError(
                f"quorum = {self.quorum}: more than num-clients = {self.num_clients}, so that no round would mix "
                f"anything; allowed: 0 to {self.num_clients}"
            )
        if self.makes_groups() and self.spatial_heterogeneity * self.num_clients < 0.5:
            raise ConfigError(
                f"spatial-heterogeneity = {self.spatial_heterogeneity}: less than one group; allowed "
                f"with num-clients = {self.num_clients}: {1 / self.num_clients:g} (one group) to 1.0"
            )
        check_streams(self)
        return self

    @classmethod
    def from_flat(cls, flat: Mapping[str, Scalar]) -> Self:
        """Validate a flat mapping such as Flower's ``context.run_config``.

        Parameters
        ----------
        flat : Mapping[str, str | int | float | bool]
            Keys as in the run config, ``table.key`` for the tables; what is absent keeps its default.

        Raises
        ------
        ConfigError
            One line that names the key, the value received and what is allowed.
        """
        nested: dict[str, Any] = {}
        for key, value in flat.items():
            table, dot, rest = key.partition(".")
            if not dot:
                nested[key] = value
            elif isinstance(entry := nested.setdefault(table, {}), dict):
                entry[rest] = value
        for key in flat:
            table, dot, _ = key.partition(".")
            if "_" in key or not key.isprintable() or (dot and table in flat):
                raise ConfigError(f"{key!r}: {_unknown(key)}")
        config = cls.model_validate(nested)
        for key, value in flat.items():
            if isinstance(value, int) and value >= 2**63:  # nor would Flower send it
                raise ConfigError(f"{key} = {value}: allowed: whole numbers of 64 bits, below {2**63}")
        return config

    def to_flat(self) -> dict[str, Scalar]:
        """Return the flat mapping from which `from_flat` makes an equal config."""
        flat: dict[str, Scalar] = {}
        for key, value in self.model_dump(by_alias=True).items():
            if isinstance(value, dict):
                flat.update({f"{key}.{inner}": v for inner, v in value.items()})
            else:
                flat[key] = value
        return flat

    def fingerprint(self) -> str:
        """Return a short hash of everything that decides the result (not where it is written)."""
        flat = {k: v for k, v in self.to_flat().items() if k not in WHERE}
        return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:16]

    def options(self, method: str) -> Options:
        """Return the table of a method; an empty one if it has none."""
        table = getattr(self, method.replace("-", "_"), None)
        return table if isinstance(table, Options) else NoOptions()

    def methods(self) -> tuple[str, str]:
        """Return the names of the two methods that a run is about: strategy and adapter, or tgfl and head."""
        return ("tgfl", self.head) if self.task == "tgfl" else (self.strategy, self.adapter)

    def corruption_names(self) -> tuple[str, ...]:
        """Return the corruptions in the order of their appearance."""
        return tuple(self.corruptions.split(","))

    def score_names(self) -> tuple[str, ...]:
        """Return the scores to compute, in the order in which they are reported."""
        return tuple(score for score in SCORES if score in self.scores.split(","))

    def tracker_names(self) -> tuple[str, ...]:
        """Return the trackers that are told how the run goes."""
        return tuple(self.tracking.split(",")) if self.tracking else ()

    def makes_groups(self) -> bool:
        """Return whether it is the spatial heterogeneity that says which clients see the same."""
        return self.task == "ftta" and not (self.group_orders or self.stream or self.dataset == "live")

    def groups(self) -> int:
        """Return how many groups of clients the spatial heterogeneity makes, where it does."""
        return max(1, round(self.spatial_heterogeneity * self.num_clients))

    def client_names(self) -> tuple[str, ...]:
        """Return the clients' names; their sorted order is the order of the streams."""
        return _client_names(self.clients, self.num_clients)


@lru_cache(maxsize=8)  # each stream of a fleet asks for all names
def _client_names(clients: str, number: int) -> tuple[str, ...]:
    if clients:
        return tuple(sorted(clients.split(",")))
    width = max(2, len(str(number - 1)))
    return tuple(f"client-{i:0{width}d}" for i in range(number))


def describe_keys() -> list[tuple[str, Scalar, str]]:
    """Return (key, default, meaning with what is allowed, unless it names that) for every key of the run config."""
    rows: list[tuple[str, Scalar, str]] = []
    own = {row[0]: row for row in _described(RunConfig)}
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.default, Options):
            table = _described(type(field.default))
            rows += [(f"{kebab(name)}.{key}", default, meaning) for key, default, meaning in table]
        else:
            rows.append(own[kebab(name)])
    return rows


def _described(table: type[BaseModel]) -> list[tuple[str, Scalar, str]]:
    """Return (key, default, meaning) of a table's keys."""
    schema = table.model_json_schema()["properties"]
    return [
        (key, schema[key].get("default"), _meaning(schema[key]))
        for key in map(kebab, table.model_fields)
        if "$ref" not in schema[key]
    ]


def _meaning(schema: Mapping[str, Any]) -> str:
    """Return what a key is for, from its JSON schema, and what is allowed: `(> 0, <= 1)`, `(> 0, or median)`."""
    text, kinds = str(schema.get("description", "")), schema.get("anyOf", [schema])
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    names = [name for kind in kinds for name in kind.get("enum", [kind.get("const")]) if name]
    bounds = [f"{sign} {kind[key]:g}" for kind in kinds for key, sign in signs.items() if key in kind]
    allowed = ", ".join(bounds + ([] if all(name in text for name in names) else names))
    return f"{text} ({allowed})" if allowed else text


def _checked_list(key: str, value: str, allowed: tuple[str, ...], may_be_empty: bool = False) -> str:
    names = names_in(value)
    if not names and not may_be_empty:
        raise ConfigError(f"{key} = {value!r}: empty; allowed: one or more of {', '.join(allowed)}")
    for i, name in enumerate(names):
        if name not in allowed:
            raise ConfigError(f"{key}: {name!r} is unknown; allowed: {', '.join(allowed)}")
        if name in names[:i]:
            raise ConfigError(f"{key}: {name!r} stands there twice; name each once")
    return ",".join(names)


def differing_key(wanted: Mapping[str, Scalar], ran: Mapping[str, Scalar]) -> str | None:
    """Return the first key of a run config in which a run differs that has been.

    A key that a run did not know is default, and one that neither it nor this code knows decides nothing, no more than
    where a run was written to.
    """
    there = RunConfig().to_flat() | dict(ran)
    return next((key for key, value in wanted.items() if key not in WHERE and there.get(key, value) != value), None)


def _unknown(key: str) -> str:
    """Return what is to be said of a key that there is not."""
    known = list(RunConfig().to_flat())
    table = key[: key.find(".") + 1]
    own = [other for other in known if table and other.startswith(table)]
    table = table if own else ""
    # What all keys of a table begin with makes none of them likelier.
    near = get_close_matches(key.removeprefix(table), [other.removeprefix(table) for other in own or known], n=1)
    if own and not near:
        return f"unknown key; allowed: {', '.join(own)} (`fedtta list keys` explains them)"
    meant = f"did you mean {table}{near[0]}? " if near else ""
    return f"unknown key; {meant}`fedtta list keys` prints the allowed ones"


def _both_bounds(key: str) -> str:
    """Return the range of a key that has two bounds: `1 to 5`, `above 0 to 1`; nothing for others."""
    table, dot, inner = key.partition(".")
    part = type(RunConfig.model_fields[table.replace("-", "_")].default) if dot else RunConfig
    schema = part.model_json_schema()["properties"][kebab(inner or table)]  # a script may give a field's name
    words = {"minimum": "", "exclusiveMinimum": "above ", "maximum": "", "exclusiveMaximum": "below "}
    bounds = [f"{word}{schema[name]}" for name, word in words.items() if name in schema]
    return " to ".join(bounds) if len(bounds) == 2 else ""


def _one_line(error: ValidationError) -> str:
    """Turn pydantic's report into one line on the first fault, with the number of the others."""
    faults: dict[str, list[ErrorDetails]] = {}
    for fault in error.errors():
        # What follows the key says which of several allowed types was tried: each is a fault of its own.
        faults.setdefault(".".join(str(part) for part in fault["loc"][:2]), []).append(fault)
    key, tried = next(iter(faults.items()))
    first = tried[0]
    if first["type"] == "extra_forbidden":
        text = f"{key}: {_unknown(key)}"
    else:
        wanted = ", or ".join(fault["msg"].replace("Input should be ", "") for fault in tried)
        wanted = wanted.replace("a valid boolean", "true or false")
        if first["type"].startswith(("greater_than", "less_than")):
            wanted = _both_bounds(key) or wanted
        if first["type"] == "string_pattern_mismatch":  # the pattern is for the machine
            wanted = str(RunConfig.model_fields[key.replace("-", "_")].description)
        if first["type"] == "model_type":
            wanted = f"a table, with keys such as {key}.NAME (`fedtta list keys`)"
        text = f"{key} = {first['input']!r}: allowed: {wanted}"
    others = len(faults) - 1
    return text + (f" (and {others} more faults)" if others else "")
