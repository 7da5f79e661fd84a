"""Who is there: the real client app answers, hosted and configured in all the wrong ways."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.superlink.grid import HttpGrid
from PIL import Image

from fedtta_flwr import client
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import FederationError
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.models import build
from fedtta_flwr.models.checkpoints import save
from fedtta_flwr.models.source import embedded_checkpoint
from fedtta_flwr.server import check_inputs
from fedtta_flwr.strategies import roster as module
from fedtta_flwr.strategies.roster import Roster, gather

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    return client.hello(message, context)


other_code = ClientApp()


@other_code.query("hello")
def other_hello(message: Message, context: Context) -> Message:
    reply = client.hello(message, context)
    if context.node_config["partition-id"] == 1:
        reply.content.config_records["hello"]["code"] = "0123456789abcdef"
    return reply


class HostingGrid(LocalGrid):
    """Nodes that name their own clients, and join one look at a time if asked to."""

    def __init__(self, config: RunConfig, hosting: list[str], one_by_one: bool = False) -> None:
        super().__init__(app, config.to_flat(), len(hosting))
        for context, names in zip(self._contexts.values(), hosting, strict=True):
            context.node_config = {"clients": names}
        self.looks = 0 if one_by_one else len(hosting)
        self.pushed: list[int] = []
        self.away: set[int] = set()
        self.registered: dict[int, str] = {}

    def change(self, node: int, **changed: str) -> None:
        """Change a node's own settings."""
        self._contexts[node].node_config = dict(self._contexts[node].node_config) | changed

    def get_node_ids(self) -> Iterable[int]:
        self.looks += 1
        return [node for node in list(super().get_node_ids())[: self.looks - 1] if node not in self.away]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=self.registered.get(node, "")) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.pushed += [message.metadata.dst_node_id for message in messages]
        return super().push_messages(messages)


class Devices(HostingGrid, HttpGrid):
    """Nodes of a deployment: they may be mended, or leave and come back as others."""


NO_GPU = {"device": "cuda:99"}
EACH = ["client-00", "client-01", "client-02", "client-03"]


@pytest.fixture
def config(tiny_config: Callable[..., RunConfig]) -> RunConfig:
    return tiny_config(**{"join-timeout": 0.1})


def refused(grid: LocalGrid, config: RunConfig, known: Roster | None = None) -> str:
    with pytest.raises(FederationError) as caught:
        gather(grid, config, known)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6])
def test_every_client_is_found_once(config: RunConfig, nodes: int) -> None:
    grid = LocalGrid(app, config.to_flat(), nodes)
    roster = gather(grid, config)
    assert roster.node_of == {f"client-0{k}": list(grid.get_node_ids())[k % nodes] for k in range(4)}
    assert roster.slots == {f"client-0{k}": 4 for k in range(4)}


def test_nodes_may_name_their_clients(config: RunConfig) -> None:
    roster = gather(HostingGrid(config, ["client-03, client-00", "client-01,client-02"]), config)
    assert roster.nodes() == {2: ["client-00", "client-03"], 3: ["client-01", "client-02"]}


def test_a_device_hosts_those_it_is_registered_for(config: RunConfig) -> None:
    grid = HostingGrid(config, ["client-00,client-03", "client-01", "client-02"])
    grid.registered = {2: "client-03,gate,client-00", 3: "client-01"}  # the last one without a name
    assert gather(grid, config).node_of == {"client-00": 2, "client-03": 2, "client-01": 3, "client-02": 4}
    grid.registered[3] = "client-0"
    assert refused(grid, config) == (
        "node 3 says that it hosts client-01, and is registered as client-0: a device hosts the clients whose names it "
        "is registered under; revoke it, and register a new key (fedtta register KEY.pub --name A,B)"
    )


def test_nobody_takes_the_name_of_another_device(config: RunConfig, warned: list[str]) -> None:
    grid = Devices(config, [*EACH, "client-00"])
    grid.registered = dict(zip(grid.get_node_ids(), [*EACH, "spare"], strict=True))
    roster = gather(grid, config)
    first, *_, last = grid.registered
    assert roster.node_of["client-00"] == first
    grid.away = {first}
    roster.refresh(grid, config)
    assert roster.node_of["client-00"] == first  # absent, not replaced
    assert list(roster.refused) == [last]
    (line,) = [line for line in warned if "registered" in line]
    assert line.startswith(
        f"a node takes no part: node {last} says that it hosts client-00, and is registered as spare"
    )


