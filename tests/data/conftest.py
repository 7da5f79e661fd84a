"""The official CIFAR test images, unpacked once, where the shared data are."""

import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cifar-10-batches-py and cifar100_test.npz."""
    script = SHARED / "unpack.py"
    if not script.is_file():
        pytest.skip("../shared/data/unpack.py is absent")
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True, timeout=300)
    return folder
