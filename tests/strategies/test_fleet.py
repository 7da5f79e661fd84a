"""Clients that leave, join late, and return under another node id; and rounds with too few of them."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import FederationError
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.server import federation
from tests.conftest import TINY

ALL = ("client-00", "client-01", "client-02", "client-03")


class Fleet(LocalGrid):
    """One node a client; `away` says which clients are switched off in which round. A node that returns is new.

    Parameters
    ----------
    away : mapping of int to str
        Round -> the last digits of the clients that are off. Round 0 is the time of joining and round 1.
    """

    def __init__(self, app: Any, config: RunConfig, away: Mapping[int, str]) -> None:
        super().__init__(app, config.to_flat(), 1)
        self._flat = config.to_flat()
        self._contexts = {}
        self._away = away
        self._next = 100
        self._on: dict[str, int] = {}
        self.round = 0
        self.served: list[tuple[int, str, int]] = []

    def get_node_ids(self) -> Iterable[int]:
        for client in ALL:
            is_on = client[-1] not in self._away.get(self.round, "")
            if is_on and client not in self._on:
                self._next += 1
                self._on[client] = self._next
                self._contexts[self._next] = Context(
                    self._run_id, self._next, {"clients": client}, RecordDict(), dict(self._flat)
                )
            elif not is_on and client in self._on:
                del self._contexts[self._on.pop(client)]
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            if "visit" in message.content.config_records:
                info = message.content.config_records["visit"]
                self.served.append((int(info["round"]), next(iter(info["clients"])), message.metadata.dst_node_id))
                self.round = int(info["round"]) + 1  # it is the next one that they are looked for in
        return super().push_messages(messages)


@pytest.fixture
def run(apps: tuple[Any, Any], tmp_path: Path) -> Callable[..., tuple[list[dict[str, Any]], np.ndarray, Fleet]]:
    def start(away: Mapping[int, str], **overrides: Any) -> tuple[list[dict[str, Any]], np.ndarray, Fleet]:
        flat = TINY | {"output-dir": str(tmp_path / "run"), "strategy": "fedavg", "join-timeout": 0.1} | overrides
        fleet = Fleet(apps[1], RunConfig.from_flat(flat), away)
        with federation(flat) as strategy:
            strategy.start(fleet)
        lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
        with np.load(tmp_path / "run" / "collaboration.npz") as file:
            return lines, file["weights"], fleet

    return start


def test_a_client_leaves_and_returns_as_another_node(run: Any, tmp_path: Path) -> None:
    lines, weights, fleet = run({2: "1", 3: "1"}, **{"state-dir": str(tmp_path / "states"), "adapter": "tent"})
    assert [line["clients"] for line in lines] == [4, 3, 3, 4]
    assert lines[1]["screened"] == lines[2]["screened"] == {"client-01": "its node 102 is not connected"}
    assert [line["forgot"] for line in lines] == [[], [], [], []]  # it found its own state on its disk
    assert np.count_nonzero(weights[1]) == 9
    assert np.count_nonzero(weights[3]) == 16
    nodes = [node for _, client, node in fleet.served if client == "client-01"]
    assert len(set(nodes)) == 2
    assert sum(line["samples"] for line in lines) == 20 + 15 + 15 + 20


def test_who_returns_is_named_once(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr")
    run({0: "3", 2: "012", 3: "1"}, quorum=1)
    said = [record.getMessage() for record in caplog.records if "take part" in record.getMessage()]
    assert said == [
        "round 2: take part from now on: client-03",
        "round 3: take part again: client-00, client-02",
        "round 4: take part again: client-01",
    ]


def test_without_a_disk_it_goes_on_where_the_others_are(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    lines, _, _ = run({2: "1"}, adapter="tent")
    assert "round 3: what they had kept at home is lost: client-01" in caplog.text
    assert [line["clients"] for line in lines] == [4, 3, 4, 4]
    assert lines[2]["forgot"] == ["client-01"]
    assert [line["samples"] for line in lines] == [20, 15, 20, 20]


def test_a_client_may_join_late_where_a_quorum_allows_it(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr")
    lines, _, _ = run({0: "3"}, quorum=3)
    assert "round 2: take part from now on: client-03" in caplog.text
    assert "kept at home" not in caplog.text
    assert [line["clients"] for line in lines] == [3, 4, 4, 4]
    assert lines[1]["forgot"] == ["client-03"]


def test_all_must_be_there_at_the_start_unless_told_otherwise(run: Any) -> None:
    with pytest.raises(FederationError, match="1 of 4 clients did not join"):
        run({0: "3"})
    with pytest.raises(FederationError, match="2 of 4 clients did not join"):
        run({0: "13"}, quorum=3)


def test_below_the_quorum_everybody_keeps_its_own(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    lines, weights, _ = run({2: "12"}, quorum=3, scores="tta,post,local")
    assert [line["clients"] for line in lines] == [4, 2, 4, 4]
    assert len(weights) == 3  # no matrix in the second round
    assert "round 2 mixes nothing: 2 clients took part, quorum = 3" in caplog.text
    assert lines[1]["accuracy"]["post"] == lines[1]["accuracy"]["local"]
    assert lines[0]["accuracy"]["post"] != lines[0]["accuracy"]["local"]


class HttpGrid(Fleet):
    """By its name one whose nodes may be out of reach: in these rounds no message arrives."""

    silent: tuple[int, ...] = ()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        visits = [m.content.config_records["visit"] for m in messages if "visit" in m.content]
        if not visits or visits[0]["round"] not in self.silent:
            return super().push_messages(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"lost-{message.metadata.dst_node_id}"
        return [message.metadata.message_id for message in messages]


def test_an_outage_of_all_at_once_ends_nothing(apps: tuple[Any, Any], tmp_path: Path, caplog: Any) -> None:
    def start(name: str, silent: tuple[int, ...]) -> list[dict[str, Any]]:
        flat = TINY | {"output-dir": str(tmp_path / name), "strategy": "fedavg", "round-timeout": 1.0}
        grid = HttpGrid(apps[1], RunConfig.from_flat(flat), {})
        grid.silent = silent
        with federation(flat) as strategy:
            strategy.start(grid)
        return [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]

    lines = start("run", (2, 3, 5))  # the closing exchange, too
    assert [line["clients"] for line in lines] == [4, 0, 0, 4]
    assert lines[1]["screened"] == dict.fromkeys(ALL, "no reply in time")
    assert caplog.text.count("no client could be reached; nothing is mixed") == 3
    assert [line["samples"] for line in lines] == [20, 0, 0, 20]  # they go on where they were
    everybody = "client-00, client-01, client-02 and 1 more: no reply in time"
    caplog.clear()
    with pytest.raises(FederationError, match=f"^round 1: no client could take part; {everybody}$"):
        start("never", (1,))
    assert "goes on without" not in caplog.text  # it does not
    with pytest.raises(FederationError, match=f"^round 4: no client could take part; {everybody}$"):
        start("gone", (2, 3, 4))


def test_an_empty_house_is_waited_for_and_then_reported(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtta_flwr.strategies.base.LONGEST_OUTAGE", 0.2)
    with pytest.raises(FederationError, match="no node has been connected for"):
        run({2: "0123"}, **{"round-timeout": 0.2})


def test_at_the_end_nobody_is_waited_for_of_whom_nothing_is_wanted(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtta_flwr.strategies.base.LONGEST_OUTAGE", 0.2)
    lines, _, _ = run({5: "0123"}, scores="tta", **{"round-timeout": 0.2})
    assert [line["clients"] for line in lines] == [4, 4, 4, 4]


def test_a_node_of_many_clients_that_fails_is_one_line(
    apps: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def app(message: Message, context: Context) -> Message:
        info = message.content.config_records.get("visit", {})
        if context.node_config["partition-id"] == 1 and info.get("round") == 2:
            raise OSError("no camera")
        return apps[1](message, context)

    flat = RunConfig.from_flat(TINY | {"output-dir": str(tmp_path / "run"), "num-clients": 10}).to_flat()
    with federation(flat) as strategy:
        strategy.start(LocalGrid(app, flat, 2))  # type: ignore[arg-type]
    said = [record.getMessage() for record in caplog.records if "without" in record.getMessage()]
    assert said == ["round 2 goes on without client-01, client-03, client-05 and 2 more: OSError: no camera (code 2)"]
