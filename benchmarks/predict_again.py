"""Predict the five test sets of a finished run of two heads once more, with another head or other options: no training.

    python -m benchmarks.predict_again RUN --state-dir DIR --run-config "btfl.prior='batch' batch-size=1" [...]

RUN was made with ``checkpoint-every=1`` and ``state-dir=DIR``. What differs must need nothing that was not measured or
trained then: after a run of BTFL its options but ``sparsity``, ``batch-size``, the heads global, personal and knn-per.
One line for each ``--run-config``: accuracy in % on the sets A to E, the clients' mean, and the mean of the five.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

from flwr.app import ConfigRecord, RecordDict

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.btgfl import SETS
from fedtta_flwr.files import read_tensors
from fedtta_flwr.memory import Memory
from fedtta_flwr.phases import phases
from fedtta_flwr.run_config import read_overrides
from fedtta_flwr.strategies.checkpoint import FILE, personal
from fedtta_flwr.tgfl import HeadBench, visit_heads


def main() -> None:
    """Print a line for each run config."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--run-config", action="append", default=[])
    arguments = parser.parse_args()
    flat = json.loads((arguments.run / "config.json").read_text())["config"]
    tensors, about = read_tensors(arguments.run / FILE)
    received = personal(tensors, about)
    data, folder = None, arguments.state_dir / about["run"]
    for overrides in arguments.run_config or ["scores='tta'"]:
        bench = HeadBench(RunConfig.from_flat(flat | {"scores": "tta"} | read_overrides([overrides])))
        data = bench.data = data or bench.data  # corrupted images are made once
        accuracies = []
        for name in SETS:
            clients, number = bench.config.client_names(), phases(bench.config).index(name) + 1
            request = ConfigRecord({"round": number, "resuming": list(clients), "resume": int(about["round"])})
            visits = [
                visit_heads(bench, client, request, received[client], Memory(RecordDict(), folder))
                for client in clients
            ]
            if any(visited.forgot for visited in visits):
                raise SystemExit(f"{folder}: lacks the state of a client; name the --state-dir of that run")
            pairs = [[int(visited.counts[key][0].sum()) for key in ("tta", "seen")] for visited in visits]
            accuracies.append(100 * fmean(correct / seen for correct, seen in pairs))
        accuracies.append(fmean(accuracies))
        print(" ".join(f"{accuracy:6.2f}" for accuracy in accuracies), overrides, flush=True)


if __name__ == "__main__":
    main()
