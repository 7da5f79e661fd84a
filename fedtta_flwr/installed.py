"""The copies of this app that Flower has installed."""

import shutil

from flwr.common.constant import APP_DIR
from flwr.supercore.utils import get_flwr_home

APP = "fedtta.fedtta-flwr"  # as pyproject.toml says: publisher and name


def forget_copies() -> None:
    """Remove the copies of this app from Flower's folder; each run brings its own again.

    Flower copies an app file by file to where it belongs, and takes what is there for all of it: a copy that a full
    disk or a kill cut short would keep this node out of every run.
    """
    for copy in (get_flwr_home() / APP_DIR).glob(f"{APP}.*"):
        shutil.rmtree(copy, ignore_errors=True)
