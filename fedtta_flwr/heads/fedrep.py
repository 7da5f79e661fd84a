"""FedRep: shared representation, local heads (Collins et al., ICML 2021, arXiv 2102.07078)."""

from fedtta_flwr.heads.base import Recipe
from fedtta_flwr.heads.personal import Personal
from fedtta_flwr.options import Options


class FedRep(Personal):
    """Predict by the personal head, the only one: there is none for all.

    In training (``heads = "fedrep"``) every client fits its head to the received extractor, then the extractor to its
    head, for an epoch each at least; the extractor alone is averaged (algorithm 1).
    """

    @classmethod
    def recipe(cls, options: Options) -> Recipe:
        """Return the head first, then the extractor."""
        del options
        return Recipe(heads="fedrep")
