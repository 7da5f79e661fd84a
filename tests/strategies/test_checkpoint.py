"""A killed run that resumes ends as one that was never killed, for every strategy and kinds of adapters."""

import errno
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from torch import Tensor

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import CheckpointError, ConfigError
from fedtta_flwr.files import read_tensors, write_tensors
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.records import INFO
from fedtta_flwr.registry import STRATEGIES
from fedtta_flwr.server import federation
from fedtta_flwr.strategies.checkpoint import FILE, personal
from fedtta_flwr.strategies.fedavg import FedAvg
from fedtta_flwr.strategies.rounds import Round
from fedtta_flwr.strategies.updates import State, Updates
from tests.conftest import TINY

CLIENTS = [f"client-0{k}" for k in range(4)]


class Killed(BaseException):
    """What nothing in the run may catch."""


class KilledAfter:
    """An observer that ends the run after a round, before its checkpoint."""

    def __init__(self, round_: int) -> None:
        self.round = round_

    def on_start(self, config: RunConfig, clients: tuple[str, ...], rounds: int) -> None: ...

    def on_round(self, round_: Round) -> None:
        if round_.number == self.round:
            raise Killed

    def on_end(self) -> None: ...


class Leaving(LocalGrid):
    """Some of its nodes may be away, and what a client answers in one round may be lost."""

    away: frozenset[int] = frozenset()
    lost: tuple[str, int] = ("", 0)

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if node not in self.away]

    def _answer(self, message: Message) -> Message:
        answer = super()._answer(message)
        info = message.content.config_records.get(INFO, {})
        if self.lost[0] in info.get("clients", ()) and self.lost[1] == info.get("round"):  # type: ignore[operator]
            return Message(Error(ErrorCode.UNKNOWN, "lost"), reply_to=message)
        return answer


class AwayIn:
    """An observer that takes a grid's last node away for one round."""

    def __init__(self, grid: Leaving, round_: int) -> None:
        self.grid, self.round = grid, round_

    def on_start(self, config: RunConfig, clients: tuple[str, ...], rounds: int) -> None: ...

    def on_round(self, round_: Round) -> None:
        goes = round_.number + 1 == self.round
        self.grid.away = frozenset(list(self.grid.get_node_ids())[-1:]) if goes else frozenset()

    def on_end(self) -> None: ...


@pytest.fixture
def start(apps: tuple[Any, Any], tmp_path: Path) -> Callable[..., Path]:
    """Run a tiny federation in a fresh grid, whose clients remember nothing but what is on disk."""

    def run(
        name: str, killed_after: int = 0, nodes: int = 2, away_in: int = 0, lost_in: int = 0, **overrides: Any
    ) -> Path:
        path = tmp_path / name
        flat = TINY | {"state-dir": str(tmp_path / "states"), "checkpoint-every": 2} | overrides
        if "resume" not in overrides:
            flat["output-dir"] = str(path)
        grid = Leaving(apps[1], RunConfig.from_flat(flat).to_flat(), nodes)
        grid.lost = "client-01", lost_in
        try:
            with federation(flat) as strategy:
                strategy.observers.append(AwayIn(grid, away_in))
                if killed_after:
                    strategy.observers.append(KilledAfter(killed_after))
                strategy.start(grid)
        except Killed:
            # A power cut leaves no summary, and perhaps half a line.
            (path / "summary.json").unlink()
            with (path / "rounds.jsonl").open("a") as file:
                file.write('{"round": ')
        return path

    return run


def result(path: Path) -> dict[str, Any]:
    """What a run found, without when, and how long it took."""
    summary = json.loads((path / "summary.json").read_text())
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["time"]
    with np.load(path / "collaboration.npz") as file:
        found = {key: file[key].tolist() for key in ("weights", "rounds")}
    return found | {"lines": lines} | {key: summary[key] for key in ("accuracy", "finished", "bytes", "screened")}


@pytest.mark.parametrize("killed_after", [2, 3, 4])
@pytest.mark.parametrize("adapter", ["bn-stats", "cotta"])
def test_the_result_is_that_of_an_undisturbed_run(start: Callable[..., Path], adapter: str, killed_after: int) -> None:
    changed = {"adapter": adapter, "cotta.augmentations": 2, "checkpoint-every": 1}
    whole = start("whole", **changed)
    broken = start("broken", killed_after, **changed)
    start("broken", resume=str(broken), **changed)
    assert result(broken) == result(whole)
    assert result(broken)["finished"] is True
    assert len(json.loads((broken / "config.json").read_text())["resumed"]) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_resumes(start: Callable[..., Path], strategy: str) -> None:
    changed = {"strategy": strategy, "adapter": "tent"}
    whole = start("whole", **changed)
    broken = start("broken", 3, **changed)
    start("broken", resume=str(broken), **changed)
    assert result(broken) == result(whole)


def test_an_answer_that_is_lost_sends_no_client_back(start: Callable[..., Path]) -> None:
    changed = {"adapter": "cotta", "cotta.augmentations": 2, "lost_in": 3}
    whole = start("whole", **changed)
    broken = start("broken", 3, **changed)
    start("broken", resume=str(broken), **changed)
    assert result(broken) == result(whole)


def test_a_run_may_be_killed_again_and_again_and_change_its_nodes(start: Callable[..., Path]) -> None:
    changed = {"adapter": "entropy", "entropy.optimizer": "adam", "checkpoint-every": 1}
    whole = start("whole", **changed)
    broken = start("broken", 2, **changed)
    for after, nodes in ((3, 1), (3, 4), (4, 2), (0, 3)):
        start("broken", after, nodes, resume=str(broken), **changed)
    assert result(broken) == result(whole)


