"""Weights & Biases: offline in the run directory, or online where the user has set it up."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from fedtta_flwr.config import RunConfig
from fedtta_flwr.files import write_json

PROJECT = "fedtta"  # unless WANDB_PROJECT says otherwise
SECONDS = 30.0  # for the service to answer at the start, and for what is left to upload at the end


class WeightsAndBiases:
    """Logs to RUN/wandb without a network, unless WANDB_MODE or WANDB_API_KEY is set; ``wandb sync`` uploads it later.

    It sends numbers and the run config: no code, no state of a repository, nothing that is printed.

    Parameters
    ----------
    folder : Path
        The run directory; its ``wandb.json`` says which run of theirs it is, and up to which round it is whole.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}
        self._run: Any = None

    def begin(self, config: RunConfig) -> None:
        """Start a run, or go on with the one that wandb.json names."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        if config.resume and self._path.exists():
            self._known = json.loads(self._path.read_text())
        else:
            self._known = {"run": uuid4().hex, "round": 0}
            write_json(self._path, self._known)
        chosen = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=self._known["run"],
            name=self._folder.name,
            dir=str(self._folder),
            mode=None if chosen else "offline",
            config=config.to_flat(),
            allow_val_change=True,  # a resumed run is told where it writes anew
            resume="allow" if config.resume else None,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                init_timeout=SECONDS,
                finish_timeout=SECONDS,
            ),
        )

    @property
    def _path(self) -> Path:
        return self._folder / "wandb.json"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a round, unless it was logged before the run was broken off."""
        if step > self._known["round"]:
            self._run.log(dict(numbers), step=step)

    def finish(self, step: int, numbers: Mapping[str, float], *, finished: bool) -> None:
        """Set the summary, and end the run with exit code 0 or 1."""
        # Only now: W&B writes every 15 s, and a kill loses what came since; such a run rather repeats rounds.
        write_json(self._path, self._known | {"round": step})
        self._run.summary.update(dict(numbers))
        self._run.finish(exit_code=0 if finished else 1)
