"""Names of strategies, adapters and heads."""

import pytest

from fedtta_flwr.adaptation.base import Adapter
from fedtta_flwr.heads.base import Predictor
from fedtta_flwr.registry import ADAPTERS, HEADS, STRATEGIES
from fedtta_flwr.resolve import resolve
from fedtta_flwr.strategies.base import PersonalizedStrategy


@pytest.mark.parametrize(
    ("known", "base"),
    [(STRATEGIES, PersonalizedStrategy), (ADAPTERS, Adapter), (HEADS, Predictor)],
    ids=["strategies", "adapters", "heads"],
)
def test_every_name_is_a_class_of_its_kind(known: dict[str, tuple[str, ...]], base: type) -> None:
    for name, (_, text, *_) in known.items():
        found = resolve("x", name, known)
        assert issubclass(found, base)
        assert not getattr(found, "__abstractmethods__", ())
        assert text
