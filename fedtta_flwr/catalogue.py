"""What a run config can name, in words: for ``fedtta list``."""

import json
from pathlib import Path

from fedtta_flwr.config import RunConfig, describe_keys
from fedtta_flwr.launch import app_root
from fedtta_flwr.registry import ADAPTERS, HEADS, STRATEGIES


def catalogue() -> dict[str, list[tuple[str, str]]]:
    """Return (name, explanation) of everything that a run config can name, by kind."""
    from fedtta_flwr.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS
    from fedtta_flwr.data.datasets import DATASETS
    from fedtta_flwr.models import MODELS

    return {
        "strategies": [(name, text) for name, (_, text) in STRATEGIES.items()],
        "adapters": [(name, method.text) for name, method in ADAPTERS.items()],
        "heads": [(name, text) for name, (_, text) in HEADS.items()],
        "datasets": list(DATASETS.items()),
        "corruptions": [
            ("none", "clean images"),
            *((name, "") for name in CORRUPTIONS),
            *((name, "beyond the papers' fifteen") for name in EXTRA_CORRUPTIONS),
        ],
        "models": [
            *MODELS.items(),
            ("robustbench:ID", "a network of the RobustBench zoo, e.g. robustbench:Standard"),
            ("MODULE:FUNCTION", "a network of your own package (docs/data.md)"),
        ],
        "configs": _files("configs"),
        "presets": _files("configs/presets"),
        "benchmarks": _files("configs/bench"),
        "keys": [(key, f"{text} [{json.dumps(default)}]") for key, default, text in describe_keys()],
    }


def describe_adapter(name: str) -> dict[str, str]:
    """Return what is to be known of an adapter: title -> text; the options as a run config would name them."""
    method, options = ADAPTERS[name], RunConfig().options(name).model_dump(by_alias=True)
    return {
        "paper": method.paper,
        "updates": method.updates,
        "uploads": method.uploads,
        "keeps": method.keeps,
        "predicts": method.predicts,
        "options": ", ".join(f"{name}.{key} = {json.dumps(default)}" for key, default in options.items()) or "none",
    }


def _files(folder: str) -> list[tuple[str, str]]:
    """Return the config files in a folder of the app, and what they say they are."""
    return [(str(path), _headline(path)) for path in sorted((app_root() / folder).glob("*.toml"))]


def _headline(path: Path) -> str:
    """Return what a config file's comment says after the command that runs it."""
    comments = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    return comments[1] if len(comments) > 1 else ""
