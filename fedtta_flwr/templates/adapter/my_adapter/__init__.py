"""An adapter for fedtta_flwr."""
