"""TensorBoard's event files, read back by TensorBoard."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from fedtta_flwr.config import RunConfig
from fedtta_flwr.tracking.tensorboard import TensorBoard
from tests.tracking.conftest import Broken, Numbers, accuracies, breaks, expected, without_seconds


def read(path: Path) -> EventAccumulator:
    return EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def scalars(path: Path) -> Numbers:
    """What TensorBoard shows of each round; every step must be there once."""
    events, found = read(path), Numbers()
    for tag in events.Tags()["scalars"]:
        if not tag.startswith("summary"):
            steps = [event.step for event in events.Scalars(tag)]
            assert len(set(steps)) == len(steps)
            for event in events.Scalars(tag):
                found.setdefault(event.step, {})[tag] = event.value
    return found


def session(path: Path) -> tuple[dict[str, Any], int]:
    """The hyper-parameters, and how the run ended."""
    content = read(path).PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info
    end = HParamsPluginData.FromString(content["_hparams_/session_end_info"]).session_end_info
    kinds = {key: value.WhichOneof("kind") for key, value in start.hparams.items()}
    return {key: getattr(start.hparams[key], kind) for key, kind in kinds.items()}, end.status


def close_to(numbers: Numbers) -> dict[int, Any]:
    return {step: pytest.approx(found, rel=1e-6) for step, found in numbers.items()}  # events hold 32 bits


def test_a_run(start: Callable[..., Path]) -> None:
    path = start("run", tracking="tensorboard")
    assert scalars(path) == close_to(expected(path))
    events = read(path)
    last = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"] if tag.startswith("summary/accuracy")}
    assert {event.step for event in last.values()} == {4}
    assert {tag: event.value for tag, event in last.items()} == pytest.approx(accuracies(path), rel=1e-6)
    hyper, status = session(path)
    assert status == STATUS_SUCCESS
    assert (hyper["num-clients"], hyper["strategy"], hyper["mixed-domains"]) == (4, "fedctta", False)
    assert hyper.keys() == RunConfig().to_flat().keys()


def test_a_run_that_is_broken_off_and_resumed_shows_every_round_once(start: Callable[..., Path]) -> None:
    whole = start("whole", tracking="tensorboard")
    with pytest.raises(Broken):
        start("broken", (4, breaks), tracking="tensorboard")
    broken = whole.with_name("broken")
    assert list(scalars(broken)) == [1, 2, 3]
    assert session(broken)[1] == STATUS_FAILURE
    start("broken", tracking="tensorboard", resume=str(broken))
    assert len(list((broken / "tensorboard").iterdir())) == 3  # two parts, one end
    assert without_seconds(scalars(broken)) == close_to(without_seconds(scalars(whole)))
    assert scalars(broken) == close_to(expected(broken))  # those that came last
    assert session(broken)[1] == STATUS_SUCCESS


def test_what_was_told_is_there_at_once(start: Callable[..., Path], tmp_path: Path) -> None:
    """As a kill would leave it, without any closing."""
    seen: list[Numbers] = []
    start("run", (3, lambda: seen.append(scalars(tmp_path / "run"))), tracking="tensorboard")
    assert list(seen[0]) == [1, 2]


def test_a_full_disk_ends_the_tracking_not_the_run(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    begin = TensorBoard.begin

    def onto_a_full_disk(self: TensorBoard, config: RunConfig) -> None:
        begin(self, config)
        self._file = RecordWriter(open("/dev/full", "wb"))  # noqa: SIM115

    monkeypatch.setattr(TensorBoard, "begin", onto_a_full_disk)
    path = start("run", tracking="tensorboard")
    assert list(expected(path)) == [1, 2, 3, 4]
    about = [line for line in warned if "tracking" in line]
    assert len(about) == 1
    assert "tracking by tensorboard ends here, the run goes on: OSError: [Errno 28]" in about[0]
