"""The digits demonstration of docs/two-heads.md: what BTFL promises, shown by the shipped config."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.btgfl import SETS
from fedtta_flwr.memory import Memory
from fedtta_flwr.records import INFO, STATE, arrays_of, unstack
from fedtta_flwr.run_config import read_overrides
from fedtta_flwr.tgfl import HeadBench, visit_heads
from tests.conftest import ROOT, LocalRun

A, B, C, D, E = SETS
FIRST = 6 + 1 + 1  # the round of A


@pytest.fixture(scope="module")
def demonstration(
    run_local: Callable[..., LocalRun], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path, LocalRun]:
    """The run config, where clients keep their states, and the run."""
    states = tmp_path_factory.mktemp("states")
    flat = read_overrides([str(ROOT / "configs" / "btfl-digits.toml")])
    flat |= {"device": "cpu", "state-dir": str(states), "checkpoint-every": 1}
    return flat, states, run_local(**flat)


@pytest.fixture(scope="module")
def accuracy(demonstration: tuple[dict[str, Any], Path, LocalRun]) -> dict[str, dict[str, float]]:
    """Score -> test set -> accuracy in percent."""
    return {score: found["per_corruption"] for score, found in demonstration[2].summary["accuracy"].items()}


def test_each_head_has_its_own_ground(accuracy: dict[str, dict[str, float]]) -> None:
    shared, personal = accuracy["source"], accuracy["local"]
    for name in (A, B):
        assert personal[name] > shared[name] + 10
    for name in (C, D):
        assert shared[name] > personal[name] + 30


def test_btfl_keeps_most_of_both_and_leads_the_average(accuracy: dict[str, dict[str, float]]) -> None:
    shared, personal, btfl = accuracy["source"], accuracy["local"], accuracy["tta"]
    for name in (A, B):
        assert btfl[name] > personal[name] - 2
    for name in (C, D):
        gained = (btfl[name] - personal[name]) / (shared[name] - personal[name])
        assert gained > 2 / 3
    means = {score: np.mean([accuracy[score][name] for name in SETS]) for score in accuracy}
    assert means["tta"] > max(means["source"], means["local"]) + 2


def test_the_global_head_counts_more_for_external_samples(
    demonstration: tuple[dict[str, Any], Path, LocalRun],
) -> None:
    with np.load(demonstration[2].path / "heads.npz") as file:
        edges, sets, histogram = file["edges"], file["sets"].tolist(), file["histogram"].sum(axis=1)
    middles = (edges[1:] + edges[:-1]) / 2
    mean = dict(zip(sets, histogram @ middles / histogram.sum(axis=1), strict=True))
    assert max(mean[A], mean[B]) + 0.2 < min(mean[C], mean[D])
    assert mean[A] < mean[E] < mean[C]


@pytest.fixture(scope="module")
def again(demonstration: tuple[dict[str, Any], Path, LocalRun]) -> Callable[..., dict[str, float]]:
    """Let the clients predict once more from what they keep on disk: ``again(**{"batch-size": 1})``."""
    flat, states, run = demonstration
    received, name = {}, ""
    for message in run.sent:
        info = message.content.config_records.get(INFO)
        if info is not None and info["round"] == FIRST:
            state = arrays_of(message.content, STATE)
            known = zip(info["personal"], info["places"], strict=True)
            received |= {client: unstack(state, i) for client, i in known}
            name = str(info["run"])
    data = HeadBench(RunConfig.from_flat(flat)).data  # corrupted images are made once

    def predict(sets: tuple[str, ...] = SETS, **overrides: Any) -> dict[str, float]:
        bench = HeadBench(RunConfig.from_flat(flat | {"scores": "tta"} | overrides))
        bench.data, found = data, {}
        for test_set in sets:
            clients, number = bench.config.client_names(), FIRST + SETS.index(test_set)
            request = ConfigRecord({"round": number, "resuming": list(clients), "resume": 1000})
            visits = [
                visit_heads(bench, client, request, received[client], Memory(RecordDict(), states / name))
                for client in clients
            ]
            assert not any(v.forgot for v in visits)
            correct, seen = (sum(int(v.counts[key][0].sum()) for v in visits) for key in ("tta", "seen"))
            found[test_set] = 100 * correct / seen
        return found

    return predict


def test_one_sample_at_a_time_is_as_good(
    again: Callable[..., dict[str, float]], accuracy: dict[str, dict[str, float]]
) -> None:
    assert again((A,), **{"batch-size": 32}) == {A: accuracy["tta"][A]}  # the run's own way to its numbers
    single = again(**{"batch-size": 1})
    for name in SETS:
        assert single[name] == pytest.approx(accuracy["tta"][name], abs=1)


def test_counts_that_wait_for_the_end_of_a_batch_lose_nothing_at_batches_of_one(
    again: Callable[..., dict[str, float]],
) -> None:
    mixed = again((E,), **{"btfl.prior": "batch", "batch-size": 1})
    assert mixed == again((E,), **{"btfl.prior": "sample", "batch-size": 1})
    assert mixed[E] > again((E,), **{"btfl.prior": "batch", "batch-size": 32})[E] - 1


def test_predictions_do_not_change_what_was_trained(
    demonstration: tuple[dict[str, Any], Path, LocalRun],
) -> None:
    sent = [m for m in demonstration[2].sent if INFO in m.content]
    states = [arrays_of(m.content, STATE) for m in sent if m.content.config_records[INFO]["round"] >= FIRST]
    for state in states[1:]:
        for key in state.keys() - {"clients"}:
            assert all(torch.equal(own, states[0][key][0]) for own in state[key])