class Flapping(Devices):
    """The last node's answer comes in a moment in which it is not connected."""

    flapped = False

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        last = max(self._contexts)
        held = {i for i in message_ids if i in self._replies and self._replies[i].metadata.src_node_id == last}
        if last not in self.away:
            return super().pull_messages([i for i in message_ids if i not in held])
        self.flapped |= bool(held)
        return super().pull_messages(message_ids)


def test_nor_by_coming_and_going(config: RunConfig) -> None:
    grid = Flapping(config, [*EACH, "client-00"])
    grid.registered = dict(zip(range(2, 7), [*EACH, "spare"], strict=True))
    roster = gather(grid, config)
    grid.away = {6}
    roster.refresh(grid, config)
    assert grid.flapped
    grid.away = set()
    roster.refresh(grid, config)
    assert roster.node_of["client-00"] == 2
    assert 6 not in roster.nodes()


def test_an_answer_cannot_be_made_up(config: RunConfig) -> None:
    """Flower takes a reply from whoever names its message, by a hash of what is in it."""
    asked = []
    for _ in range(2):
        grid = HostingGrid(config, EACH)
        send = grid.push_messages
        grid.push_messages = lambda messages, send=send: asked.extend(messages) or send(messages)  # type: ignore
        Roster().look(grid)
    nonces = {message.content.config_records["nonce"]["nonce"] for message in asked}
    assert len(nonces) == 2
    assert all(len(str(nonce)) == 32 for nonce in nonces)


class SilentGrid(HostingGrid):
    """The first node is listed but never answers; the others are listed from the second look on."""

    def __init__(self, config: RunConfig, hosting: list[str]) -> None:
        super().__init__(config, hosting)
        self.looks = 1

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        silent = next(iter(self._contexts))
        return [r for r in super().pull_messages(message_ids) if r.metadata.src_node_id != silent]


