"""Tables as Markdown, CSV, LaTeX and HTML."""

import csv
import io
import statistics

import pytest

from fedtta_flwr.reports.tables import Table, number, signed, spread

HOSTILE = "<b>a|b_&%</b>"
TABLE = Table(
    "t",
    "A title with 50 % and <i>",
    ["strategy", "NIID", "NIID published"],
    [[HOSTILE, "1,234.50 ± 0.25", "61.45?"], ["Local", "", "≥ \N{MINUS SIGN}3.00"]],
    notes=["a note_"],
)


def test_spread_is_the_sample_standard_deviation() -> None:
    values = [60.0, 61.5, 63.25]
    assert spread(values) == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert spread([60.0, None]) == "60.00"  # of one value there is none, which is not 0
    assert spread([None]) == spread([]) == number(None) == ""
    assert spread([0.12345], 3) == "0.123"


@pytest.mark.parametrize(
    ("value", "text"), [(1.234, "+1.23"), (-1.236, "\N{MINUS SIGN}1.24"), (-0.001, "0.00"), (None, "")]
)
def test_differences_have_a_sign(value: float | None, text: str) -> None:
    assert signed(value) == text


def test_csv_holds_numbers() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows == [
        ["strategy", "NIID", "NIID std", "NIID published", "NIID published mark"],
        [HOSTILE, "1234.50", "0.25", "61.45", "?"],
        ["Local", "", "", "≥ -3.00", ""],
    ]


def test_a_label_is_no_number_whatever_it_holds() -> None:
    table = Table("name", "title", ["claim", "difference"], [["a ± b", "1.00 ± 2.00"]], labels=1)
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert rows == [["claim", "difference", "difference std"], ["a ± b", "1.00", "2.00"]]


def test_a_name_is_no_formula() -> None:
    table = Table("name", "title", ["=1+1", "difference"], [['=HYPERLINK("x")', "-1.00"], ["@a", "+2.00"]], labels=1)
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert rows == [["'=1+1", "difference"], ['\'=HYPERLINK("x")', "-1.00"], ["'@a", "+2.00"]]


def test_markdown_is_a_table_whatever_the_names_are() -> None:
    lines = TABLE.markdown().splitlines()
    assert lines[2] == "| strategy | NIID | NIID published |"
    assert lines[3] == "| :-- | --: | --: |"
    assert lines[4].startswith(r"| \<b\>a\|b\_\&%\</b\> | 1,234.50 ± 0.25 |")
    assert all(line.replace(r"\|", "").count("|") == 4 for line in lines[2:6])


def test_latex_is_escaped() -> None:
    text = TABLE.latex()
    assert (
        r"\textless{}b\textgreater{}a\textbar{}b\_\&\%\textless{}/b\textgreater{} & 1,234.50 $\pm$ 0.25 & 61.45? \\"
        in text
    )
    assert r"Local &  & $\geq$ $-$3.00 \\" in text
    assert r"\begin{tabular}{lrr}" in text


def test_latex_is_a_float_that_says_what_the_notes_say() -> None:
    begin = [r"\begin{table}", r"\centering", r"\caption{A title with 50 \% and \textless{}i\textgreater{}."]
    begin += [r"a note\_}", r"\label{tab:t}", r"\begin{tabular}{lrr}", r"\toprule"]
    lines = TABLE.latex().splitlines()
    assert lines[: len(begin)] == begin
    assert lines[-3:] == [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    assert r"\caption{A title.}" in Table("name", "A title.", ["a"], [["b"]]).latex()


def test_greek_is_no_stumbling_block_for_latex() -> None:
    text = Table("name", "λ = 0.5", ["δ ≤ 1", "Δ"], [["a", "1"]]).latex()
    assert r"\caption{$\lambda$ = 0.5.}" in text
    assert r"$\delta$ $\leq$ 1 & $\Delta$ \\" in text


def test_html_is_escaped() -> None:
    text = TABLE.html()
    assert "<b>" not in text
    assert "<i>" not in text
    assert '<th scope="row">&lt;b&gt;a|b_&amp;%&lt;/b&gt;</th><td>1,234.50 ± 0.25</td>' in text
    assert "<caption>A title with 50 % and &lt;i&gt;</caption>" in text


def test_a_latex_row_does_not_begin_with_an_option() -> None:
    r"""What follows `\\\\` or a rule in square brackets is a length, and a star belongs to it."""
    table = Table("t", "", ["[a]", "b"], [["[1em]", "1"], ["*", "2"], ["one\n\ntwo", "[3]"]])
    rows = [line for line in table.latex().splitlines() if line.endswith(r"\\")]
    assert rows == [r"{}[a] & b \\", r"{}[1em] & 1 \\", r"{}* & 2 \\", r"one two & [3] \\"]
