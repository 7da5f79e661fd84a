"""Seconds and bytes of a deployed federation: a server and three devices with TLS and keys on this machine.

    python -m benchmarks.deployment [--adapters bn-stats,tent,entropy] [--rounds N]

Starts the real processes (``fedtta serve``, ``fedtta join``), each device through a relay that counts what passes: TLS,
gRPC and Flower's polling included. Prints how long the processes take to start, the median time of a round, and bytes
per client and round, tensors (what a run reports) beside what the sockets carried. Flower starts a new process for
every message, so three devices on one machine compete for its cores: real devices do not.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fedtta_flwr import nodes
from fedtta_flwr.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("device-0", "device-1", "device-2")
FEDTTA = [sys.executable, "-c", "from fedtta_flwr.cli import main; main()"]
RUN = (
    f"clients='{','.join(NAMES)}' num-clients={len(NAMES)} batch-size=10 slots-per-corruption=30 "
    "corruptions='brightness' spatial-heterogeneity=0.4"
)


class Relay:
    """Passes a device's connection on to the server and counts the bytes."""

    def __init__(self, port: int) -> None:
        self.up = self.down = 0
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            device, _ = self._listening.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                device.close()
                continue
            threading.Thread(target=self._pass, args=(device, server, "up"), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, device, "down"), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                target.sendall(data)
        except OSError:
            pass
        source.close()
        target.close()


def until(condition: Callable[[], bool]) -> float:
    """Wait for a condition; return the seconds that it took."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > 600:
            raise TimeoutError("ten minutes have passed")
        time.sleep(0.05)
    return time.perf_counter() - began


def counted(relays: list[Relay]) -> tuple[int, int]:
    return sum(relay.up for relay in relays), sum(relay.down for relay in relays)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def measure(adapter: str, rounds: int, output: Path, where: list[str], relays: list[Relay]) -> None:
    command = [*FEDTTA, "run", "--engine", "deployment", *where, "--output", str(output)]
    command += ["--run-config", f"{RUN} adapter='{adapter}' rounds={rounds}"]
    log = output.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    # A round's line is written when the next round's replies are there, the last one's after the closing exchange, in
    # which little is sent: up to the line before, from line to line is one round.
    marks = []
    for number in range(1, rounds + 1):
        until(lambda: len(lines(output / "rounds.jsonl")) >= number or process.poll() is not None)  # noqa: B023
        marks.append(counted(relays))
    if process.wait() != 0:
        raise RuntimeError(f"the run with {adapter} failed: {lines(log)[-1:]}")
    seconds = [json.loads(line)["seconds"] for line in lines(output / "rounds.jsonl")][1:]
    total = statistics.median(s["total"] for s in seconds)
    client = statistics.median(s["client"] for s in seconds) / len(NAMES)
    tensors = json.loads((output / "summary.json").read_text())["bytes"]
    up, down = ((marks[-2][i] - marks[0][i]) / (rounds - 2) / len(NAMES) for i in (0, 1))
    print(
        f"{adapter:<10} {total:6.1f} s a round, {client:5.1f} s of it in the app; bytes per client and round: tensors "
        f"{tensors['up']:>9,.0f} up {tensors['down']:>9,.0f} down, on the wire {up:>9,.0f} up {down:>9,.0f} down",
        flush=True,
    )


def import_seconds(module: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", default="bn-stats,tent,entropy")
    parser.add_argument("--rounds", type=int, default=6, help="3 or more")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for module in ("flwr.supernode.cli.flwr_clientapp", "torch", "client_app"):
        print(f"import {module}: {statistics.median(import_seconds(module) for _ in range(3)):.1f} s")
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for arguments in (["server", "keys", "localhost"], ["client", "keys", *NAMES]):
            subprocess.run([str(ROOT / "docker/keys.sh"), *arguments], cwd=folder, check=True, capture_output=True)
        fleet, control, ca = free_port(), f"127.0.0.1:{free_port()}", folder / "keys/ca.crt"
        log = (folder / "server.log").open("wb")
        serve = ["serve", "--certificates", "keys", "--host", "127.0.0.1", "--fleet-port", str(fleet)]
        serve += ["--control", control, "--state-dir", str(folder / "server")]
        try:
            processes.append(subprocess.Popen([*FEDTTA, *serve], cwd=folder, stdout=log, stderr=log))
            took = until(lambda: "startup complete" in (folder / "server.log").read_text())
            print(f"server start: {took:.1f} s")
            relays = [Relay(fleet) for _ in NAMES]
            for name in NAMES:
                nodes.register(control, ca, folder / f"keys/clients/{name}.pub", name)
            for name, relay in zip(NAMES, relays, strict=True):
                join = ["join", f"127.0.0.1:{relay.port}", "--client", name, "--ca", str(ca)]
                join += ["--key", f"keys/clients/{name}", "--state-dir", str(folder / name)]
                processes.append(subprocess.Popen([*FEDTTA, *join], cwd=folder, stdout=log, stderr=log))
            took = until(lambda: [n.status for n in nodes.list_nodes(control, ca)].count("online") == len(NAMES))
            print(f"devices start and join: {took:.1f} s")
            before = counted(relays)
            time.sleep(30)
            up, down = ((counted(relays)[i] - before[i]) * 2 / len(NAMES) for i in (0, 1))
            print(f"a device that waits: {up:,.0f} bytes up and {down:,.0f} down a minute")
            for adapter in options.adapters.split(","):
                where = ["--control", control, "--ca", str(ca)]
                measure(adapter, options.rounds, folder / adapter, where, relays)
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait(timeout=60)


if __name__ == "__main__":
    main()
