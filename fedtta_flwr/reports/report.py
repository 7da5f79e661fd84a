"""The report of a run or a benchmark: one page, its figures, and its tables as Markdown, CSV and LaTeX."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedtta_flwr.config import SCORES
from fedtta_flwr.errors import ConfigError, few
from fedtta_flwr.files import write_atomically, write_json
from fedtta_flwr.reports.figures import Figure, accuracy_figures, bench_figures, group_name, run_figures
from fedtta_flwr.reports.heatmap import Matrices
from fedtta_flwr.reports.layout import rows_and_columns, title
from fedtta_flwr.reports.of_bench import bench_tables, runs_table
from fedtta_flwr.reports.of_heads import head_bench_figures, head_figures
from fedtta_flwr.reports.of_run import METRICS, run_tables
from fedtta_flwr.reports.page import Part, Row, Section, page
from fedtta_flwr.reports.read import BenchOf, Run, is_bench, read_bench, read_run
from fedtta_flwr.reports.tables import Table

WRITTEN = "files.json"  # names the others
#: what they are called: a list may come from somebody else, and must not remove anything beyond a report
EARLIER = re.compile(r"tables/[a-z0-9-]+\.(md|csv|tex)|[a-z0-9-]+\.(png|pdf)")
MOST_MATRICES = 12  # on one page
MOST_GROUPS = 12  # named one by one
SAME = 1e-6  # weights that differ by less are the same
TIME_NOTE = (
    "Dotted lines mark the shifts: another corruption begins for some clients. Below each figure stands what each "
    "group of clients saw when; a group are those who see the same corruption at the same time."
)
MATRICES_NOTE = (
    "Row i of W is what client i receives: its weights of all clients' states. In the maps the clients stand group by "
    "group, with white lines between the groups; a pointer or the arrow keys tell a weight and whose it is. The colour "
    "goes with the square root of the weight, on one scale for all rounds of a map. A benchmark has maps of the first "
    f"seed of each method whose W changes from round to round, {MOST_MATRICES} at most."
)


def write_report(path: Path, output: Path) -> tuple[Path, list[str]]:
    """Write the report of a run or benchmark directory.

    Returns
    -------
    page : Path
        ``report.html``; beside it the figures as PNG and PDF, and a folder ``tables``.
    faults : list of str
        What is missing in it, and why.

    Raises
    ------
    ConfigError
        If the directory holds neither, or `output` cannot be written.
    """
    source = read_bench(path) if is_bench(path) else read_run(path)
    try:
        (output / "tables").mkdir(parents=True, exist_ok=True)
        return output / "report.html", _write_all(source, output)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror}") from None


def _write_all(source: Run | BenchOf, output: Path) -> list[str]:
    tables = bench_tables(source) if isinstance(source, BenchOf) else run_tables(source)
    faults, figures = list[str](), list[Figure]()
    try:
        figures = _bench_figures(source) if isinstance(source, BenchOf) else _run_figures(source)
    except ConfigError as error:  # no matplotlib: all the rest is as good
        faults.append(str(error))
    named: list[str] = []  # which a table of the page names already
    if isinstance(source, BenchOf):
        named = [f"{cell.id}: {cell.fault}" for cell in source.cells if cell.fault]
        heading, facts = source.spec.title, _bench_facts(source)
        matrices = list(itertools.islice(_bench_matrices(source), MOST_MATRICES))
    else:
        faults += source.faults
        heading, facts, matrices = f"Run {source.path.name}", _run_facts(source), _run_matrices(source, "W")
    files: dict[Path, bytes] = {}
    for table in tables:
        for ending, text in (("md", table.markdown()), ("csv", table.csv()), ("tex", table.latex())):
            files[output / "tables" / f"{table.name}.{ending}"] = text.encode()
    if isinstance(source, BenchOf):
        files[output / "tables" / "runs.csv"] = runs_table(source).csv().encode()
    for figure in figures:
        endings = ((".png", figure.light), ("-dark.png", figure.dark), (".pdf", figure.vector))
        files |= {output / f"{figure.name}{ending}": content for ending, content in endings}
    _replace_earlier(output, [str(file.relative_to(output)) for file in files])
    files[output / "report.html"] = page(heading, facts, _sections(tables, figures, matrices, faults)).encode()
    for file, content in files.items():
        _write(file, content)
    return faults + named


def _replace_earlier(output: Path, names: Sequence[str]) -> None:
    """Remove what an earlier report has written and this one does not; what else lies there is the user's."""
    try:
        earlier = json.loads((output / WRITTEN).read_text())
    except (OSError, ValueError):
        earlier = []
    for name in earlier if isinstance(earlier, list) else []:
        if name not in names and isinstance(name, str) and EARLIER.fullmatch(name):
            (output / name).unlink(missing_ok=True)
    write_json(output / WRITTEN, names)


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))


