"""No adaptation: the source model as it is."""

from torch import Tensor

from fedtta_flwr.adaptation.base import Adapter, State


class Source(Adapter):
    """The baseline that every table begins with: predicts, changes nothing, uploads nothing."""

    def select(self) -> State:
        """Return nothing: no tensor changes."""
        return {}

    def step(self, x: Tensor) -> Tensor:
        """Return the source model's logits [B, K]."""
        return self.predict(x)
