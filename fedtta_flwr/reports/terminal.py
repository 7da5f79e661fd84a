"""What a run prints: a progress line now and then, and the table at the end."""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from io import StringIO
from logging import WARNING
from pathlib import Path

from flwr.common.logger import log
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedtta_flwr.config import SCORES, RunConfig
from fedtta_flwr.errors import few
from fedtta_flwr.files import Outage
from fedtta_flwr.reports.run_directory import RunDirectory
from fedtta_flwr.strategies.rounds import Round

EVERY = 5.0  # seconds between two progress lines
WIDTH = 110  # characters of a line of the table at most
TITLES = {
    "source": "source model",
    "local": "local adaptation",
    "pre": "federation: pre",
    "tta": "federation: tta",
    "post": "federation: post",
}
#: where two heads predict; the score `tta` is that of the run's `head`
HEAD_TITLES = {"source": "global head", "local": "personal head"}

IN_VAIN = "all steps were undone, their result was not finite: look at the step size, or at the data"
COLLAPSE = (
    "predictions are hardly anything but one class: the images show no other, or the source model fails on them, or "
    "adaptation has collapsed, and a smaller step size or reset = 'collapse' may help"
)


class Terminal:
    """Prints progress with the time left, then the table of accuracies.

    Plain lines, no cursor movement: Flower streams them from another process.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._outage = Outage(Path("standard output"))
        self._rounds, self._clients, self._scored = 0, 0, False
        self._before: int | None = None  # rounds of an earlier process, of a run that goes on
        self._titles, self._rows, self._keys = TITLES, "corruption", ("per_corruption", "micro")
        self._mean, self._latest = "over all samples", ""
        self._warned: set[tuple[str, str]] = set()
        self._began = self._printed = 0.0

    def on_start(self, config: RunConfig, clients: tuple[str, ...], rounds: int) -> None:
        """Start the clock."""
        self._rounds, self._clients, self._scored = rounds, len(clients), bool(config.score_names())
        if config.task == "tgfl":
            self._titles, self._rows = HEAD_TITLES | {"tta": config.head}, "test set"
            self._keys = ("per_corruption_mean_clients", "mean_clients")  # as the papers have it
            self._mean = "means over the clients"
        self._began = self._printed = time.monotonic()
        self._say(f"{len(clients)} clients, {rounds} rounds -> {self._directory.path}")

    def on_round(self, round_: Round) -> None:
        """Print a line if the last one is some seconds old; that of the last round when the run is over.

        Its `post` comes with the closing exchange only, and the table says what the last line says. Accuracies are of
        all rounds so far; where there are none, the line says what the latest round brought. Clients are warned of when
        a round of theirs comes to nothing, or they collapse, for the first time.
        """
        if not round_.closing:
            self._latest = f"{len(round_.clients)} of {self._clients} clients, {round_.samples:,} samples"
            if round_.loss is not None:
                self._latest += f", training loss {round_.loss:.4g}"
            if round_.mean_confidence is not None:
                self._latest += f", confidence {round_.mean_confidence:.2f}"
            if shares := round_.largest_share.values():
                self._latest += f", one class at most {max(shares):.0%}"
        in_vain = [client for client, steps in round_.undone.items() if steps == round_.steps[client]]
        self._warn(round_.number, in_vain, IN_VAIN)
        self._warn(round_.number, round_.collapsed, COLLAPSE)
        now, number = time.monotonic(), min(round_.number, self._rounds)
        if self._before is None:
            self._before = round_.number - 1
        if not round_.closing and (now - self._printed < EVERY or number == self._rounds):
            return
        self._printed = now
        elapsed = now - self._began
        left = elapsed / max(1, number - self._before) * (self._rounds - number)
        found = ((score, self._directory.board.accuracy(score)) for score in SCORES)
        scores = "  ".join(f"{score} {accuracy[self._keys[1]]:.1f}%" for score, accuracy in found if accuracy)
        brought = f"accuracy so far: {scores}" if scores else self._latest
        self._say(f"round {number}/{self._rounds}  {brought}  {elapsed:.0f} s, {left:.0f} s left")

    def on_end(self) -> None:
        """Print the table of accuracies in percent, per corruption and on average."""
        summary = self._directory.summary(finished=True)
        accuracies = summary["accuracy"]
        seconds = summary["seconds"]
        self._say(
            f"{summary['rounds']} rounds in {seconds['total']:.1f} s (clients' compute {seconds['client']:.1f}, server "
            f"{seconds['server']:.1f}, transport {seconds['transport']:.1f}); per client and round "
            f"{summary['bytes']['up']:,.0f} bytes up, {summary['bytes']['down']:,.0f} down{_memory(summary['memory'])}"
        )
        if summary["screened"]:
            self._say(f"left out of rounds (how many): {_whose(summary['screened'])}; rounds.jsonl says why")
        if summary["rolled_back"]:
            number = f"{summary['rolled_back']} of {summary['steps']}"
            self._say(f"{number} steps were undone, their result was not finite: {_whose(summary['undone'])}")
        if summary["collapsed"]:
            self._say(f"predictions of hardly anything but one class (rounds): {_whose(summary['collapsed'])}")
        if summary["clipped"]:
            self._say(f"changes that were scaled down, far larger than others' (rounds): {_whose(summary['clipped'])}")
        self._say(f"results: {self._directory.path}")
        if not accuracies:
            self._say(f"no scores: {'nobody had labels' if self._scored else '`scores` is empty'}")
            return
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(self._rows)
        for score in accuracies:
            table.add_column(self._titles[score], justify="right")
        for domain in self._directory.board.domains():
            row = [accuracy[self._keys[0]].get(domain) for accuracy in accuracies.values()]
            # As it is: what a device names so is no markup of rich's.
            table.add_row(Text(domain), *("" if value is None else f"{value:.2f}" for value in row))
        table.add_section()
        table.add_row("average", *(f"{accuracy[self._keys[1]]:.2f}" for accuracy in accuracies.values()))
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
        page = StringIO()
        Console(file=page, width=min(width, WIDTH), color_system=None).print(table)
        self._say(f"accuracy in %, {self._mean}\n{page.getvalue()}")

    def _warn(self, round_: int, clients: Sequence[str], finding: str) -> None:
        if new := sorted(client for client in clients if (client, finding) not in self._warned):
            self._warned |= {(client, finding) for client in new}
            log(WARNING, "round %d: %s: %s", round_, few(new), finding)

    def _say(self, text: str) -> None:
        with self._outage.endured():  # a log may be on a full disk, and who reads may have gone
            print(text, flush=True)


def _whose(counts: Mapping[str, int]) -> str:
    return few([f"{client} ({number})" for client, number in counts.items()])


def _memory(peaks: Mapping[str, int | str] | None) -> str:
    """Return in words how much memory a process took at most."""
    known = [f"{where} {peak / 2**20:,.0f}" for where, peak in (peaks or {}).items() if isinstance(peak, int)]
    return f"; peak memory in MiB: {', '.join(known)}" if known else ""
