"""The report of a run or a benchmark: one page, its figures, and its tables as Markdown, CSV and LaTeX."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.files import write_atomically
from fedtta_flwr.reports.figures import Figure, bench_figures, group_name, run_figures
from fedtta_flwr.reports.layout import rows_and_columns, title
from fedtta_flwr.reports.of_bench import bench_tables
from fedtta_flwr.reports.of_run import run_tables
from fedtta_flwr.reports.page import Matrices, Section, page
from fedtta_flwr.reports.read import BenchOf, Run, is_bench, read_bench, read_run
from fedtta_flwr.reports.tables import Table

MOST_MATRICES = 12  # on one page
MOST_GROUPS = 12  # named one by one
MATRICES_NOTE = (
    "Row i of W is what client i receives: dark is little, yellow the largest weight of that round. Clients stand in "
    "the order of their groups, each of which sees the same corruption at a time. In a benchmark, W of the first seed "
    f"of each method that chooses, and of {MOST_MATRICES} at most."
)


def write_report(path: Path, output: Path) -> tuple[Path, list[str]]:
    """Write the report of a run or benchmark directory.

    Returns
    -------
    page : Path
        ``report.html``; beside it the figures as PNG, and a folder ``tables``.
    faults : list of str
        What is missing in it, and why.

    Raises
    ------
    ConfigError
        If the directory holds neither, or `output` cannot be written.
    """
    source = read_bench(path) if is_bench(path) else read_run(path)
    tables = bench_tables(source) if isinstance(source, BenchOf) else run_tables(source)
    faults: list[str] = []
    figures: list[Figure] = []
    try:
        figures = bench_figures(source) if isinstance(source, BenchOf) else run_figures(source)
    except ConfigError as error:  # no matplotlib: all the rest is as good
        faults.append(str(error))
    if isinstance(source, BenchOf):
        faults += [f"{cell.id}: {cell.fault}" for cell in source.cells if cell.fault]
        heading, facts, matrices = source.spec.title, _bench_facts(source), _bench_matrices(source)
    else:
        faults += source.faults
        heading, facts, matrices = f"Run {source.path.name}", _run_facts(source), _run_matrices(source, "W")
    sections = _sections(tables, figures, matrices, faults)
    try:
        (output / "tables").mkdir(parents=True, exist_ok=True)
        for table in tables:
            _write(output / "tables" / f"{table.name}.md", table.markdown())
            _write(output / "tables" / f"{table.name}.csv", table.csv())
            _write(output / "tables" / f"{table.name}.tex", table.latex())
        for figure in figures:
            write_atomically(output / f"{figure.name}.png", lambda file, png=figure.light: file.write(png))  # type: ignore[misc]
            write_atomically(output / f"{figure.name}-dark.png", lambda file, png=figure.dark: file.write(png))  # type: ignore[misc]
        _write(output / "report.html", page(heading, facts, sections))
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror}") from None
    return output / "report.html", faults


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def _sections(
    tables: Sequence[Table], figures: Sequence[Figure], matrices: Sequence[Matrices], faults: Sequence[str]
) -> list[Section]:
    by_name = {table.name: table for table in tables}
    first = [by_name.pop(name) for name in ("main", "accuracy", "claims") if name in by_name]
    costs, structure = (by_name.pop(name, None) for name in ("costs", "collaboration"))
    bars = [figure for figure in figures if figure.name.startswith("bars")]
    times = [figure for figure in figures if not figure.name.startswith("bars")]
    return [
        Section("Results", [*first[:1], *bars, *first[1:]]),
        Section(
            "Over time",
            times,
            "Dotted lines mark the shifts; below, what each group of clients, who see the same corruption, saw when."
            if times
            else "",
        ),
        Section("Collaboration", [*([structure] if structure else []), *matrices], MATRICES_NOTE if matrices else ""),
        Section("Costs", [costs] if costs else []),
        Section("More tables", list(by_name.values()), folded=True),
        Section("Not in this report", text="; ".join(faults) if faults else "", parts=[]),
    ]


def _run_facts(run: Run) -> list[tuple[str, str]]:
    c, left_out = run.config, run.summary.get("screened") or {}
    versions = ", ".join(f"{name} {version}" for name, version in run.about.get("versions", {}).items())
    return [
        ("method", f"{c['strategy']} × {c['adapter']}"),  # noqa: RUF001
        ("data", f"{c['dataset']}, model {c['model']}, {c['num-clients']} clients, batches of {c['batch-size']}"),
        ("rounds", f"{run.summary['rounds']} of {run.about['rounds']}, seed {c['seed']}"),
        ("groups", _groups(run)),
        ("left out", "; ".join(f"{client} in {n} rounds" for client, n in left_out.items()) or "nobody, ever"),
        ("started", str(run.about.get("started", ""))),
        ("code", f"{run.about.get('code', '')}; {versions}"),
    ]


def _groups(run: Run) -> str:
    """Return who sees the same corruption at a time; many clients are counted."""
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
        ("code", ", ".join(codes) + "; " + ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("machine", f"{about.get('machine', '')}, started {about.get('started', '')}"),
    ]


def _run_matrices(run: Run, heading: str) -> list[Matrices]:
    """Return W over the rounds with the clients group by group; none where there is no choice to show."""
    found = run.collaboration()
    if found is None or not len(found["rounds"]) or found["weights"].shape[1] < 2:
        return []
    order = np.array(list(itertools.chain.from_iterable(run.groups())))
    return [Matrices(heading, found["rounds"], found["weights"][:, order][:, :, order])]


def _bench_matrices(bench: BenchOf) -> list[Matrices]:
    rows, columns = rows_and_columns(bench)
    made: list[Matrices] = []
    for column, row in itertools.product(columns, rows):
        for run in bench.runs(row | column)[:1]:
            heading = f"W, {title(column)} {title(row)}, seed {run.config['seed']}"
            # Of a method whose W never changes and never chooses there is nothing to see.
            made += [m for m in _run_matrices(run, heading) if float(np.ptp(m.weights, axis=0).max()) > 1e-6]
    return made[:MOST_MATRICES]