def test_a_silent_node_keeps_nobody_from_joining(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(**{"join-timeout": 5.0})
    grid = SilentGrid(config, ["client-00", "client-00,client-01", "client-02,client-03"])
    began = time.monotonic()
    roster = gather(grid, config)
    assert roster.nodes() == {3: ["client-00", "client-01"], 4: ["client-02", "client-03"]}
    assert time.monotonic() - began < 2


def test_nodes_may_come_one_by_one_and_are_asked_once(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(**{"join-timeout": 10.0})
    grid = HostingGrid(config, [f"client-0{k}" for k in range(4)], one_by_one=True)
    assert sorted(gather(grid, config).node_of) == list(config.client_names())
    assert grid.pushed == [2, 3, 4, 5]


def test_missing_clients_are_named_after_the_join_timeout(config: RunConfig) -> None:
    text = refused(HostingGrid(config, ["client-00", "client-02"]), config)
    assert "2 of 4 clients did not join within 0.1 s" in text
    assert "client-01, client-03" in text
    assert "join-timeout" in text


def test_who_is_waited_for_is_said_after_a_while(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SAID_AFTER", 0.01)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with caplog.at_level(logging.INFO, "flwr"):
        refused(HostingGrid(config, ["client-00", "client-02"]), config)
    said = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert said[0] == "waiting for 2 of 4 clients (2 nodes asked, 0 of them silent): client-01, client-03"


def test_only_some_of_many_missing_clients_are_named(tiny_config: Callable[..., RunConfig]) -> None:
    many = tiny_config(**{"num-clients": 12, "join-timeout": 0.1})
    text = refused(HostingGrid(many, ["client-00"]), many)
    assert "client-01, client-02, client-03 and 8 more" in text
    assert "client-04" not in text


def test_no_node_at_all(config: RunConfig) -> None:
    assert "4 of 4 clients" in refused(HostingGrid(config, []), config)


def test_a_client_on_two_nodes_is_refused(config: RunConfig) -> None:
    text = refused(HostingGrid(config, ["client-00,client-01", "client-01,client-02,client-03"]), config)
    assert "client-01" in text
    assert "2" in text
    assert "3" in text


def test_clients_of_no_run_are_named_when_others_are_missing(config: RunConfig) -> None:
    text = refused(HostingGrid(config, ["client-00,camera-7", "client-01,client-02"]), config)
    assert "1 of 4 clients" in text
    assert "client-03" in text
    assert "not of this run: camera-7" in text


def test_nodes_that_the_run_does_not_need_are_passed_over(config: RunConfig) -> None:
    """Neither their data nor their model is looked at: they may have none."""
    hosting = ["client-00,client-01", "camera-7", "client-02,client-03,camera-8"]
    roster = gather(HostingGrid(config, hosting), config)
    assert roster.nodes() == {2: ["client-00", "client-01"], 4: ["client-02", "client-03"]}
    assert roster.others == {"camera-7", "camera-8"}


def test_other_code_is_refused(config: RunConfig) -> None:
    text = refused(LocalGrid(other_code, config.to_flat(), 2), config)
    assert "node 3" in text
    assert "0123456789abcdef" in text


@pytest.mark.parametrize(
    "override", [{"seed": 1}, {"batch-size": 6}, {"fedctta.temperature": 2.0}, {"strategy": "local"}]
)
def test_another_config_is_refused(
    config: RunConfig, tiny_config: Callable[..., RunConfig], override: dict[str, Any]
) -> None:
    theirs = tiny_config(**{"join-timeout": 0.1} | override)
    text = refused(LocalGrid(app, theirs.to_flat(), 1), config)
    assert theirs.fingerprint() in text
    assert config.fingerprint() in text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"clients": 3}, "clients: "),
        ({"clients": None}, "clients: "),
        ({"slots": None}, "slots: "),
        ({"slots": []}, "2 clients, some twice or with 0 streams"),
        ({"slots": ["a", "b"]}, "slots.0: "),
        ({"slots": [-1, 2]}, "slots.0: "),
        ({"failed": ["client-01"], "failures": ["away"]}, "1 clients that cannot take part, for 1 reasons"),
        ({"failed": ["client-02"]}, "1 clients that cannot take part, for 0 reasons"),
        ({"others": [b"x"]}, "others.0: "),
        ({"plugins": ["my_nets 0123"]}, "has other code of your own than the server (my_nets 0123, expected none)"),
        ({"classes": 1000}, "has data of 1000 classes, expected 10"),
        ({"clients": ["client-01", "nobody"]}, "hosts 'nobody', who is not of this run"),
        ({}, "no record 'hello'"),
        ({"slots": [10**10]}, "slots.0"),
        (
            {"code": "\x1b[2Jall is well\nINFO: done"},
            "runs other code than the server (fedtta_flwr [2Jall is well INFO: done,",
        ),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_node_that_answers_nonsense_stays_outside(
    config: RunConfig, change: dict[str, Any], word: str, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nonsense = ClientApp()

    @nonsense.query("hello")
    def answer(message: Message, context: Context) -> Message:
        reply = client.hello(message, context)
        if context.node_config["partition-id"] == 1:
            record = reply.content.config_records["hello"]
            for key, value in change.items():
                record.pop(key)
                if value is not None:
                    record[key] = value
            if not change:
                del reply.content["hello"]
        return reply

    grid = LocalGrid(nonsense, config.to_flat(), 2)
    if not late:
        assert word in refused(grid, config)
        return
    roster = Roster(node_of={"client-01": 2, "client-00": 2}, present={2}, classes=10)
    roster._ask_at[2] = math.inf
    with caplog.at_level("WARNING", "flwr"):
        roster.refresh(grid, config)
    assert word in caplog.text
    assert set(roster.node_of.values()) == {2}


def test_a_client_that_moves_from_a_node_that_is_still_there_is_named(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    grid = HostingGrid(config, ["client-00,client-01,client-02,client-03", "client-01"])
    grid.looks = 1  # only the first is there
    roster = gather(grid, config)
    with caplog.at_level("WARNING", "flwr"):
        roster.refresh(grid, config)
    assert "client-01 moves from node 2 to node 3 though the first is still connected" in caplog.text
    assert roster.node_of == {"client-00": 2, "client-01": 3, "client-02": 2, "client-03": 2}


def test_another_output_directory_is_no_other_config(config: RunConfig, tiny_config: Callable[..., RunConfig]) -> None:
    theirs = tiny_config(**{"join-timeout": 0.1, "output-dir": "/elsewhere"})
    assert len(gather(LocalGrid(app, theirs.to_flat(), 1), config).node_of) == 4


def test_what_a_node_cannot_serve_is_its_own_line(config: RunConfig) -> None:
    flat = config.to_flat() | {"data-dir": "/no/such/folder"}
    assert "data-dir" in refused(LocalGrid(app, flat, 1), config)


@pytest.mark.parametrize("nodes", [1, 3])
def test_what_a_node_raises_ends_the_run_at_once_where_all_are_there(
    tiny_config: Callable[..., RunConfig], nodes: int
) -> None:
    config = tiny_config(**{"join-timeout": 60.0})
    broken = ClientApp()

    @broken.query("hello")
    def fail(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0:
            raise ZeroDivisionError("boom")
        return client.hello(message, context)

    began = time.monotonic()
    assert refused(LocalGrid(broken, config.to_flat(), nodes), config).startswith("node 2: ZeroDivisionError: boom")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("grid", [HostingGrid, Devices])
def test_a_node_that_cannot_serve_is_named_and_ends_no_run_that_has_a_quorum(
    tiny_config: Callable[..., RunConfig], grid: type[HostingGrid], caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(**{"join-timeout": 1.0, "quorum": 3})
    nodes = grid(config, EACH)
    nodes.change(3, **NO_GPU)
    with caplog.at_level("WARNING", "flwr"):
        roster = gather(nodes, config)
    assert sorted(roster.node_of) == ["client-00", "client-02", "client-03"]
    assert list(roster.refused) == [3]
    assert caplog.text.count("a node takes no part: node 3: device = 'cuda:99'") == 1
    assert "the run begins without 1 of 4 clients: client-01" in caplog.text


def test_the_reason_is_that_of_the_device_where_its_name_is_known(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(**{"join-timeout": 0.1, "quorum": 1})
    grid = Devices(config, EACH[:3])
    grid.registered = {2: "client-00", 3: "gate,client-01"}  # the last one without a name
    grid.change(3, **NO_GPU)
    grid.change(4, **NO_GPU)
    roster = gather(grid, config)
    absent = roster.absent(EACH)
    assert sorted(absent) == EACH[1:]
    assert absent["client-01"] == roster.refused[3]
    assert absent["client-01"].startswith("node 3 (gate,client-01): device = 'cuda:99'")
    assert absent["client-02"] == absent["client-03"] == "it has not joined"
    grid.away = {3}
    roster.refresh(grid, config)
    assert roster.absent(EACH)["client-01"] == "it has not joined"


def test_who_does_not_join_and_why(config: RunConfig) -> None:
    grid = Devices(config, [*EACH, "client-02"])
    grid.change(3, **NO_GPU)
    text = refused(grid, config)
    assert "1 of 4 clients did not join within 0.1 s" in text
    assert "cannot serve the run: node 3: device = 'cuda:99'" in text
    assert "; client-02 is hosted by two nodes, 4 and 6" in text


def test_a_device_is_mended_while_others_are_waited_for(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ASK_AGAIN", 0.01)
    config = tiny_config(**{"join-timeout": 60.0})

    class Mended(Devices):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            self.change(3, device="cpu" if self.pushed.count(3) == 3 else "cuda:99")
            return super().push_messages(messages)

    grid = Mended(config, EACH)
    with caplog.at_level("WARNING", "flwr"):
        roster = gather(grid, config)
    assert roster.nodes() == {node: [name] for node, name in enumerate(EACH, start=2)}
    assert not roster.refused
    assert grid.pushed == [2, 3, 4, 5, 3, 3, 3]
    assert caplog.text.count("takes no part") == 1


@pytest.fixture
def cameras(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> RunConfig:
    """Four cameras that write into folders, of which the third is away."""
    for name in ("client-00", "client-01", "client-03"):
        (tmp_path / name).mkdir()
    live = {"dataset": "live", "classes": 10, "rounds": 2, "checkpoint": str(embedded_checkpoint())}
    return tiny_config(**live, **{"data-dir": str(tmp_path), "join-timeout": 0.1})


def test_a_gateway_serves_its_other_cameras_while_one_is_away(
    cameras: RunConfig, tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cameras.model_copy(update={"quorum": 2})
    monkeypatch.setattr(module, "ASK_AGAIN", 0.01)
    grid = Devices(config, ["client-00,client-01", "client-02,client-03"])
    roster = gather(grid, config)
    assert roster.nodes() == {2: ["client-00", "client-01"], 3: ["client-03"]}
    why = f"node 3 cannot serve client-02: {tmp_path}: no sub-folder client-02"
    assert roster.refused[3].startswith(why)
    assert [line for line in warned if "take no part: " in line] == [
        f"some clients of a node take no part: {roster.refused[3]}"
    ]
    (tmp_path / "client-02").mkdir()
    time.sleep(0.02)
    roster.refresh(grid, config)
    assert roster.nodes() == {2: ["client-00", "client-01"], 3: ["client-02", "client-03"]}
    assert not roster.refused
    assert roster.slots["client-02"] == 2


def test_a_camera_that_is_away_is_named_where_all_are_needed(cameras: RunConfig, tmp_path: Path) -> None:
    why = f"node 2 cannot serve client-02: {tmp_path}: no sub-folder client-02"
    assert refused(HostingGrid(cameras, [",".join(EACH)]), cameras).startswith(why)
    text = refused(Devices(cameras, [",".join(EACH)]), cameras)
    assert text.startswith("1 of 4 clients did not join within 0.1 s")
    assert f"; cannot serve the run: {why}" in text


def test_a_gateway_without_any_of_its_cameras_takes_no_part(cameras: RunConfig) -> None:
    config = cameras.model_copy(update={"data_dir": "/no/such/folder"})
    text = refused(HostingGrid(config, [",".join(EACH)]), config)
    assert text.startswith("node 2: /no/such/folder: ")


def test_a_simulation_asks_no_node_again_that_serves_clients(
    cameras: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cameras.model_copy(update={"quorum": 2})
    monkeypatch.setattr(module, "ASK_AGAIN", 0.0)
    grid = HostingGrid(config, [",".join(EACH)])
    roster = gather(grid, config)
    roster.refresh(grid, config)
    assert sorted(roster.node_of) == ["client-00", "client-01", "client-03"]
    assert grid.pushed == [2]


@pytest.mark.parametrize("said", [{"failed": ["client-03"], "failures": ["it is away"]}, {"others": ["client-03"]}])
def test_a_device_names_nobody_elses_client_as_failed_or_of_another_run(
    config: RunConfig, said: dict[str, list[str]]
) -> None:
    grid = HostingGrid(config, EACH)
    grid.registered = dict(zip(range(2, 6), EACH, strict=True))
    grid._app = lying = ClientApp()

    @lying.query("hello")
    def answer(message: Message, context: Context) -> Message:
        reply = client.hello(message, context)
        if context.node_config["clients"] == EACH[0]:
            reply.content.config_records["hello"].update(said)
        return reply

    assert "node 2 says that it hosts client-03, and is registered as client-00" in refused(grid, config)


@pytest.mark.parametrize("before", [{"clients": "camera-1"}, NO_GPU])
def test_a_device_that_comes_back_as_it_should_be_takes_part(config: RunConfig, before: dict[str, str]) -> None:
    """With a key it has the same node id as before."""
    grid = Devices(config, EACH)
    grid.change(3, **before)
    roster = Roster()
    roster.refresh(grid, config)
    grid.away = {3}
    roster.refresh(grid, config)
    assert "client-01" not in roster.node_of
    grid.change(3, clients="client-01", device="cpu")
    grid.away = set()
    roster.refresh(grid, config)
    assert roster.nodes() == {node: [name] for node, name in enumerate(EACH, start=2)}
    assert not roster.refused
    assert grid.pushed == [2, 3, 4, 5, 3]  # the others were asked once


def test_a_client_does_not_move_to_a_node_that_was_refused_until_its_own_is_gone(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_AGAIN", 0.0)
    grid = Devices(config, ["client-00,client-01,client-02", "client-00"])
    roster = Roster()
    for _ in range(2):
        roster.refresh(grid, config, returning=False)
    roster.refresh(grid, config)
    assert roster.node_of["client-00"] == 2
    grid.away = {2}
    roster.refresh(grid, config)
    assert roster.node_of == {"client-00": 3, "client-01": 2, "client-02": 2}


@pytest.fixture
def other_model(tmp_path: Path) -> dict[str, str]:
    """A node's settings, with another source model than the embedded one."""
    path = tmp_path / "other.safetensors"
    save(build("resnet8", 10), path, {"architecture": "resnet8", "classes": "10"})
    return {"checkpoint": str(path)}


@pytest.mark.parametrize("stale", [[2], [2, 3, 4, 5]])
def test_the_source_model_is_the_servers_whoever_answers_first(
    tiny_config: Callable[..., RunConfig], other_model: dict[str, str], stale: list[int]
) -> None:
    config = tiny_config(**{"join-timeout": 0.1, "quorum": 3})
    grid = HostingGrid(config, EACH)
    for node in stale:
        grid.change(node, **other_model)
    _, known = check_inputs(config)
    if len(stale) == 4:
        assert "node 2 has another source model (" in refused(grid, config, known)
        return
    roster = gather(grid, config, known)
    assert list(roster.refused) == stale
    assert (roster.model, roster.classes) == (known.model, 10)


def test_a_node_that_was_lost_on_the_way_is_asked_again(
    tiny_config: Callable[..., RunConfig], warned: list[str]
) -> None:
    config = tiny_config(**{"join-timeout": 60.0})

    class Unsteady(LocalGrid):
        lost: ClassVar[list[int]] = [5, 8, 3]

        def get_nodes(self) -> Iterable[NodeInfo]:
            return [NodeInfo(node_id=2), NodeInfo(node_id=3, name="client-01,client-03")]

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for reply in super().pull_messages(message_ids):
                if reply.metadata.src_node_id == 3 and self.lost:
                    # As Flower makes them: from the SuperLink, whose id is 1.
                    reply = Message(Error(code=self.lost.pop(), reason="gone"), reply_to=reply)
                    reply.metadata.__dict__["_reply_to_message_id"] = self.asked
                    reply.metadata.__dict__["_src_node_id"] = 1
                yield reply

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            ids = list(super().push_messages(messages))
            for message, message_id in zip(messages, ids, strict=True):
                if message.metadata.dst_node_id == 3:
                    self.asked = message_id
            return ids

    grid = Unsteady(app, config.to_flat(), 2)
    roster = gather(grid, config)
    assert not grid.lost
    assert sorted(roster.node_of) == list(config.client_names())
    assert set(roster.node_of.values()) == {2, 3}
    assert warned[0] == "node 3 (client-01,client-03) did not answer (gone (code 3)); it is asked again"
    assert len(warned) == 3


def test_data_that_a_node_may_not_read_are_named(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(config: RunConfig) -> None:
        raise PermissionError(13, "Permission denied", "/home/other/data")

    monkeypatch.setattr("fedtta_flwr.workbench.open_data", locked)
    monkeypatch.setattr("fedtta_flwr.workbench._workbenches", {})
    text = refused(LocalGrid(app, config.to_flat(), 1), config)
    assert "'/home/other/data'; give the node's user the right to enter and read it" in text


@pytest.mark.parametrize("task", ["ftta", "tgfl"])
def test_a_file_that_is_no_image_on_one_device_is_found_at_once(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, task: str
) -> None:
    """Not in the middle of a run. It is the device's alone: the server's own files are looked at by the server."""
    for place in ("here", "there"):
        for name in ("ant", "bee"):
            folder = tmp_path / place / name
            folder.mkdir(parents=True)
            for i in range(20):
                Image.new("RGB", (40, 40), (i, i, i)).save(folder / f"{i}.png")
    (tmp_path / "there" / "bee" / "19.png").write_text("no image")
    save(build("resnet8", 2), tmp_path / "m.safetensors", {"architecture": "resnet8", "classes": "2"})
    config = tiny_config(**{
        "dataset": "folder", "data-dir": str(tmp_path / "here"), "checkpoint": str(tmp_path / "m.safetensors"),
        "join-timeout": 0.1, "quorum": 1, "task": task, "model": "resnet8", "tgfl.dirichlet": 10.0,
    })  # fmt: skip
    grid = HostingGrid(config, ["client-00,client-02", "client-01,client-03"])
    grid.change(3, **{"data-dir": str(tmp_path / "there")})
    roster = gather(grid, config)
    assert sorted(roster.node_of) == ["client-00", "client-02"]
    assert "19.png: not an image (8 bytes)" in roster.refused[3]


def test_nodes_are_in_the_order_of_their_first_client() -> None:
    roster = Roster({"d": 1, "a": 9, "c": 1, "b": 4, "e": 9}, present={1, 4, 9})
    assert list(roster.nodes().items()) == [(9, ["a", "e"]), (4, ["b"]), (1, ["c", "d"])]
