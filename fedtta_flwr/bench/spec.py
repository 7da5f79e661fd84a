"""The spec of a benchmark: a TOML file that says which runs, how their results are laid out, and what was published."""

import itertools
import re
import reprlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedtta_flwr.config import SCORES, RunConfig, Scalar
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.options import kebab
from fedtta_flwr.plugins import check_plugins
from fedtta_flwr.resolve import names_in

#: the name of an axis or of one of its points; points become parts of file names
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+=_ -]{0,47}")
NAME_WORDS = "a letter or digit, then letters, digits, blanks and '.+=_-', at most 48 in all"
LONGEST = 200  # characters of a cell's name, which becomes that of a file
RUN_COLUMNS = ("seed", "score", "metric", "value")  # of tables/runs.csv, beside the axes
WITHIN = ("corruption", "position", "class", "client")  # what a row of published values may run over beside an axis
#: pydantic's kind of fault -> what is allowed, where its own words are for programmers
ALLOWED = {
    "string_pattern_mismatch": "lower-case letters, digits and hyphens, no hyphen first, at most 64",
    "too_short": "one at least",
    "list_type": "a list, [...]",
    "dict_type": "a table, { ... }",
    "model_type": "a table, { ... }",
}
Table = dict[str, Any]
Labels = dict[str, str]
#: one point, or several of which one is enough
Points = Annotated[list[str], BeforeValidator(lambda found: [found] if isinstance(found, str) else found)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Percent = Annotated[Finite, Field(ge=0, le=100)]
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True)


class Published(_Part):
    """Figures from a paper, in %: `values` by the points of an axis (or the corruptions, ...) `over`, at cells `at`."""

    at: Labels = {}
    over: str
    values: dict[str, Percent]
    flag: Literal["sound", "doubtful", "copied", "invalid"] = "sound"
    note: str = ""


class Claim(_Part):
    """A paper's claim: wherever all other axes agree, the cells `better` are above those `than`.

    Attributes
    ----------
    by : float
        At least so many points above; below 0, at most so many under it ("as good as"). At 0, above it at all.
    """

    text: str
    better: Labels
    than: Labels
    by: Finite = 0.0


class Quick(_Part):
    """What ``--quick`` changes: `seeds`, and any key of the run config that no axis varies."""

    model_config = ConfigDict(extra="allow")

    seeds: Seeds | None = None

    def config(self) -> Table:
        """Return the run config among it."""
        return dict(self.model_extra or {})


