"""Seconds that the 15 corruptions take at one severity, on all cores.

Run from the repository's root: ``python -m benchmarks.corruptions [--images N]``. The target is
10,000 images x 15 corruptions in under 4 minutes on 2 cores. Frost needs its photographs (the
package imagecorruptions-imaug, or the environment variable FEDTTA_FROST_DIR) and is left out
without them.
"""

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from fedtta_flwr.data.corruptions import CORRUPTIONS, corrupt
from fedtta_flwr.errors import DataError

SHARE = 500  # images per task: small enough to keep every core busy to the end


def make_share(name: str, severity: int, start: int, stop: int) -> None:
    """Corrupt images `start` to `stop` of a made-up data set."""
    images = np.random.default_rng(start).integers(0, 256, size=(stop - start, 32, 32, 3), dtype=np.uint8)
    corrupt(images, name, severity, seed=0, indices=np.arange(start, stop))


def main() -> None:
    """Print the seconds of each corruption and of all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000, metavar="N")
    parser.add_argument("--severity", type=int, default=5, choices=range(1, 6))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N")
    options = parser.parse_args()

    total = 0.0
    with ProcessPoolExecutor(options.workers) as pool:
        for name in CORRUPTIONS:
            started = time.perf_counter()
            shares = [
                pool.submit(make_share, name, options.severity, at, min(at + SHARE, options.images))
                for at in range(0, options.images, SHARE)
            ]
            try:
                for share in shares:
                    share.result()
            except DataError as error:
                print(f"{name:20s} left out: {error}")
                continue
            seconds = time.perf_counter() - started
            total += seconds
            print(f"{name:20s} {seconds:7.2f} s", flush=True)
    print(f"{'total':20s} {total:7.2f} s  ({options.images} images, {options.workers} processes)")


if __name__ == "__main__":
    main()
