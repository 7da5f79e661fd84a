"""Corruptions, data sets and streams: who sees which samples when."""