class Spec(_Part):
    """A benchmark.

    Attributes
    ----------
    name, title, source : str
        For file names; for people; and which table or figure of which paper it repeats.
    score, metric : str
        The score and the metric of it that the published figures are.
    rows, columns : tuple of str
        Axes that make the rows and the columns of the main table; together all axes.
    seeds : tuple of int
        Every point of the grid is run with each.
    config : dict
        Run config of all cells.
    axes : dict
        Axis -> point -> run config of the point. A later axis goes before an earlier one.
    skip : tuple of dict
        Combinations of points that are not run.
    quick : Quick
        Run config, and `seeds`, that ``--quick`` puts in place of the full ones.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    title: str
    source: str = ""
    score: str = "post"
    metric: Literal["micro", "macro", "macro_all_classes", "mean_clients"] = "micro"
    rows: list[str]
    columns: list[str]
    seeds: Seeds
    config: Table = {}
    axes: dict[str, dict[str, Table]]
    skip: list[dict[str, Points]] = []
    published: list[Published] = []
    claims: list[Claim] = []
    quick: Quick = Quick()

    @property
    def two_heads(self) -> bool:
        """Whether a global and a personal head are combined (``task = "tgfl"``)."""
        return self.config.get("task") == "tgfl"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.score not in SCORES:
            raise ConfigError(f"score = {self.score!r}: unknown; allowed: {', '.join(SCORES)}")
        if sorted(self.rows + self.columns) != sorted(self.axes):
            raise ConfigError(
                f"rows = {self.rows}, columns = {self.columns}: allowed: all axes, each once: {', '.join(self.axes)}"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds = {self.seeds}: allowed: each once")
        for axis, points in self.axes.items():
            if axis in RUN_COLUMNS:
                raise ConfigError(f"axes.{axis}: a column of tables/runs.csv has that name; give it another one")
            for name in (axis, *points):
                if not NAME.fullmatch(name):
                    raise ConfigError(f"axes.{axis}: {name!r}: allowed: {NAME_WORDS}")
            if not points:
                raise ConfigError(f"axes.{axis}: no point; name one at least")
        for place, labels in self._labelled():
            for axis, point in labels.items():
                for one in [point] if isinstance(point, str) else point:
                    if one not in self.axes.get(axis, {}):
                        allowed = self.axes.get(axis) or self.axes
                        raise ConfigError(f"{place}: {axis} = {one!r}: unknown; allowed: {', '.join(allowed)}")
        for claim in self.claims:
            if claim.better | claim.than == claim.than | claim.better:  # what only one side names holds for both
                raise ConfigError(
                    f"claims: {claim.text!r}: better = {claim.better} and than = {claim.than} are the same cells; name "
                    "another point of an axis in each"
                )
        corrupted = self._corruptions()
        for entry in self.published:
            if entry.over in entry.at:
                raise ConfigError(f"published: over = {entry.over!r}: `at` names a point of it; name one or the other")
            unknown = sorted(set(entry.values) - set(corrupted))
            within = entry.over == "corruption" and "corruption" not in self.axes
            if within and not self.two_heads and corrupted and unknown:
                raise ConfigError(f"published: {unknown[0]!r}: allowed over corruption: {', '.join(corrupted)}")
            if entry.over not in (*self.axes, *WITHIN):
                raise ConfigError(f"published: over = {entry.over!r}: allowed: {', '.join((*self.axes, *WITHIN))}")
            if unknown := sorted(set(entry.values) - set(self.axes.get(entry.over, entry.values))):
                raise ConfigError(
                    f"published: {unknown[0]!r} is no point of axes.{entry.over}; allowed: "
                    f"{', '.join(self.axes[entry.over])}"
                )
        return self

    def skips(self, labels: Mapping[str, str]) -> bool:
        """Return whether a combination of points is one that is not run."""
        return any(all(labels[axis] in points for axis, points in entry.items()) for entry in self.skip)

    def _corruptions(self) -> list[str]:
        """Return all that `config` and the points name; nothing if `config` leaves it open."""
        points = (keys for table in self.axes.values() for keys in table.values())
        named = [names_in(str(table.get("corruptions", ""))) for table in (self.config, *points)]
        return list(dict.fromkeys(name for names in named for name in names)) if named[0] else []

    def _labelled(self) -> Iterator[tuple[str, Mapping[str, str | list[str]]]]:
        yield from (("skip", entry) for entry in self.skip)
        yield from (("published.at", entry.at) for entry in self.published)
        for claim in self.claims:
            yield from (("claims.better", claim.better), ("claims.than", claim.than))


@dataclass(frozen=True)
class Cell:
    """One run of a benchmark.

    Attributes
    ----------
    id : str
        Its points and its seed; the name of its run directory.
    labels : dict of str to str
        Axis -> point.
    config : dict
        Its run config, flat, complete but for where it writes.
    """

    id: str
    labels: Labels
    seed: int
    config: dict[str, Scalar]


def read_spec(path: Path) -> tuple[Spec, Table]:
    """Read a spec; return it, and the TOML it was made of.

    Raises
    ------
    ConfigError
        One line that names what is wrong in it.
    """
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `fedtta list benchmarks` names those that ship") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no TOML: {error}") from None
    return make_spec(table, str(path)), table


def make_spec(table: Table, where: str) -> Spec:
    """Make a spec of its TOML; `where` it comes from is for the error."""
    try:
        return Spec.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_one_line(error)}; docs/benchmarks.md explains the file") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _one_line(error: ValidationError) -> str:
    """Return the first fault: key, what was found, what is allowed."""
    fault = error.errors()[0]
    parts = [str(part) for part in fault["loc"]]
    key, found = ".".join(parts), reprlib.repr(fault["input"])
    if fault["type"] == "extra_forbidden":
        inner: dict[str, type[_Part]] = {"published": Published, "claims": Claim}
        part = inner.get(parts[0], Spec) if len(parts) > 1 else Spec
        return f"{key}: unknown key; allowed: {', '.join(part.model_fields)}"
    if fault["type"] == "missing":
        return f"{key}: missing; add {parts[-1]} = ..."
    return f"{key} = {found}: allowed: {ALLOWED.get(fault['type'], fault['msg'].replace('Input should be ', ''))}"


def cells(spec: Spec, overrides: Mapping[str, Scalar], *, quick: bool = False) -> tuple[Cell, ...]:
    """Return the cells of a benchmark, seed after seed, so that a part of them already says something.

    Parameters
    ----------
    overrides : mapping
        Run config that goes before all that the spec says: where the data are, another network.

    Raises
    ------
    ConfigError
        If a cell's run config is not allowed, names code of the user's own that cannot be imported, two cells have the
        same name, or `overrides` (or ``--quick``) set a key that an axis varies.
    """
    last = (_flat(spec.quick.config()) if quick else {}) | dict(overrides)  # goes before all that the spec says else
    for axis, table in spec.axes.items():
        for point, keys in table.items():
            for key in sorted(last.keys() & _flat(keys).keys()):  # the table would still call it by the point
                raise ConfigError(
                    f"{spec.name}: {'--run-config' if key in overrides else 'quick'}: {key} = {last[key]!r}: the axis "
                    f"{axis} varies it, at {point}; leave it out (`--only {axis}=POINT` takes some of its points, a "
                    "copy of the file can have others)"
                )
    seeds = (quick and spec.quick.seeds) or spec.seeds
    made: dict[str, Cell] = {}
    for seed, points in itertools.product(seeds, itertools.product(*(axis.items() for axis in spec.axes.values()))):
        labels = dict(zip(spec.axes, (name for name, _ in points), strict=True))
        if spec.skips(labels):
            continue
        config = _flat(spec.config)
        for _, table in points:
            config |= _flat(table)
        config |= last
        if "seed" in config:
            raise ConfigError(f"{spec.name}: seed = {config['seed']}: its `seeds` say that; `--only seed=N` takes one")
        if taken := sorted(config.keys() & {"output-dir", "resume"}):
            raise ConfigError(
                f"{spec.name}: {taken[0]}: every run has a directory in that of the benchmark; leave it out"
            )
        config["seed"] = seed
        name = ".".join((*(point.replace(" ", "-") for point in labels.values()), f"seed{seed}"))
        if len(name) > LONGEST:
            raise ConfigError(
                f"{spec.name}: a cell would be called {name[:40]}... ({len(name)} characters, at most {LONGEST}); give "
                f"its points shorter names"
            )
        if name in made:
            raise ConfigError(f"{spec.name}: two cells are called {name}; give their points other names")
        try:
            complete = RunConfig.from_flat(config).to_flat()
            check_plugins(complete)
        except ConfigError as error:
            raise ConfigError(f"{spec.name}, cell {name}: {error}") from None
        if spec.score not in str(complete["scores"]).split(","):
            raise ConfigError(
                f"{spec.name}, cell {name}: score = {spec.score!r} is not among its scores = {complete['scores']!r}; "
                "add it there, or name another score"
            )
        made[name] = Cell(name, labels, seed, complete)
    if not made:
        raise ConfigError(f"{spec.name}: skip leaves no cell; take something out of it")
    try:  # also where it is not wanted now
        RunConfig.from_flat(next(iter(made.values())).config | _flat(spec.quick.config()) | dict(overrides))
    except ConfigError as error:
        raise ConfigError(f"{spec.name}, quick: {error}") from None
    return tuple(made.values())


def _flat(table: Mapping[str, Any]) -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": v for inner, v in value.items()}
        else:
            flat[key] = value
    return flat
