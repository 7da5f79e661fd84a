"""What tests of reports share."""

import csv
from pathlib import Path


def table(folder: Path, name: str) -> list[dict[str, str]]:
    """Return a table of a report by its CSV, a dict a row."""
    with (folder / "tables" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))
