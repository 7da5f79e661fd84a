"""A strategy for fedtta_flwr."""
