"""Weights & Biases, offline: what its files hold."""

import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedtta_flwr.config import RunConfig
from tests.tracking.conftest import Broken, Numbers, accuracies, breaks, expected, without_seconds

wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")

BLOCK, HEADER = 32_768, 7  # of a LevelDB log


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: a LevelDB log after 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(parts)
            parts = b""


def items(updates: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


class Offline:
    """One offline run's file."""

    def __init__(self, file: Path) -> None:
        self.rounds: Numbers = {}
        self.summary: dict[str, float] = {}
        self.exit_code: int | None = None
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.id, self.name, self.project = record.run.run_id, record.run.display_name, record.run.project
                self.config = items(record.run.config.update)
            elif kind == "history":
                found = {k: v for k, v in items(record.history.item).items() if not k.startswith("_")}
                assert record.history.step.num not in self.rounds
                self.rounds[record.history.step.num] = found
            elif kind == "summary":
                self.summary |= items(record.summary.update)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code


def offline(path: Path) -> list[Offline]:
    """The offline runs in a run directory, in their order."""
    wandb.teardown()  # as at the end of a process: what writes the files is another one, which may lag behind
    return [Offline(file) for file in sorted(path.glob("wandb/offline-run-*/*.wandb"), key=os.path.getctime)]


def test_a_run(start: Callable[..., Path]) -> None:
    path = start("run", tracking="wandb")
    (found,) = offline(path)
    assert found.rounds == {step: pytest.approx(numbers) for step, numbers in expected(path).items()}
    summary = {key: value for key, value in found.summary.items() if key.startswith("summary/accuracy")}
    assert summary == pytest.approx(accuracies(path))
    assert found.exit_code == 0
    assert (found.name, found.project) == ("run", "fedtta")
    assert {key: found.config[key] for key in RunConfig().to_flat()} == json.loads((path / "config.json").read_text())[
        "config"
    ]


def test_a_run_that_is_broken_off_and_resumed_is_one_run(start: Callable[..., Path]) -> None:
    whole = start("whole", tracking="wandb")
    with pytest.raises(Broken):
        start("broken", (4, breaks), tracking="wandb")
    broken = whole.with_name("broken")
    (first,) = offline(broken)
    assert first.exit_code == 1
    start("broken", tracking="wandb", resume=str(broken))
    first, second = offline(broken)
    assert first.id == second.id
    assert (list(first.rounds), list(second.rounds)) == ([1, 2, 3], [4])
    assert without_seconds(first.rounds | second.rounds) == without_seconds(offline(whole)[0].rounds)
    assert second.exit_code == 0


def test_its_process_may_die_without_the_run(start: Callable[..., Path], tmp_path: Path, warned: list[str]) -> None:
    def kill() -> None:
        (child,) = (pid for pid in children() if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(child, signal.SIGKILL)

    try:
        path = start("run", (2, kill), tracking="wandb")
    finally:
        with suppress(Exception):  # it cannot reach the dead one; the next test gets one of its own
            wandb.teardown()
    assert list(expected(path)) == [1, 2, 3, 4]
    assert len([line for line in warned if line.startswith("tracking by wandb ends here")]) == 1


def children() -> list[int]:
    """The processes that this one has started."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]
