"""The collaboration matrix over the rounds, as a heat map with a slider, in HTML and a small script."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

MOST_CLIENTS = 64  # rows of a heat map; more clients are averaged in blocks
LEAST_ROUNDS = 60  # are always there
MOST_BYTES = 100_000  # beyond these a page holds no more rounds

SCRIPT = """
// viridis; its key is the square root of the weight, so that small weights can be told apart
const STOPS = [[68,1,84],[71,45,123],[59,82,139],[44,114,142],[33,145,140],[40,174,128],[94,201,98],[173,220,48],
  [253,231,37]];
const colour = byte => {
  const at = byte / 255 * (STOPS.length - 1), k = Math.min(Math.floor(at), STOPS.length - 2);
  return 'rgb(' + STOPS[k].map((c, i) => Math.round(c + (at - k) * (STOPS[k + 1][i] - c))).join() + ')';
};
for (const box of document.querySelectorAll('[data-matrices]')) {
  const data = JSON.parse(box.querySelector('script').textContent), n = data.size;
  const bytes = Uint8Array.from(atob(data.weights), c => c.charCodeAt(0));
  const range = box.querySelector('input'), [cell, output] = box.querySelectorAll('output');
  const [map, key] = box.querySelectorAll('canvas'), side = Math.ceil(832 / n);
  let at = null;  // row and column of the weight that is told
  map.width = map.height = n * side;
  key.width = 256; key.height = 1;
  const bar = key.getContext('2d'), brush = map.getContext('2d');
  for (let i = 0; i < 256; i++) { bar.fillStyle = colour(i); bar.fillRect(i, 0, 1, 1); }
  const show = () => {
    const k = +range.value;
    for (let i = 0; i < n * n; i++) {
      brush.fillStyle = colour(bytes[k * n * n + i]);
      brush.fillRect(i % n * side, Math.floor(i / n) * side, side, side);
    }
    brush.fillStyle = '#fff';
    for (const edge of data.edges) {
      const at = Math.round(edge * map.width) - 1;
      brush.fillRect(at, 0, 2, map.height);
      brush.fillRect(0, at, map.width, 2);
    }
    output.textContent = data.texts[k];
    range.setAttribute('aria-valuetext', data.texts[k]);
    tell();
  };
  const tell = () => {
    if (!at || !data.clients.length) return;
    const [i, j] = at, weight = data.largest * (bytes[+range.value * n * n + i * n + j] / 255) ** 2;
    cell.textContent = `${data.clients[i]}: ${weight.toFixed(3)} of ${data.clients[j]}`;
  };
  const move = to => { at = to.map(k => Math.min(n - 1, Math.max(0, k))); tell(); };
  range.addEventListener('input', show);
  map.addEventListener('pointermove', event => move(
    [event.offsetY / map.clientHeight, event.offsetX / map.clientWidth].map(share => Math.floor(share * n))));
  map.addEventListener('focus', () => move(at || [0, 0]));
  map.addEventListener('keydown', event => {
    const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (!step) return;
    event.preventDefault();
    move([at[0] + step[0], at[1] + step[1]]);
  });
  show();
}
"""


@dataclass(frozen=True)
class Matrices:
    """W over the rounds.

    Attributes
    ----------
    rounds : ndarray
        [R].
    weights : ndarray
        [R, N, N].
    clients : sequence of str
        N names, in the order of the rows.
    sizes : sequence of int
        How many clients each group has, in the order of the rows.
    within : dict of int to float
        Round -> the mean weight that a client gives to its group, where that is known.
    """

    title: str
    rounds: NDArray[np.int64]
    weights: NDArray[np.float32]
    clients: Sequence[str]
    sizes: Sequence[int]
    within: dict[int, float]


def heatmap(part: Matrices, name: str) -> str:
    """Return the HTML; `name` is for the ids. Many rounds are thinned out, many clients averaged in blocks."""
    clients = part.weights.shape[1]
    size = min(clients, MOST_CLIENTS)
    rounds = min(len(part.rounds), max(LEAST_ROUNDS, MOST_BYTES // size**2))
    chosen = np.linspace(0, len(part.rounds) - 1, rounds).round().astype(int)
    weights, notes = part.weights[chosen].astype(np.float64), list[str]()
    if rounds < len(part.rounds):
        notes.append(f"{rounds} of {len(part.rounds)} rounds")
    if size < clients:
        starts = np.linspace(0, clients, size + 1).astype(int)[:-1]
        counts = np.diff(np.append(starts, clients))
        sums = np.add.reduceat(np.add.reduceat(weights, starts, axis=1), starts, axis=2)
        weights = sums / np.outer(counts, counts)
        notes.append(f"{clients} clients, averaged in {size} blocks")
    else:
        notes.append(f"from above and from the left: {_grouped(part)}")
    largest = max(float(weights.max()), 1e-12)
    scaled = np.round(255 * np.sqrt(weights.clip(0) / largest)).astype(np.uint8)
    texts = [_text(int(part.rounds[k]), weights[i], part.within) for i, k in enumerate(chosen)]
    content = {
        "size": size,
        "clients": list(part.clients) if size == clients else [],
        "largest": largest,
        "edges": (np.cumsum(part.sizes)[:-1] / clients).tolist(),
        "texts": texts,
        "weights": base64.b64encode(scaled.tobytes()).decode(),
    }
    data = json.dumps(content).replace("<", "\\u003c")
    note = f"<p class=note>{escape('; '.join(notes))}.</p>" if notes else ""
    return (
        f'<figure class=heatmap data-matrices><figcaption id="{name}t">{escape(part.title)}</figcaption>'
        f'<script type="application/json">{data}</script>'
        f'<canvas role=img tabindex=0 aria-labelledby="{name}t" aria-describedby="{name}c"></canvas>'
        f'<output id="{name}c" class=cell aria-live=polite></output>'
        f"<div class=key aria-hidden=true>0<canvas></canvas>{largest:.3f}</div>"
        f'<label id="{name}l" for="{name}">Round</label>'
        f'<input id="{name}" type=range min=0 max={rounds - 1} value=0 aria-labelledby="{name}l {name}t">'
        f'<output for="{name}" aria-live=off></output>{note}</figure>'
    )


def _grouped(part: Matrices) -> str:
    """Return the clients' names, group by group."""
    ends = np.cumsum(part.sizes).tolist()
    return " | ".join(", ".join(part.clients[end - size : end]) for end, size in zip(ends, part.sizes, strict=True))


def _text(number: int, weights: NDArray[np.float64], within: dict[int, float]) -> str:
    text = f"round {number}, largest weight {weights.max():.3f}"
    return text if number not in within else f"{text}, within groups {within[number]:.3f}"
