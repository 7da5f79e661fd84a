"""Benchmarks: a grid of runs from one file, each in a process of its own, and what the papers published for it."""
