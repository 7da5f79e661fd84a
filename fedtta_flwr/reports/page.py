"""The HTML page of a report: one file, no request to anywhere, light and dark, readable without a mouse."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta_flwr.reports.figures import Figure
from fedtta_flwr.reports.tables import Table

MOST_ROUNDS, MOST_CLIENTS = 60, 64
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#57606a;--paper:#fff;--line:#d0d7de;--soft:#f6f8fa;--mark:#0969da}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--paper:#0d1117;--line:#30363d;--soft:#161b22;
--mark:#58a6ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
main,header{max-width:72rem;margin:0 auto;padding:1rem}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0}h2{font-size:1.25rem;margin:2.2rem 0 .6rem}
p,li{max-width:46rem}.note,footer{color:var(--dim);font-size:.9rem}
nav ul{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;list-style:none;padding:0}
a{color:var(--mark)}:focus-visible{outline:2px solid var(--mark);outline-offset:2px}
figure{margin:1rem 0}figcaption{color:var(--dim);font-size:.9rem}img{max-width:100%;height:auto}
.wide img{min-width:34rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.3rem 0;white-space:nowrap}
th,td{padding:.28rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
thead th{background:var(--soft);vertical-align:bottom}th.label,th[scope=row]{text-align:left}
th[scope=row]{font-weight:400}
.claims th[scope=row]{white-space:normal;min-width:9rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:0}
dt{color:var(--dim)}dd{margin:0;min-width:0}
details{margin:.8rem 0;border-top:1px solid var(--line);padding-top:.6rem}summary{cursor:pointer;font-weight:600}
.maps{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,18rem),1fr));gap:0 2rem}
canvas{width:min(100%,26rem);image-rendering:pixelated;border:1px solid var(--line);display:block}
input[type=range]{width:min(100%,26rem)}
"""

SCRIPT = """
for (const box of document.querySelectorAll('[data-matrices]')) {
  const data = JSON.parse(box.querySelector('script').textContent), n = data.size;
  const bytes = Uint8Array.from(atob(data.weights), c => c.charCodeAt(0));
  const range = box.querySelector('input'), canvas = box.querySelector('canvas'), output = box.querySelector('output');
  canvas.width = canvas.height = n;
  const show = () => {
    const k = +range.value, image = new ImageData(n, n);
    for (let i = 0; i < n * n; i++) {
      const w = bytes[k * n * n + i] / 255;  // viridis-like: dark blue, green, yellow
      image.data.set([255 * Math.min(1, .27 + (w > .5 ? (w - .5) * 1.45 : -.25 * w)), 255 * (.05 + .85 * w),
        255 * (w < .5 ? .33 + .4 * w : .53 - .8 * (w - .5)), 255], 4 * i);
    }
    canvas.getContext('2d').putImageData(image, 0, 0);
    output.textContent = 'round ' + data.rounds[k] + ', largest weight ' + data.largest[k].toFixed(3);
    range.setAttribute('aria-valuetext', output.textContent);
  };
  range.addEventListener('input', show);
  show();
}
"""


@dataclass
class Section:
    """A part of the page.

    Attributes
    ----------
    parts : list
        Tables, figures and matrices, in their order.
    folded : bool
        Whether the reader has to open it.
    """

    heading: str
    parts: list[Any] = field(default_factory=list)
    text: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Matrices:
    """W over the rounds.

    Attributes
    ----------
    rounds : ndarray
        [R].
    weights : ndarray
        [R, N, N].
    """

    title: str
    rounds: NDArray[Any]
    weights: NDArray[Any]


def page(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """Return the page; every text from outside is escaped."""
    used = [section for section in sections if section.parts or section.text]
    links = "".join(f'<li><a href="#s{i}">{escape(s.heading)}</a></li>' for i, s in enumerate(used))
    body = "".join(_section(i, section) for i, section in enumerate(used))
    about = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts)
    script = f"<script>{SCRIPT}</script>" if any(isinstance(p, Matrices) for s in used for p in s.parts) else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<header><h1>{escape(title)}</h1><dl>{about}</dl><nav aria-label=Contents><ul>{links}</ul></nav></header>"
        f"<main>{body}</main>{script}</body></html>\n"
    )


def _section(index: int, section: Section) -> str:
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    parts = [(part, _part(part, f"s{index}p{i}")) for i, part in enumerate(section.parts)]
    inner = text + "".join(html for part, html in parts if not isinstance(part, Matrices))
    if maps := "".join(html for part, html in parts if isinstance(part, Matrices)):
        inner += f"<div class=maps>{maps}</div>"  # side by side, to be compared
    heading = f"<h2>{escape(section.heading)}</h2>"
    if section.folded:
        inner = f"<details><summary>Show {len(section.parts)}</summary>{inner}</details>"
    return f'<section id="s{index}">{heading}{inner}</section>'


def _part(part: Table | Figure | Matrices, name: str) -> str:
    if isinstance(part, Table):
        return f"<div class={part.name}>{part.html()}</div>" if part.name == "claims" else part.html()
    if isinstance(part, Figure):
        light, dark = (f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in (part.light, part.dark))
        return (  # on a narrow screen it can be scrolled sideways, as a table can
            f'<figure><div class="scroll wide" tabindex=0 role=region aria-label="{escape(part.title)}"><picture>'
            f'<source srcset="{dark}" media="(prefers-color-scheme: dark)">'
            f'<img src="{light}" width="{part.width}" alt="{escape(part.text)}"></picture></div>'
            f"<figcaption>{escape(part.title)}</figcaption></figure>"
        )
    return _matrices(part, name)


def _matrices(part: Matrices, name: str) -> str:
    """Return a heat map with a slider; many rounds are thinned out, many clients averaged in blocks."""
    chosen = np.unique(np.linspace(0, len(part.rounds) - 1, min(MOST_ROUNDS, len(part.rounds))).astype(int))
    weights, clients = part.weights[chosen], part.weights.shape[1]
    note = "" if len(chosen) == len(part.rounds) else f" {len(chosen)} of {len(part.rounds)} rounds."
    if clients > MOST_CLIENTS:
        edges = np.linspace(0, clients, MOST_CLIENTS + 1).astype(int)[:-1]
        sizes = np.diff(np.append(edges, clients))
        sums = np.add.reduceat(np.add.reduceat(weights, edges, axis=1), edges, axis=2)
        weights = sums / (sizes[:, None] * sizes)
        note += f" {clients} clients, averaged in {MOST_CLIENTS} blocks."
    largest = weights.max(axis=(1, 2))
    scaled = np.round(255 * weights / np.maximum(largest, 1e-12)[:, None, None]).astype(np.uint8)
    data = json.dumps(
        {
            "size": weights.shape[1],
            "rounds": part.rounds[chosen].tolist(),
            "largest": [round(float(value), 6) for value in largest],
            "weights": base64.b64encode(scaled.tobytes()).decode(),
        }
    )
    return (
        f'<figure data-matrices><script type="application/json">{data}</script>'
        f'<canvas role=img aria-labelledby="{name}t"></canvas>'
        f'<label for="{name}">round</label> <input id="{name}" aria-describedby="{name}t" '
        f'type=range min=0 max={len(chosen) - 1} value=0> <output for="{name}"></output>'
        f'<figcaption id="{name}t">{escape(part.title)}.{escape(note)}</figcaption></figure>'
    )
