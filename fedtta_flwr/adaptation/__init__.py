"""Client side: how a client adapts to one batch without labels. Knows torch, not Flower."""
