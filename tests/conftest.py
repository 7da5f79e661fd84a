"""What many tests share: one CPU thread, the embedded source model, and tiny federations in this process."""

import importlib.util
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import nn

from fedtta_flwr.config import RunConfig
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.models.checkpoints import load
from fedtta_flwr.models.source import embedded_checkpoint

ROOT = Path(__file__).resolve().parents[1]

#: 4 clients in 2 groups, 2 corruptions of 2 slots of 5 samples each: 4 rounds
TINY: dict[str, Any] = {
    "num-clients": 4,
    "batch-size": 5,
    "corruptions": "contrast,pixelate",
    "slots-per-corruption": 2,
    "shift-length": 2,
    "spatial-heterogeneity": 0.5,
    "fedctta.noise-samples": 4,
    "device": "cpu",
    "threads": 1,
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def resnet8() -> nn.Module:
    """The embedded source model; copy it before you change it."""
    return load(embedded_checkpoint(), architecture="resnet8", classes=10)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What is logged from warnings on."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


class RecordingGrid(LocalGrid):
    """Keeps every message pushed and every reply pulled; may hand the replies over backwards."""

    def __init__(self, *args: Any, backwards: bool = False) -> None:
        super().__init__(*args)
        self.sent: list[Message] = []
        self.replies: list[Message] = []
        self._backwards = backwards

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        if self._backwards:
            replies.reverse()
        self.replies += replies
        return replies

    def host(self, hosting: Sequence[str]) -> None:
        """Let each node name its own clients, as a deployed one does."""
        for context, names in zip(self._contexts.values(), hosting, strict=True):
            context.node_config = {"clients": names}


@dataclass(frozen=True)
class LocalRun:
    """What a run in this process left behind."""

    summary: dict[str, Any]
    path: Path
    sent: list[Message] = field(repr=False)
    replies: list[Message] = field(repr=False)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl."""
        return [json.loads(line) for line in (self.path / "rounds.jsonl").read_text().splitlines()]


def load_root(name: str) -> ModuleType:
    """Import a module of the repository's root."""
    spec = importlib.util.spec_from_file_location(f"root_{name}", ROOT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def apps() -> tuple[Any, Any]:
    """The ServerApp and the ClientApp of the repository's root."""
    return load_root("server_app").app, load_root("client_app").app


@pytest.fixture(scope="session")
def run_local(apps: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LocalRun]:
    """Run a tiny federation: ``run_local(nodes=2, hosting=None, backwards=False, **{"batch-size": 1})``."""

    def run(
        nodes: int = 2, hosting: Sequence[str] | None = None, backwards: bool = False, **overrides: Any
    ) -> LocalRun:
        server_app, client_app = apps
        path = tmp_path_factory.mktemp("runs") / "run"
        config = RunConfig.from_flat(TINY | {"output-dir": str(path)} | overrides)
        grid = RecordingGrid(client_app, config.to_flat(), nodes, backwards=backwards)
        if hosting is not None:
            grid.host(hosting)
        grid.run_server(server_app)
        return LocalRun(json.loads((path / "summary.json").read_text()), path, grid.sent, grid.replies)

    return run


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., RunConfig]:
    """Return the config of a tiny federation with overrides."""
    return lambda **overrides: RunConfig.from_flat(TINY | overrides)
