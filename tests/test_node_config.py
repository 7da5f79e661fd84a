"""What a deployed node says of itself: where its data and its processor are."""

import shutil
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args

from fedtta_flwr import client
from fedtta_flwr.config import RunConfig
from fedtta_flwr.deploy import node_config
from fedtta_flwr.errors import ConfigError, FedTTAError
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.models.source import embedded_checkpoint, load_source
from fedtta_flwr.records import error_of
from fedtta_flwr.workbench import NODE_KEYS, fingerprint_of, local_config, workbench

LIVE = {"dataset": "live", "classes": 10, "rounds": 2, "num-clients": 2, "spatial-heterogeneity": 1.0, "batch-size": 4}


def context(run_config: dict[str, Any], node: dict[str, Any], run_id: int = 1) -> Context:
    full = RunConfig.from_flat(run_config).to_flat()
    return Context(run_id=run_id, node_id=2, node_config=node, state=RecordDict(), run_config=full)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two folders, as `dataset = "arrays"` has them, of 12 images that are all black and all white."""
    found = []
    for name, value in (("black", 0), ("white", 255)):
        folder = tmp_path / name
        folder.mkdir()
        np.save(folder / "images.npy", np.full((12, 32, 32, 3), value, np.uint8))
        np.save(folder / "labels.npy", np.arange(12) % 10)
        found.append(str(folder))
    return found


ARRAYS: dict[str, Any] = {
    "dataset": "arrays",
    "num-clients": 2,
    "batch-size": 4,
    "corruptions": "none",
    "slots-per-corruption": 2,
    "spatial-heterogeneity": 1.0,
    "classes": 10,
    "checkpoint": str(embedded_checkpoint()),
}


ONE = {"num-clients": 1, "spatial-heterogeneity": 1.0}


@pytest.mark.parametrize(
    ("node", "timeout", "seconds"),
    [
        ({"clients": "a"}, 3600.0, 3600.0),
        ({"clients": "a"}, 20.0, 600.0),
        ({"clients": "a", "give-up-after": 0}, 3600.0, 3600.0),
        ({"clients": "a", "give-up-after": 30}, 3600.0, 30.0),
        ({"clients": "a", "give-up-after": "45.5"}, 20.0, 45.5),
        ({"clients": "a", "one-process": True}, 20.0, None),
        ({"partition-id": 0, "num-partitions": 1}, 20.0, None),
    ],
)
def test_a_devices_answer_is_given_up(
    node: dict[str, Any], timeout: float, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalGrid(ClientApp(), {}, 1)  # a message may be made only where a grid is
    where = context(ONE | {"round-timeout": timeout}, node)
    asked: list[tuple[float, str]] = []

    def note(*limit: Any) -> AbstractContextManager[None]:
        asked.append(limit)
        return nullcontext()

    monkeypatch.setattr(client, "given_up_after", note)
    for kind, answer, what in (("query.hello", client.hello, "hello"), ("train.visit", client.visit, "a visit")):
        with suppress(KeyError):  # there is nothing in the message
            answer(Message(RecordDict(), 2, kind), where)
        assert asked == ([] if seconds is None else [(seconds, what)])
        asked.clear()


@pytest.mark.parametrize("named", [-1, "soon", "nan"])
def test_a_patience_that_is_none(named: object) -> None:
    LocalGrid(ClientApp(), {}, 1)
    where = context(ONE, {"clients": "a", "give-up-after": named})
    reply = client.hello(Message(RecordDict(), 2, "query.hello"), where)
    assert error_of(reply) == f"node-config give-up-after = {named!r}: allowed: seconds, or 0 to leave it to the run"


def test_every_node_has_its_own_data(folders: list[str]) -> None:
    black, white = (workbench(context(ARRAYS, {"clients": "client-00", "data-dir": d})) for d in folders)
    assert float(black.stream("client-00").batch(0)[0].max()) == 0.0
    assert float(white.stream("client-00").batch(0)[0].min()) == 1.0
    # One process may serve both; only another run's is let go.
    assert workbench(context(ARRAYS, {"clients": "client-00", "data-dir": folders[0]})) is black
    assert workbench(context(ARRAYS, {"clients": "client-01", "data-dir": folders[1]})) is white
    workbench(context(ARRAYS, {"data-dir": folders[1]}, run_id=2))
    assert workbench(context(ARRAYS, {"data-dir": folders[0]})) is not black


def test_a_node_may_have_its_copy_of_the_source_model_elsewhere(tmp_path: Path) -> None:
    copy = shutil.copy(embedded_checkpoint(), tmp_path)
    run = ARRAYS | {"dataset": "digits", "checkpoint": "/on/the/server.safetensors"}
    assert workbench(context(run, {"clients": "client-00", "checkpoint": copy})).fingerprint == fingerprint_of(
        load_source(RunConfig(), 10)
    )


def test_without_a_word_of_its_own_a_node_has_the_runs(folders: list[str]) -> None:
    given = context(ARRAYS | {"data-dir": folders[1], "device": "cpu"}, {"clients": "client-00"})
    assert local_config(given) == RunConfig.from_flat(given.run_config)


def test_what_the_command_line_says_arrives(tmp_path: Path) -> None:
    model = tmp_path / "m.safetensors"
    settings = node_config(clients="client-00", data_dir=tmp_path, stream="torch.m:f", device="cpu", checkpoint=model)
    assert set(NODE_KEYS) < set(settings)
    config = local_config(context({"stream": "", "device": "auto", "checkpoint": "/elsewhere"}, settings))
    assert (config.data_dir, config.stream, config.device) == (str(tmp_path), "torch.m:f", "cpu")
    assert config.checkpoint == str(model)
    assert parse_config_args(['device="cpu"']) == {"device": "cpu"}


def own_stream(config: RunConfig, client: str) -> Any:
    """A stream of two slots of grey images."""

    class Grey:
        domains = ("live", "live")

        def __len__(self) -> int:
            return 2

        def batch(self, slot: int) -> tuple[torch.Tensor, None]:
            return torch.full((3, 3, 32, 32), 0.5), None

    return Grey()


def test_a_nodes_own_stream_takes_the_place_of_any_data(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __name__
    monkeypatch.setenv("FEDTTA_PLUGINS", module.partition(".")[0])
    for run in (LIVE | {"checkpoint": ARRAYS["checkpoint"]}, ARRAYS):
        bench = workbench(
            context(run, {"clients": "client-00", "stream": f"{module}:own_stream"}, run_id=hash(str(run)))
        )
        x, labels = bench.stream("client-00").batch(1)
        assert x.shape == (3, 3, 32, 32)
        assert labels is None
        assert bench.test_set.classes == 10


def test_only_the_operator_allows_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTTA_PLUGINS", raising=False)
    given = context(ARRAYS, {"clients": "client-00", "stream": "somewhere:stream"}, run_id=77)
    with pytest.raises(ConfigError, match="FEDTTA_PLUGINS=somewhere"):
        workbench(given).stream("client-00")


@pytest.mark.parametrize(("key", "value"), [("device", "gpu"), ("stream", "no function"), ("data-dir", 3)])
def test_a_nodes_settings_are_checked_like_a_runs(key: str, value: object) -> None:
    with pytest.raises(FedTTAError, match=key):
        local_config(context({}, {"clients": "client-00", key: value}))