@pytest.mark.parametrize("restarts", [False, True])
def test_who_was_away_at_the_checkpoint_goes_through_no_batch_twice(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    if restarts:  # as in a deployment, where each visit is written
        monkeypatch.setattr("fedtta_flwr.client.ONE_PROCESS", "never")
    changed = {"adapter": "tent", "scores": "local,tta,post"}
    whole = start("whole", away_in=2, **changed)
    broken = start("broken", 3, away_in=2, **changed)
    start("broken", resume=str(broken), **changed)
    assert result(broken) == result(whole)
    assert [line["samples"] for line in result(whole)["lines"]] == [20, 10, 20, 20]


def test_without_a_state_dir_clients_go_on_with_what_the_server_knows(start: Callable[..., Path]) -> None:
    changed = {"adapter": "tent", "state-dir": ""}
    broken = start("broken", 3, **changed)
    start("broken", resume=str(broken), **changed)
    found = result(broken)
    assert found["finished"]
    assert [line["forgot"] for line in found["lines"]] == [[], [], CLIENTS, []]
    assert [line["samples"] for line in found["lines"]] == [20] * 4  # nobody began anew


def test_a_client_without_room_takes_part_and_is_forgotten_only_where_the_run_resumes(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, *content: Any) -> None:
        if path.name.startswith("client-01"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tensors(path, *content)

    monkeypatch.setattr("fedtta_flwr.memory.write_tensors", write)
    whole = result(start("whole", adapter="tent"))
    assert [line["samples"] for line in whole["lines"]] == [20] * 4
    assert whole["screened"] == {}
    broken = start("broken", 3, adapter="tent")
    start("broken", resume=str(broken), adapter="tent")
    found = result(broken)
    assert [line["forgot"] for line in found["lines"]] == [[], [], ["client-01"], []]
    assert [line["samples"] for line in found["lines"]] == [20] * 4


class Momentous(FedAvg):
    """Remembers under two names what it has also sent."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.sent: State = {}

    def personalize(self, updates: Updates) -> State:
        self.sent = {name: (t + self.sent.get(name, t)) / 2 for name, t in super().personalize(updates).items()}
        return self.sent

    def memory(self) -> State:
        return {f"{part}.{name}": t for part in ("last", "first") for name, t in self.sent.items()}

    def load_memory(self, memory: Mapping[str, Tensor]) -> None:
        self.sent = {name.removeprefix("last."): t for name, t in memory.items() if name.startswith("last.")}


def test_what_a_method_remembers_may_be_what_it_has_sent(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", __name__.partition(".")[0])
    changed = {"strategy": f"{__name__}:Momentous"}
    broken = start("broken", 3, **changed)
    start("broken", resume=str(broken), **changed)
    assert result(broken) == result(start("whole", **changed))


def test_a_new_run_of_the_same_config_finds_nothing_of_the_old_one(start: Callable[..., Path]) -> None:
    assert result(start("first", adapter="tent")) == result(start("second", adapter="tent"))


def test_another_config_is_refused(start: Callable[..., Path]) -> None:
    broken = start("broken", 3)
    with pytest.raises(ConfigError, match=r"batch-size = 5, found 4") as caught:
        start("broken", resume=str(broken), **{"batch-size": 4})
    assert "\n" not in str(caught.value)


def test_a_run_without_checkpoint_is_refused(start: Callable[..., Path]) -> None:
    broken = start("broken", 2)
    with pytest.raises(ConfigError, match=rf"holds no {FILE}"):
        start("broken", resume=str(broken))
    with pytest.raises(ConfigError, match="relative"):
        start("broken", resume="broken")


@pytest.mark.parametrize("keep", [0, 7, 300, -1])
def test_a_damaged_checkpoint_is_one_line(start: Callable[..., Path], keep: int) -> None:
    broken = start("broken", 3)
    content = (broken / FILE).read_bytes()
    (broken / FILE).write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match="cannot be read as saved tensors") as caught:
        start("broken", resume=str(broken))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_version_is_one_line(start: Callable[..., Path]) -> None:
    broken = start("broken", 3)
    tensors, about = read_tensors(broken / FILE)
    del about["same"]
    write_tensors(broken / FILE, tensors, about)
    with pytest.raises(CheckpointError, match=r"says nothing of 'same': resume it with the version that wrote it$"):
        start("broken", resume=str(broken))


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "ldawa"])
def test_one_mixture_for_all_is_written_once(start: Callable[..., Path], strategy: str) -> None:
    tensors, about = read_tensors(start("whole", strategy=strategy, adapter="tent") / FILE)
    states = personal(tensors, about)
    assert len([key for key in tensors if key.startswith("personal/")]) == len(states["client-00"]) > 0
    assert list(states) == CLIENTS
    assert all(t is states["client-00"][name] for name, t in states["client-03"].items())


def test_a_checkpoint_holds_no_weights_that_do_not_travel(start: Callable[..., Path]) -> None:
    tensors, about = read_tensors(start("whole") / FILE)
    names = {key.split("/", 2)[2] for key in tensors if key.startswith("personal/")}
    assert names
    assert all(name.endswith(("running_mean", "running_var")) for name in names)
    assert about["clients"] == CLIENTS
    assert about["round"] == 4
