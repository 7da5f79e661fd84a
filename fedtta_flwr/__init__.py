"""Federated test-time adaptation on Flower."""

__version__ = "0.1.0"
