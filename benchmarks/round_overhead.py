"""Seconds that the round loop adds to a round, in a Ray simulation and on LocalGrid.

    python -m benchmarks.round_overhead [--rounds N]

Runs the same federation without any adaptation, score or descriptor, so that next to nothing is computed, and prints
the median time of a round in which no client computed (transport), and of the server's own work. In a simulation
Flower's dispatcher looks for messages every 0.1 s, which no round loop can avoid: what is above that is ours.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = "adapter='source' strategy='local' scores='' num-clients=20"


def measure(engine: str, rounds: int, directory: Path) -> None:
    output = directory / engine
    command = [sys.executable, "-c", "from fedtta_flwr.cli import main; main()", "run", "--engine", engine]
    command += ["--run-config", f"{CONFIG} rounds={rounds}", "--output", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line)["seconds"] for line in (output / "rounds.jsonl").open()][1:]
    transport = statistics.median(line["transport"] for line in lines)
    server = statistics.median(line["server"] for line in lines)
    print(
        f"{engine:<8} {len(lines)} rounds: transport {transport * 1e3:7.1f} ms, server {server * 1e3:6.1f} ms a round"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        for engine in ("local", "flower"):
            measure(engine, rounds, Path(directory))


if __name__ == "__main__":
    main()
