"""ClientApp: one message in -> one visit of each hosted client -> one reply. Nothing else."""

import os
import signal
import sys
from pathlib import Path

# A simulation's workers import this module from the working directory that they inherit. That is where the local
# SuperLink was first started, perhaps another checkout, whose code would run unnoticed: go to this one's folder.
if Path(sys.argv[0]).name == "flwr-simulation":
    os.chdir(Path(__file__).resolve().parent)
    # Unless told otherwise Flower asks for no share of a GPU, and Ray would then hide them all: `device = "auto"` would
    # be the CPU without a word. This way all workers see all GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedtta_flwr import client
from fedtta_flwr.processes import end_with_parent

# Flower's own watch over the parent is a thread, whose signal does not wake the main one: the run would go on.
if Path(sys.argv[0]).name == "flwr-simulation":
    end_with_parent(signal.SIGINT)

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Answer which clients are hosted here."""
    return client.hello(message, context)


@app.train("visit")
def visit(message: Message, context: Context) -> Message:
    """Adapt the hosted clients to their next batches."""
    return client.visit(message, context)
