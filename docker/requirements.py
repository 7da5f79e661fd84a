"""Split the dependencies in pyproject.toml into torch.txt and others.txt, so that each gets a layer of its own.

    python requirements.py PYPROJECT FOLDER

Extras are left out: `flwr[simulation]` brings Ray, which a deployed federation never starts (some 200 MB).
"""

import re
import sys
import tomllib
from pathlib import Path

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
dependencies = tomllib.loads(source.read_text())["project"]["dependencies"]
parts: dict[str, list[str]] = {"torch": [], "others": []}
for dependency in dependencies:
    parts["torch" if dependency.startswith("torch") else "others"].append(re.sub(r"\[.*?\]", "", dependency))
for name, lines in parts.items():
    (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
