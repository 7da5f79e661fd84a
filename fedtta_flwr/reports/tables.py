"""A table, and how it is written down: Markdown, CSV, LaTeX, HTML."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from fedtta_flwr.reports.layout import FLAGS

MINUS = "\N{MINUS SIGN}"
MARKS = "".join(FLAGS.values())  # how far a published figure can be trusted
LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    MINUS: "$-$",
    "Δ": r"$\Delta$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "|": r"\textbar{}",
}
GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi"
LATEX |= {c: f"$\\{name}$" for c, name in zip("αβγδεζηθικλμνξπρστυφχψ", GREEK.split(), strict=True)}


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes
    ----------
    name : str
        For the files.
    columns : list of str
        Headings, those of the labels first.
    rows : list of list of str
        An empty text says that there is no value.
    labels : int
        How many columns name the row.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    labels: int = 1
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the table in Markdown."""
        align = [":--"] * self.labels + ["--:"] * (len(self.columns) - self.labels)
        lines = [_pipes(self.columns), _pipes(align), *map(_pipes, self.rows)]
        return (
            "\n".join([f"**{_plain(self.title)}**", "", *lines, "", *(f"{_plain(note)}  " for note in self.notes)])
            + "\n"
        )

    def csv(self) -> str:
        """Return the table as CSV; ``mean ± std`` becomes two columns, and a figure with a mark of its trust, too."""
        numbers = range(self.labels, len(self.columns))
        pairs = [i in numbers and any("±" in row[i] for row in self.rows) for i in range(len(self.columns))]
        marked = [i in numbers and any(row[i].endswith(tuple(MARKS)) for row in self.rows) for i in range(len(pairs))]
        heads = [
            [c, *([f"{c} std"] if pair else []), *([f"{c} mark"] if mark else [])]
            for c, pair, mark in zip(self.columns, pairs, marked, strict=True)
        ]
        output = io.StringIO()
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow([_no_formula(head) for group in heads for head in group])
        for row in self.rows:
            cells: list[str] = []
            for i, (text, pair, mark) in enumerate(zip(row, pairs, marked, strict=True)):
                plain = text.replace(",", "").replace(MINUS, "-").rstrip(MARKS) if i in numbers else _no_formula(text)
                mean, _, std = plain.partition(" ± ")
                cells += [
                    *([mean, std] if pair else [plain]),
                    *([text[-1:] if text.endswith(tuple(MARKS)) else ""] * mark),
                ]
            writer.writerow(cells)
        return output.getvalue()

    def latex(self) -> str:
        """Return a float with a booktabs tabular; the notes end its caption, a line each, to be taken out by itself."""
        align = "l" * self.labels + "r" * (len(self.columns) - self.labels)
        # After a rule or \\ a row that begins with [ or * would be an option of it.
        head, *body = (
            "{}" * row[0].startswith(("[", "*")) + " & ".join(map(_tex, row)) + r" \\"
            for row in (self.columns, *self.rows)
        )
        caption = "\n".join(map(_tex, (f"{self.title.rstrip('.')}.", *self.notes)))
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{self.name}}}"]
        lines += [rf"\begin{{tabular}}{{{align}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        return "\n".join([*lines, r"\end{tabular}", r"\end{table}"]) + "\n"

    def html(self) -> str:
        """Return an HTML table that can be scrolled sideways by itself."""
        words = [" class=label"] * self.labels + [""] * (len(self.columns) - self.labels)
        head = "".join(f'<th scope="col"{w}>{escape(c)}</th>' for c, w in zip(self.columns, words, strict=True))
        body = []
        for row in self.rows:
            cells = [f'<th scope="row">{escape(text)}</th>' for text in row[: self.labels]]
            cells += [f"<td>{escape(text)}</td>" for text in row[self.labels :]]
            body.append(f"<tr>{''.join(cells)}</tr>")
        notes = "".join(f"<p class=note>{escape(note)}</p>" for note in self.notes)
        title = escape(self.title)
        return (
            f'<figure class={self.name}><div class=scroll tabindex=0 role=region aria-label="{title}">'
            f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{notes}</figure>"
        )


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as text; empty for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def spread(values: Sequence[float | None], digits: int = 2) -> str:
    """Return ``mean ± std`` (sample standard deviation) of what is there; of one value no std, of none nothing."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = number(float(np.mean(known)), digits)
    return mean if len(known) < 2 else f"{mean} ± {number(float(np.std(known, ddof=1)), digits)}"


def signed(value: float | None, digits: int = 2) -> str:
    """Return a difference as text, with its sign."""
    if value is None:
        return ""
    text = f"{abs(value):,.{digits}f}"
    return text if not text.strip("0.,") else ("+" if value > 0 else MINUS) + text


def _no_formula(text: str) -> str:
    """Keep a name, which may be a device's, from being one that a spreadsheet computes."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Keep a text from being read as Markdown or HTML."""
    return re.sub(r"([\\`*_|<>&\[\]])", r"\\\1", " ".join(text.split()))


def _tex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in " ".join(text.split()))