def _sections(
    tables: Sequence[Table], figures: Sequence[Figure], matrices: Sequence[Matrices], faults: Sequence[str]
) -> list[Section]:
    by_name = {table.name: table for table in tables}

    def tables_of(*names: str) -> list[Table]:
        return [by_name.pop(name) for name in names if name in by_name]

    def figures_of(*kinds: str) -> list[Figure]:
        return [figure for figure in figures if figure.name.partition("-")[0] in kinds]

    accuracies, costs, missing = figures_of("accuracy"), tables_of("costs"), tables_of("missing")
    results: list[Part] = [*tables_of("main", "accuracy"), *([Row(accuracies)] if accuracies else [])]
    results += [] if results else tables_of("confidence")  # nothing was scored
    results += [*tables_of("claims"), *figures_of("sets", "weights")]
    collaboration: list[Part] = [*tables_of("collaboration"), *figures_of("within", "collaboration")]
    collaboration += [Row(matrices)] if matrices else []
    grids = tables_of(*(f"{score}-{metric.replace('_', '-')}" for score in SCORES for metric in METRICS))
    more: list[Part] = [*([Row(grids)] if grids else []), *by_name.values()]
    return [
        Section("Results", results),
        Section("Over time", figures_of("time"), TIME_NOTE),
        Section("Collaboration", collaboration, MATRICES_NOTE if matrices else ""),
        Section("Costs", costs),
        Section("More tables", more, folded=True),
        Section("Not in this report", missing, items=faults),
    ]


def _bench_figures(bench: BenchOf) -> list[Figure]:
    return accuracy_figures(bench) + (head_bench_figures(bench) if bench.spec.two_heads else bench_figures(bench))


def _run_figures(run: Run) -> list[Figure]:
    """Return the figures of a run: two heads change nothing over time."""
    return head_figures(run) if run.two_heads else run_figures(run)


def _run_facts(run: Run) -> list[tuple[str, str]]:
    c, left_out = run.config, run.summary.get("screened") or {}
    versions = ", ".join(f"{name} {version}" for name, version in run.about.get("versions", {}).items())
    undone = run.summary.get("rolled_back") if "steps" in run.summary else 0  # earlier runs did not count their steps
    clients = [f"{client} {steps}" for client, steps in run.summary.get("undone", {}).items()]
    whose = f": {few(clients)}" if clients else ""  # nor by client
    data = c.get("stream") or c["dataset"]
    befell = (("predict one class", "collapsed"), ("change scaled down", "clipped"))
    facts = [
        ("method", f"two heads, {c.get('head')}" if run.two_heads else f"{c['strategy']} × {c['adapter']}"),  # noqa: RUF001
        ("data", f"{data}, model {c['model']}, {c['num-clients']} clients, batches of {c['batch-size']}"),
        ("rounds", f"{run.summary['rounds']} of {run.about['rounds']}, seed {c['seed']}"),
        *([] if run.two_heads else [("groups", _groups(run))]),
        *([] if run.scores() else [("accuracy", "none: nothing that was scored had labels")]),
        ("left out", "; ".join(f"{client} in {n} rounds" for client, n in left_out.items()) or "nobody, ever"),
        *([("resumed", ", ".join(run.about["resumed"]))] if run.about.get("resumed") else []),
        *([("began anew", forgot)] if (forgot := _forgot(run)) else []),
        *([("undone", f"{undone} of {run.summary['steps']} steps, not finite{whose}")] if undone else []),
        *((name, _in_rounds(run, key)) for name, key in befell if run.summary.get(key)),
        ("machine", f"{run.about.get('machine', 'unknown')}, started {run.about.get('started', '')}"),
        ("code", f"{run.about.get('code', '')}; {versions}"),
    ]
    if (written := len(run.lines)) > run.summary["rounds"]:
        facts.insert(3, ("written", f"rounds.jsonl has {written} rounds; the accuracies and costs here are older"))
    return facts


