"""In which order groups of clients meet the corruptions: the notation of the key ``group-orders``.

``"4:+0,3:+1,3:reverse"``: the first 4 clients, by their names, meet them as given, the next 3 start one corruption
later (and end with the first), the last 3 go backwards. ``random`` gives every client of the group an order of its own.
"""

import re
from dataclasses import dataclass

from fedtta_flwr.errors import ConfigError
from fedtta_flwr.seeding import numpy_rng

_PART = re.compile(r"(\d{1,6}):(?:\+(\d{1,4})|(reverse|random))")
ALLOWED = "COUNT:ORDER,... with ORDER one of +K (start K corruptions later), reverse, random"


@dataclass(frozen=True)
class GroupOrder:
    """How many clients share an order, and which.

    Attributes
    ----------
    clients : int
        Number of clients.
    kind : {"shift", "reverse", "random"}
        Which order.
    shift : int
        Of "shift".
    """

    clients: int
    kind: str
    shift: int = 0

    def positions(self, corruptions: int, seed: int, client: str) -> list[int]:
        """Return which of the corruptions [C] stands at each position."""
        if self.kind == "reverse":
            return list(range(corruptions))[::-1]
        if self.kind == "random":
            return [int(c) for c in numpy_rng(seed, client, "corruption order").permutation(corruptions)]
        return [(position + self.shift) % corruptions for position in range(corruptions)]


def parse_group_orders(text: str) -> tuple[GroupOrder, ...]:
    """Read ``group-orders``; empty text gives an empty tuple.

    Raises
    ------
    ConfigError
        It does not follow the notation.
    """
    orders = []
    for part in [p.strip() for p in text.split(",")] if text.strip() else []:
        match = _PART.fullmatch(part)
        if match is None or int(match[1]) == 0:
            raise ConfigError(f"group-orders = {text!r}: {part!r} is not understood; allowed: {ALLOWED}")
        orders.append(GroupOrder(int(match[1]), match[3] or "shift", int(match[2] or 0)))
    return tuple(orders)


def check_group_orders(text: str, clients: int) -> None:
    """Refuse orders that are not for exactly so many clients.

    Raises
    ------
    ConfigError
        Naming both numbers.
    """
    total = sum(order.clients for order in parse_group_orders(text))
    if text.strip() and total != clients:
        raise ConfigError(f"group-orders = {text!r}: for {total} clients; allowed: for num-clients = {clients}")
