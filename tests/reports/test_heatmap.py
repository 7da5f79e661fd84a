"""What a heat map holds of W: quantised, thinned out, averaged in blocks."""

import base64
import json
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.reports.heatmap import MOST_CLIENTS, Matrices, heatmap

NAMES = [f"client-{k:03}" for k in range(150)]


def content(part: Matrices) -> tuple[dict[str, Any], NDArray[np.uint8], str]:
    html = heatmap(part, "x")
    found = re.search(r'<script type="application/json">(.*?)</script>', html)
    assert found is not None
    data = json.loads(found[1])
    weights = np.frombuffer(base64.b64decode(data["weights"]), dtype=np.uint8)
    return data, weights.reshape(len(data["texts"]), data["size"], data["size"]), html


def rows(rounds: int, clients: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).dirichlet(np.ones(clients), size=(rounds, clients)).astype(np.float32)


def test_few_clients_are_all_there() -> None:
    weights = rows(75, 20)
    data, bytes_, html = content(Matrices("T", np.arange(1, 76), weights, NAMES[:20], [5, 5, 10], {1: 0.25}))
    assert data["edges"] == [0.25, 0.5]
    assert np.abs((bytes_ / 255.0) ** 2 * weights.max() - weights).max() < 0.005
    assert data["texts"][0] == f"round 1, largest weight {weights[0].max():.3f}, within groups 0.250"
    assert data["texts"][74] == f"round 75, largest weight {weights[74].max():.3f}"
    assert data["clients"] == NAMES[:20]
    assert f"left: {', '.join(NAMES[:5])} | {', '.join(NAMES[5:10])} | {', '.join(NAMES[10:20])}.</p>" in html
    assert data["largest"] * (bytes_[3, 4, 5] / 255) ** 2 - weights[3, 4, 5] < 0.005


def test_many_clients_are_averaged_in_blocks_and_many_rounds_thinned_out() -> None:
    weights = rows(200, 150)
    data, bytes_, html = content(Matrices("T", np.arange(1, 201), weights, NAMES, [150], {}))
    assert bytes_.shape == (60, MOST_CLIENTS, MOST_CLIENTS)
    assert data["texts"][0].startswith("round 1,")
    assert data["texts"][-1].startswith("round 200,")
    assert "60 of 200 rounds; 150 clients, averaged in 64 blocks." in html
    edges = [150 * k // MOST_CLIENTS for k in range(MOST_CLIENTS + 1)]
    first = np.array(
        [
            [weights[0, edges[i] : edges[i + 1], edges[j] : edges[j + 1]].mean() for j in range(MOST_CLIENTS)]
            for i in range(MOST_CLIENTS)
        ]
    )
    seen = (bytes_[0] / 255.0) ** 2
    assert np.abs(seen / seen.max() - first / first.max()).max() < 0.02
    assert len(html) < 500_000
    assert data["clients"] == []
    assert NAMES[0] not in html


def test_a_title_is_only_text() -> None:
    html = content(Matrices("</script><b>", np.array([1]), rows(1, 2), ["<i>", "</script>"], [2], {}))[2]
    assert "<b>" not in html
    assert "<i>" not in html
    assert html.count("</script>") == 1
    assert "&lt;/script&gt;&lt;b&gt;" in html
