"""One frozen table of hyper-parameters a method: ``[fedctta]``, ``[entropy]`` ... in the run config.

A method's own file says what it does with them. Keys are the field names with hyphens.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


def kebab(name: str) -> str:
    """Return the run-config spelling of a field name."""
    return name.replace("_", "-")


class Options(BaseModel):
    """Base of every table: frozen, strict about types, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


class EntropyOptions(Options):
    """TTA-grad: one gradient step on the prediction entropy (FedTSA, FedCTTA)."""

    learning_rate: Positive = Field(1e-4, description="SGD step size (FedTSA 1e-4, FedCTTA 1e-5)")


class FedCTTAOptions(Options):
    """FedCTTA: clients that answer alike on shared noise help each other."""

    temperature: Positive = Field(1.0, description="softmax(-distance / temperature); 1.0 is the paper")
    noise_samples: Annotated[int, Field(ge=1, le=4096)] = Field(
        64, description="noise images that every client answers"
    )
    ema: Share = Field(0.9, description="share of the previous rounds in a client's mean logits; 0.0 is the paper")


class NoOptions(Options):
    """A method without hyper-parameters."""
