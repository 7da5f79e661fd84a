"""Two heads on one extractor: how they are trained, and how a test sample is predicted by them. Torch, not Flower."""
