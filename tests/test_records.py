"""Tensors and Flower records."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from torch import Tensor

from fedtta_flwr import records
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.records import (
    PACKED,
    arrays_of,
    code_fingerprint,
    distinct,
    error_of,
    error_reply,
    from_arrays,
    payload_bytes,
    source_hash,
    to_arrays,
    to_stacked_arrays,
    unstack,
)

TENSORS: dict[str, Tensor] = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "strided": torch.arange(12, dtype=torch.float32).reshape(3, 4).T[:, ::2],
    "double": torch.tensor([1e-300, -0.0, 1e300], dtype=torch.float64),
    "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
    "brain": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
    "special": torch.tensor([float("nan"), float("inf"), -float("inf")]),
    "scalar": torch.tensor(3.5),
    "counter": torch.tensor(7, dtype=torch.int64),
    "counts": torch.tensor([[1, -2]], dtype=torch.int32),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
    "parameter": torch.ones(2, requires_grad=True),
}


def stack(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack equal states into one with a leading client axis."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


@pytest.fixture
def message() -> Message:
    LocalGrid(ClientApp(), {}, 1)  # a message may be made only where a grid is
    return Message(RecordDict(), 2, "train.visit")


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_survive_a_round_trip(name: str) -> None:
    back = from_arrays(to_arrays({name: TENSORS[name]}))[name]
    assert back.dtype == TENSORS[name].dtype
    assert back.shape == TENSORS[name].shape
    assert torch.equal(back.nan_to_num(1.25), TENSORS[name].detach().nan_to_num(1.25))
    assert not back.requires_grad


def test_names_keep_their_order() -> None:
    assert list(from_arrays(to_arrays(TENSORS))) == list(TENSORS)


def test_a_record_is_a_copy() -> None:
    tensor = torch.zeros(3)
    record = to_arrays({"t": tensor})
    tensor.fill_(1.0)
    back = from_arrays(record)["t"]
    assert back.tolist() == [0.0] * 3
    back.fill_(2.0)
    assert from_arrays(record)["t"].tolist() == [0.0] * 3


def test_stack_and_unstack() -> None:
    states = [{"a": torch.full((2,), float(i)), "b": torch.tensor(float(10 * i))} for i in range(3)]
    stacked = stack(states)
    assert stacked["a"].shape == (3, 2)
    assert stacked["b"].tolist() == [0.0, 10.0, 20.0]
    for i, state in enumerate(states):
        for name, t in unstack(stacked, i).items():
            assert torch.equal(t, state[name])


def test_a_record_of_stacked_states_is_that_of_their_stack() -> None:
    states = [{"b": torch.full((2, 3), float(i)), "a": torch.tensor(i, dtype=torch.float64)} for i in range(3)]
    record, expected = to_stacked_arrays(states), to_arrays(stack(states))
    assert list(from_arrays(record)) == ["b", "a"]
    assert record == expected
    assert list(to_stacked_arrays([{}, {}])) == []


def test_what_several_share_is_kept_once() -> None:
    one, other = ({"b": torch.zeros(2), "a": torch.tensor(float(i))} for i in range(2))
    views = [unstack({name: t.expand(3, *t.shape) for name, t in one.items()}, i) for i in range(3)]
    equal = {name: t.clone() for name, t in one.items()}
    partly = one | {"a": other["a"]}
    states, places = distinct([*views, other, equal, one, partly, other])
    assert places == [0, 0, 0, 1, 2, 0, 3, 1]
    assert [state["a"].data_ptr() for state in states] == [s["a"].data_ptr() for s in (one, other, equal, other)]
    assert distinct([]) == ([], [])
    assert distinct([{}, {}]) == ([{}], [0, 0])  # of an adapter of which nothing travels


def test_flower_sends_one_array_whatever_the_number_of_tensors() -> None:
    assert len(to_arrays(TENSORS)) == len(to_stacked_arrays([TENSORS, TENSORS])) == 1
    assert len(to_arrays({})) == len(to_stacked_arrays([{}, {}])) == 0


def test_a_dtype_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"angle: tensors of torch\.complex128 cannot travel; allowed: "):
        to_arrays({"angle": torch.zeros(2, dtype=torch.complex128)})


def test_other_records_are_refused() -> None:
    (array,) = to_arrays({"t": torch.ones(2)}).values()
    for arrays in ({"t": array}, {PACKED: array, "t": array}, {PACKED: Array(torch.ones(2).numpy())}):
        with pytest.raises(ValueError, match="expected one, 'tensors', of safetensors"):
            from_arrays(ArrayRecord(arrays))


def test_a_record_of_many_empty_tensors_is_not_read() -> None:
    many = {f"layer.{number}.{'x' * 50}": torch.empty(3, 0) for number in range(10_000)}
    with pytest.raises(ValueError, match=r"tensors of 1,\d+,\d+ bytes, at most 1,048,576 are taken"):
        from_arrays(to_arrays(many))
    few = dict(list(many.items())[:7_000])
    assert len(from_arrays(to_arrays(few))) == 7_000


def test_arrays_of_an_absent_record_are_none(message: Message) -> None:
    assert arrays_of(message.content, "state") == {}
    message.content["state"] = to_arrays({"t": torch.ones(2)})
    assert arrays_of(message.content, "state")["t"].tolist() == [1.0, 1.0]


def test_payload_is_counted_over_all_array_records(message: Message) -> None:
    assert payload_bytes(message) == 0
    message.content["info"] = ConfigRecord({"text": "x" * 1000})
    assert payload_bytes(message) == 0
    message.content["state"] = to_arrays({"a": torch.zeros(1000), "b": torch.zeros(500, dtype=torch.float64)})
    message.content["descriptor"] = to_arrays({"d": torch.zeros(250)})
    count = payload_bytes(message)
    assert count == 9000


def test_an_error_reply_carries_one_line(message: Message) -> None:
    reply = error_reply(message, "no such folder")
    assert error_of(reply) == "no such folder"
    assert payload_bytes(reply) == 0
    assert error_of(Message(RecordDict(), reply_to=message)) is None


def test_errors_of_flower_itself(message: Message) -> None:
    failed = Message(Error(code=3, reason="node unavailable"), reply_to=message)
    assert error_of(failed) == "node unavailable (code 3)"
    assert payload_bytes(failed) == 0
    silent = error_of(Message(Error(code=0), reply_to=message))
    assert silent is not None
    assert "code 0" in silent
    revoked = Message(Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable - no heartbeat"), reply_to=message)
    assert error_of(revoked) == "its node is not connected (gone, or revoked: `fedtta nodes` shows it)"


def test_the_fingerprint_changes_with_the_code_and_nothing_else(tmp_path: Path) -> None:
    """A copy of the module computes the hash of the folder that it lies in."""
    package = tmp_path / "package"
    (package / "sub").mkdir(parents=True)
    shutil.copy(records.__file__, package / "records.py")
    (package / "sub" / "module.py").write_text("x = 1\n")

    def fingerprint() -> str:
        spec = importlib.util.spec_from_file_location("records_copy", package / "records.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found: str = module.code_fingerprint()
        return found

    seen = [fingerprint()]
    (package / "notes.txt").write_text("not code\n")
    (package / "templates" / "method").mkdir(parents=True)
    (package / "templates" / "method" / "test_method.py").write_text("not in an app bundle\n")
    (package / "app").mkdir()
    (package / "app" / "server_app.py").write_text("in a wheel alone\n")
    assert fingerprint() == seen[0]
    (package / "sub" / "module.py").write_text("x = 2\n")
    seen.append(fingerprint())
    (package / "sub" / "module.py").rename(package / "sub" / "renamed.py")
    seen.append(fingerprint())
    (package / "more.py").write_text("")
    seen.append(fingerprint())
    assert len(set(seen)) == 4
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in seen)
    assert len(code_fingerprint()) == 16


def test_an_empty_record(message: Message) -> None:
    assert from_arrays(to_arrays({})) == {}
    assert isinstance(to_arrays({}), ArrayRecord)


def test_an_editors_lock_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = source_hash(tmp_path, tmp_path.iterdir())
    (tmp_path / ".#a.py").symlink_to("nobody@nowhere.1")
    assert source_hash(tmp_path, tmp_path.iterdir()) == before
    (tmp_path / "caf\udce9.py").write_text("2")  # a name that is not UTF-8
    assert source_hash(tmp_path, tmp_path.iterdir()) != before
