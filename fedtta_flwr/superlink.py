"""Flower's SuperLink as a module to run, which ends within seconds, even while somebody watches a run."""

import sys
from functools import partial

import uvicorn
from flwr.superlink.cli import flower_superlink

#: for which a server that is told to end waits for answers that are under way: a run's log is one until the run's end
END_SECONDS = 3

if __name__ == "__main__":
    uvicorn.run = partial(uvicorn.run, timeout_graceful_shutdown=END_SECONDS)
    sys.argv[0] = "flower-superlink"
    flower_superlink()