def _in_rounds(run: Run, key: str) -> str:
    return few([f"{client} in {rounds} rounds" for client, rounds in run.summary[key].items()])


def _forgot(run: Run) -> str:
    """Return who went on without a state of its own, and when."""
    anew = [(client, line["round"]) for line in run.lines for client in line.get("forgot") or ()]
    found = few([f"{client} in round {number}" for client, number in anew])
    return found and f"{found}; new, or without what was kept at home, so that the round before has no post of theirs"


def _groups(run: Run) -> str:
    """Return who sees the same corruption at a time; many clients are counted."""
    if run.timeline is None or not len(run.timeline["rounds"]):
        return "not known"
    groups = run.groups()
    if len(groups) > MOST_GROUPS:
        return f"{len(groups)} of clients that see the same corruption at a time"
    return "; ".join(group_name(run, group) for group in groups)


def _bench_facts(bench: BenchOf) -> list[tuple[str, str]]:
    about, finished = bench.about, sum(cell.run is not None for cell in bench.cells)
    overrides = " ".join(f"{key}={value!r}" for key, value in about.get("overrides", {}).items())
    versions: dict[str, str] = next(
        (cell.run.about.get("versions", {}) for cell in bench.cells if cell.run is not None), {}
    )
    codes = sorted({str(cell.run.about.get("code")) for cell in bench.cells if cell.run is not None})
    return [
        ("repeats", bench.spec.source or "nothing that was published"),
        ("runs", f"{finished} of {len(bench.cells)} finished" + (", --quick" if about.get("quick") else "")),
        ("changed", overrides or "nothing"),
        *(
            [("code", ", ".join(codes) + "; " + ", ".join(f"{name} {version}" for name, version in versions.items()))]
            if codes
            else []
        ),
        ("machine", f"{bench.machines() or 'none so far'}, started {about.get('started', '')}"),
    ]


def _run_matrices(run: Run, heading: str) -> list[Matrices]:
    """Return W over the rounds with the clients group by group; none where there is no choice to show."""
    if run.two_heads:
        return []
    found = run.collaboration()
    if found is None or not len(found["rounds"]) or found["weights"].shape[1] < 2:
        return []
    groups = run.groups()
    order = np.array(list(itertools.chain.from_iterable(groups)))
    within = {line["round"]: (line["collaboration"] or {}).get("within_group") for line in run.lines}
    return [
        Matrices(
            heading,
            found["rounds"],
            found["weights"][:, order][:, :, order],
            [run.clients[i] for i in order],
            [len(group) for group in groups],
            {number: value for number, value in within.items() if value is not None},
        )
    ]


def _bench_matrices(bench: BenchOf) -> Iterator[Matrices]:
    """Give the maps one by one: the files are large, and not all are asked for."""
    rows, columns = rows_and_columns(bench)
    for column, row in itertools.product(columns, rows):
        for run in bench.runs(row | column)[:1]:
            heading = f"{title(column | row)}, seed {run.config['seed']}"
            # Of a method whose W never changes and never chooses there is nothing to see.
            yield from (m for m in _run_matrices(run, heading) if float(np.ptp(m.weights, axis=0).max()) > SAME)
