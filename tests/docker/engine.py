"""A Docker engine for tests: the one that is there, or a private one that the test starts and removes."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 60.0
Completed = subprocess.CompletedProcess[str]


def compose_binary() -> str | None:
    """Docker Compose as one program (the extra `docker-test` has it), beside this Python or on PATH."""
    return shutil.which("docker-compose", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@dataclass(frozen=True)
class Engine:
    """Where an engine listens, and Docker's commands against it."""

    env: Mapping[str, str]

    def docker(self, *arguments: str, check: bool = True, **options: object) -> Completed:
        return call("docker", *arguments, env=self.env, check=check, **options)

    def remove_image(self, name: str) -> None:
        """Remove an image and all that was built upon it, the unnamed ones in between included."""
        found = self.docker("image", "inspect", "-f", "{{.Id}}", name, check=False).stdout.split()
        newest_first = list(dict.fromkeys(self.docker("image", "ls", "-aq", "--no-trunc").stdout.split()))
        if not found:
            return
        pairs = self.docker("image", "inspect", "-f", "{{.Id}} {{.Parent}}", *newest_first).stdout.splitlines()
        parent = dict((line + " ").split(" ")[:2] for line in pairs)
        for image in newest_first:
            ancestor = image
            while ancestor not in ("", *found):
                ancestor = parent.get(ancestor, "")
            if ancestor:
                self.docker("image", "rm", "-f", image)


def call(*command: str, check: bool = True, **options: object) -> Completed:
    """Run a command; a failure says what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
    return done


@contextmanager
def running_engine(skip: Callable[[str], None]) -> Iterator[Engine]:
    """Give the engine; `skip` is called with the reason if there can be none."""
    if shutil.which("docker") is None:
        skip("no docker client here")
    if call("docker", "info", check=False).returncode == 0:
        yield Engine(dict(os.environ))
        return
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        skip("no Docker engine answers, and none can be started: that takes dockerd and root")
    with private_engine() as engine:
        yield engine


@contextmanager
def private_engine() -> Iterator[Engine]:
    """Start dockerd on a socket of its own, without touching the machine's firewall; remove all of it at the end."""
    root = Path(tempfile.mkdtemp(prefix="fedtta-docker-"))
    engine = Engine(os.environ | {"DOCKER_HOST": f"unix://{root}/sock", "DOCKER_CONFIG": str(root / "config")})
    command = ["dockerd", "--data-root", f"{root}/data", "--exec-root", f"{root}/exec", "--pidfile", f"{root}/pid"]
    command += ["-H", engine.env["DOCKER_HOST"], "--bridge=none", "--iptables=false", "--ip6tables=false"]
    command += ["--ip-forward=false", "--ip-masq=false"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while engine.docker("info", check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start:\n{(root / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield engine
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        call("umount", f"{root}/exec/netns/default", check=False)
        shutil.rmtree(root, ignore_errors=True)
