"""Sending a round's messages and collecting the replies, with a short adaptive wait."""

import math
import secrets
import time
from collections.abc import Callable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedtta_flwr.strategies.mailbox import Mailbox, is_far

FIRST_WAIT, LONGEST_WAIT = 0.001, 1.0  # seconds
SAID_AFTER = 30.0  # seconds of waiting, and twice as many, and so on
LONGEST_HERE = 0.05  # where the grid is in this process: asking it costs next to nothing
LOOK_EVERY = 1.0


def unguessable() -> str:
    """Return what makes a message's id, a hash of its content, one that nobody but its receiver knows.

    A SuperLink takes a reply from any device that names the message which it answers.
    """
    return secrets.token_hex(16)


def send_and_receive(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    meanwhile: Callable[[], object] = lambda: None,
    largest: Sequence[float] | None = None,
    waiting: Callable[[list[Message]], object] = lambda messages: None,
) -> list[Message]:
    """Push messages and pull their replies until all are there or the time is up.

    Flower's own loop sleeps three seconds between two polls of a deployed SuperLink; this one sleeps one, since every
    poll is a request, some queries and a line in the SuperLink's log, and no reply comes within three. In a simulation
    it begins with a millisecond and doubles it up to 50.

    Parameters
    ----------
    grid : Grid
        Any of Flower's grids, or a `LocalGrid`.
    messages : sequence of Message
        At most one a node. Must be a list or tuple: the grid goes over it twice.
    timeout : float
        Seconds.
    meanwhile : callable
        Called every second of waiting.
    largest : sequence of float, optional
        Bytes of the largest reply to each message that is taken.
    waiting : callable
        Called with the messages that are not answered yet after half a minute, a minute, two, four, ...

    Returns
    -------
    list of Message
        In the order of arrival; whose reply is missing is for the caller to find out.
    """
    mail = Mailbox()
    mail.push(grid, messages, [math.inf] * len(messages) if largest is None else largest)
    first, longest = (LONGEST_WAIT, LONGEST_WAIT) if is_far(grid) else (FIRST_WAIT, LONGEST_HERE)
    began = looked = time.monotonic()
    deadline, wait, said_after = looked + timeout, first, SAID_AFTER
    replies: list[Message] = []
    while mail.waiting:
        arrived = mail.pull(grid)
        replies += arrived
        if arrived:
            wait = first
            continue
        if time.monotonic() - looked > LOOK_EVERY:
            meanwhile()
            looked = time.monotonic()
        if time.monotonic() - began > said_after:
            waiting([m for m in messages if m.metadata.message_id in mail.waiting])
            said_after *= 2
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        time.sleep(min(wait, remaining))
        wait = min(2 * wait, longest)
    return replies
