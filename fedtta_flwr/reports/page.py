"""The HTML page of a report: one file, no request to anywhere, light and dark, readable without a mouse."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from fedtta_flwr.reports.figures import Figure
from fedtta_flwr.reports.heatmap import SCRIPT, Matrices, heatmap
from fedtta_flwr.reports.tables import Table

WIDE = 600  # CSS pixels: a wider figure is not made smaller than it can be read, it scrolls by itself

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#57606a;--paper:#fff;--line:#d0d7de;--soft:#f6f8fa;--mark:#0969da}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--paper:#0d1117;--line:#30363d;--soft:#161b22;
--mark:#58a6ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
header,main{max-width:74rem;margin:0 auto;padding:0 1rem}header{padding-top:1.5rem}main{padding-bottom:4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 1rem;text-wrap:balance}
h2{font-size:1.3rem;margin:2.5rem 0 .5rem;padding-top:1rem;border-top:1px solid var(--line)}
p,ul{max-width:46rem}.note{color:var(--dim);font-size:.875rem;margin:.3rem 0}
nav ul{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;list-style:none;padding:0;margin:1rem 0 0;max-width:none}
a{color:var(--mark)}:focus-visible{outline:2px solid var(--mark);outline-offset:2px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0;font-size:.9375rem}
dt{color:var(--dim)}dd{margin:0;min-width:0}
figure{margin:1.25rem 0;min-width:0}figcaption,caption{font-weight:600;text-align:left}
figcaption{margin-bottom:.3rem}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));gap:0 2rem}
.scroll{overflow-x:auto}img{max-width:100%;height:auto;display:block}.wide img{min-width:44rem}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{padding:0 0 .4rem;max-width:min(46rem,100vw - 2rem);position:sticky;left:0}
th,td{padding:.28rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
thead th{background:var(--soft);vertical-align:bottom}
th.label,tbody th{text-align:left}tbody th{font-weight:400}
tbody tr:hover>*{background:var(--soft)}
tbody th:last-of-type{position:sticky;left:0;background:var(--paper)}
.claims tbody th,.missing tbody th{white-space:normal;min-width:9rem;position:static}
details{margin:.8rem 0}summary{cursor:pointer;font-weight:600}
.heatmap{max-width:26rem}.heatmap canvas{width:100%;display:block}
.heatmap .key{display:flex;align-items:center;gap:.5rem;color:var(--dim);font-size:.8125rem;margin:.3rem 0;
white-space:nowrap}.heatmap .key canvas{flex:1;width:0;height:.5rem}
.heatmap label{font-size:.875rem;float:left;margin-right:.6rem}
input[type=range]{width:calc(100% - 4rem);accent-color:var(--mark)}
.cell{min-height:1.5em}output{display:block;font-size:.875rem;font-variant-numeric:tabular-nums}
@media print{details::details-content{content-visibility:visible}nav{display:none}}
"""


@dataclass(frozen=True)
class Row:
    """Parts that stand side by side where there is room."""

    parts: Sequence["Figure | Matrices | Table"]


Part = Table | Figure | Matrices | Row


@dataclass(frozen=True)
class Section:
    """A part of the page; one that holds nothing is left out.

    Attributes
    ----------
    text : str
        Said before the parts, if there are any.
    items : sequence of str
        A list after them.
    folded : bool
        Whether the reader has to open it.
    """

    heading: str
    parts: Sequence[Part] = ()
    text: str = ""
    items: Sequence[str] = field(default=())
    folded: bool = False


def page(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """Return the page; all texts are escaped here.

    Its content security policy allows its own style and script, by their hashes, and images inside it: nothing that
    slipped into a text could run, and nothing is fetched.
    """
    used = [section for section in sections if section.parts or section.items]
    about = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in facts)
    links = "".join(f'<li><a href="#s{i}">{escape(s.heading)}</a></li>' for i, s in enumerate(used))
    body = "".join(_section(i, section) for i, section in enumerate(used))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>\n<body><header><h1>{escape(title)}</h1><dl>{about}</dl>"
        f'<nav aria-label="Contents"><ul>{links}</ul></nav></header>\n'
        f"<main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _section(index: int, section: Section) -> str:
    inner = f"<p>{escape(section.text)}</p>" if section.text and section.parts else ""
    inner += "\n".join(_part(part, f"s{index}p{i}") for i, part in enumerate(section.parts))
    if section.items:
        inner += f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in section.items)}</ul>"
    if section.folded:
        inner = f"<details><summary>Show them</summary>{inner}</details>"
    return f'<section id="s{index}"><h2>{escape(section.heading)}</h2>{inner}</section>\n'


def _part(part: Part, name: str) -> str:
    if isinstance(part, Table):
        return part.html()
    if isinstance(part, Figure):
        return _figure(part)
    if isinstance(part, Matrices):
        return heatmap(part, name)
    return f"<div class=row>{''.join(_part(inner, f'{name}r{i}') for i, inner in enumerate(part.parts))}</div>"


def _figure(figure: Figure) -> str:
    light, dark = (f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in (figure.light, figure.dark))
    picture = (
        f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
        f'<img src="{light}" width="{figure.width}" alt="{escape(figure.text)}"></picture>'
    )
    caption = escape(figure.title)
    if figure.width > WIDE:
        picture = f'<div class="scroll wide" tabindex=0 role=region aria-label="{caption}">{picture}</div>'
    return f"<figure><figcaption>{caption}</figcaption>{picture}</figure>"
