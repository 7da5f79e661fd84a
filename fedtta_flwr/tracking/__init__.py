"""Who else is told how a run goes, one file a service; no strategy and no adapter knows of them."""
