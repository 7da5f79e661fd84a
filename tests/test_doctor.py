"""What the doctor says of this machine; tests/e2e has it look at a real server."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedtta_flwr import cli, credentials, doctor
from fedtta_flwr.deploy import Address

ROOT = Path(__file__).parents[1]


def levels(*words: str, **arguments: object) -> list[str]:
    """The levels of the findings whose text holds all the words."""
    found = list(doctor.examine(**arguments))  # type: ignore[arg-type]
    assert all("\n" not in str(finding) for finding in found)
    return [finding.level for finding in found if all(word in finding.text for word in words)]


def test_this_machine_is_well(tmp_path: Path) -> None:
    assert {finding.level for finding in doctor.examine(state=tmp_path / "new" / "one")} == {"ok"}
    assert not (tmp_path / "new").exists()  # looking changes nothing


def test_another_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda package: "1.42.0")
    assert levels("flwr 1.42.0", "1.39", "pip install", state=tmp_path) == ["FAIL"]


def test_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PYTHONS", ((3, 98), (3, 99)))
    assert levels("python", "3.98 to 3.99", state=tmp_path) == ["FAIL"]


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    assert levels("cuda:99", state=tmp_path, device="cuda:99") == ["FAIL"]


def test_the_data_folder(tmp_path: Path) -> None:
    assert levels("data folder", "no entries", state=tmp_path, data_dir=tmp_path) == ["warn"]
    assert levels("data folder", "No such file", state=tmp_path, data_dir=tmp_path / "none") == ["FAIL"]
    (tmp_path / "a.png").touch()
    assert levels("data folder", "1 entries", state=tmp_path, data_dir=tmp_path) == ["ok"]
    assert levels("data folder", "Not a directory", state=tmp_path, data_dir=tmp_path / "a.png") == ["FAIL"]


def test_the_source_model(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    assert levels("m.safetensors", "no such file", state=tmp_path, checkpoint=file) == ["FAIL"]
    save_file({"weight": torch.zeros(2)}, file)
    assert levels("checkpoint", "1 tensors", state=tmp_path, checkpoint=file) == ["ok"]
    file.write_bytes(file.read_bytes()[:-1])
    assert levels("damaged safetensors", state=tmp_path, checkpoint=file) == ["FAIL"]
    assert levels("a folder, for robustbench:ID", state=tmp_path, checkpoint=tmp_path) == ["ok"]


def test_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    assert levels("state folder", "cannot be written", state=file / "inside") == ["FAIL"]
    monkeypatch.setattr(doctor, "LITTLE_SPACE", 1e30)
    assert levels("state folder", "GB free", "make room", state=tmp_path) == ["warn"]
    monkeypatch.setattr(doctor, "NO_SPACE", 1e29)
    assert levels("state folder", "GB free", "make room", state=tmp_path) == ["FAIL"]


def test_keys_and_certificates(tmp_path: Path) -> None:
    tmp_path = tmp_path / "a b"
    tmp_path.mkdir()
    for arguments in (["server", "k", "fed"], ["client", "k", "cam"]):
        subprocess.run([ROOT / "docker" / "keys.sh", *arguments], cwd=tmp_path, check=True, capture_output=True)
    ca, key = tmp_path / "k" / "ca.crt", tmp_path / "k" / "clients" / "cam"
    assert levels("CA", "valid until", state=tmp_path, ca=ca) == ["ok"]
    assert levels("key", "secp384r1, private", state=tmp_path, key=key) == ["ok"]
    key.chmod(0o640)
    assert levels("others may read it", f"chmod 600 '{key}'", state=tmp_path, key=key) == ["warn"]
    assert levels("no private key", state=tmp_path, key=ca) == ["FAIL"]
    assert levels("no PEM certificate", state=tmp_path, ca=key) == ["FAIL"]


def test_a_ca_of_another_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import datetime, timedelta

    subprocess.run([ROOT / "docker" / "keys.sh", "server", "k", "fed"], cwd=tmp_path, check=True, capture_output=True)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.now(tz) + timedelta(days=4000)  # type: ignore[arg-type]

    monkeypatch.setattr(credentials, "datetime", Later)
    assert levels("CA", "this clock says", state=tmp_path, ca=tmp_path / "k" / "ca.crt") == ["FAIL"]


def test_a_ca_that_ends_soon_and_one_that_follows_it(tmp_path: Path) -> None:
    for folder, days in (("old", "5"), ("new", "3650")):
        env = os.environ | {"CA_DAYS": days, "DAYS": "2"}
        command = [ROOT / "docker" / "keys.sh", "server", folder, "fed"]
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    old, new = (tmp_path / folder / "ca.crt" for folder in ("old", "new"))
    assert levels("CA", "make a new CA in time", state=tmp_path, ca=old) == ["warn"]
    old.write_bytes(old.read_bytes() + new.read_bytes())
    assert levels("CA", "valid until", state=tmp_path, ca=old) == ["ok"]


def test_a_server_that_is_absent(tmp_path: Path) -> None:
    assert levels("127.0.0.1:1 cannot be reached", state=tmp_path, server=Address("127.0.0.1", 1)) == ["FAIL"]


@pytest.mark.parametrize(("folder", "status"), [("here", 0), ("nowhere", 1)])
def test_the_status_says_whether_all_is_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: str, status: int
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = ["doctor", "--data-dir", f"~/{folder}", "--state-dir", "~"]  # after "=" no shell fills in ~
    monkeypatch.setattr("sys.argv", ["fedtta", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert int(exit_.value.code or 0) == status
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("ok", "warn", "FAIL") for line in lines)
    assert any(line.startswith("FAIL") for line in lines) == bool(status)
