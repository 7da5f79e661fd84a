"""Figures: colours, and what is left when something cannot be drawn."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedtta_flwr.reports import figures
from fedtta_flwr.reports.figures import run_figures
from fedtta_flwr.reports.read import read_run


def test_twenty_colours_differ() -> None:
    assert len({tuple(figures._colour(i)) for i in range(20)}) == 20


def test_groups_that_cannot_be_drawn(run_local: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    """A group that was never there has no curve; very many groups are drawn as one."""
    path = Path(shutil.copytree(run_local(scores="post").path, tmp_path / "run"))
    with np.load(path / "timeline.npz") as file:
        arrays = dict(file)
    arrays["domain"][:, 0] = -1
    for key in ("seen", "correct"):
        arrays[key][:, :, 0] = 0
    np.savez_compressed(path / "timeline.npz", **arrays)
    run = read_run(path)
    assert len(run.groups()) == 3
    (figure,) = run_figures(run)
    assert figure.text == "Accuracy of client-01, client-02 and 1 more round by round"
    monkeypatch.setattr(figures, "MOST_GROUPS", 2)
    (figure,) = run_figures(run)
    assert figure.text == "Accuracy of all clients round by round"
    assert figure.light.startswith(b"\x89PNG")
    assert figure.light != figure.dark
