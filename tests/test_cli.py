"""The `fedtta` command, in this process; tests/e2e starts it for real."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from fedtta_flwr import cli, control, launch
from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.processes import as_command
from fedtta_flwr.registry import ADAPTERS


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["fedtta", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_list_shows_every_kind_and_every_key(monkeypatch, capsys):
    assert call(monkeypatch, "list") == 0
    shown = capsys.readouterr().out
    for word in ("fedctta", "bn-stats", "digits", "gaussian_noise", "resnet8", "configs/"):
        assert word in shown
    assert call(monkeypatch, "list", "keys") == 0
    shown = capsys.readouterr().out
    assert all(f"  {key} " in shown for key in RunConfig().to_flat())


def test_list_adapters_tells_what_each_changes_sends_and_is_set_to(monkeypatch, capsys):
    assert call(monkeypatch, "list", "adapters") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    listed = dict(zip(ADAPTERS, shown.split("      paper ")[1:], strict=True))
    for name, method in ADAPTERS.items():
        text = " ".join(listed[name].split())
        assert text.startswith(method.paper)
        assert f"updates {method.updates} uploads {method.uploads} keeps {method.keeps} predicts" in text
    defaults = RunConfig().to_flat()
    for key, value in defaults.items():
        if key.partition(".")[0] in ADAPTERS:
            spelled = f'"{value}"' if isinstance(value, str) else str(value).lower()
            assert f"{key} = {spelled}" in shown  # on one line
    assert call(monkeypatch, "list") == 0
    assert "arXiv" not in capsys.readouterr().out  # the short list stays short


def test_listing_adapters_imports_nothing_heavy():
    code = "import sys; sys.argv = ['fedtta', 'list', 'adapters']\nfrom fedtta_flwr import cli\n"
    code += "try: cli.main()\nexcept SystemExit: print({'torch', 'flwr', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_documented_table_is_the_listed_one():
    table = (launch.app_root() / "docs" / "adapters.md").read_text()
    for name, m in ADAPTERS.items():
        assert f"| `{name}` | {m.paper} | {m.updates} | {m.uploads} | {m.keeps} | {m.predicts} |" in table


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "planets"], ["planets", "strategies"]),
        (["run", "--engine", "steam"], ["steam", "local", "flower"]),
        (["run", "--workers", "1"], ["--workers 1", "local has none", "allowed with --engine flower"]),
        (["run", "--insecure"], ["--insecure: --engine local has none", "allowed with --engine deployment"]),
        (["run", "--ca", "ca.crt"], ["--ca ca.crt: --engine local has none", "allowed with --engine deployment"]),
        (["run", "--control", "h:1", "--engine", "flower"], ["--control h:1: --engine flower has none"]),
        (["run", "--engine", "deployment", "--nodes", "2"], ["--nodes 2", "deployment has none", "local or flower"]),
        (["run", "--run-config", "nothing.toml"], ["nothing.toml", "no such file"]),
        (["run", "--run-config", "batch-size"], ["batch-size", "key=value"]),
        (["run", "--run-config", "batch-sise=3"], ["batch-sise", "unknown key"]),
        (["run", "--run-config", "seed='x'"], ["seed", "'x'", "valid integer"]),
        (["run", "--output", "there", "--resume", "here"], ["--output there", "here"]),
        (["run", "--run-config", "output-dir='here'"], ["output-dir", "here", "absolute"]),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_status_2(monkeypatch, capsys, arguments, words):
    assert call(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("error: ")
    assert all(word in err for word in words), err


def test_a_device_that_is_not_here_is_told_once_not_by_every_node(monkeypatch, capsys, tmp_path, warned):
    assert call(monkeypatch, "run", "--run-config", "device='cuda:99'", "--output", str(tmp_path / "run")) == 2
    assert capsys.readouterr().err.startswith("error: device = 'cuda:99': ")
    assert warned == []


def test_every_shipped_config_is_valid_and_begins_with_its_command():
    from fedtta_flwr.run_config import read_overrides

    configs = sorted((launch.app_root() / "configs").glob("*.toml"))
    assert configs
    for path in configs:
        RunConfig.from_flat(read_overrides([str(path)]))
        first, second = path.read_text().splitlines()[:2]
        assert first.startswith("# fedtta run ")
        assert f"configs/{path.name}" in first
        assert second.startswith("# ")


def test_overrides_survive_flowers_syntax():
    from fedtta_flwr.run_config import read_overrides

    overrides = {"strategy": "fedavg", "seed": 3, "fedctta.temperature": 0.5, "output-dir": "/tmp/a b/c", "scores": ""}
    assert read_overrides([control.pairs(overrides)]) == overrides


def test_another_checkout_is_not_run_by_accident(monkeypatch, tmp_path):
    (tmp_path / "fedtta_flwr").mkdir()
    (tmp_path / "server_app.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="another checkout"):
        launch.app_root()


def test_a_checkpoint_is_not_made_where_it_cannot_be_written(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("fedtta_flwr.models.source.train_digits", lambda *_, **__: pytest.fail("trained"))
    monkeypatch.setattr("fedtta_flwr.models.convert.convert", lambda *_, **__: pytest.fail("converted"))
    statistics = ["--mean", "0,0,0", "--std", "1,1,1"]
    convert = ["source", "convert", "x.th", "--architecture", "resnet20-a", "--classes", "10", *statistics]
    for command in (["source", "train"], convert):
        assert call(monkeypatch, *command, "--output", str(tmp_path)) == 2
        assert capsys.readouterr().err.startswith(
            f"error: --output {tmp_path}: is a folder; name the .safetensors file"
        )


@pytest.mark.parametrize(
    ("given", "nodes", "workers"),
    [((), 2, 1), (("--nodes", "4", "--workers", "2"), 4, 2), (("--nodes", "4", "--workers", "99"), 4, 4)],
)
def test_ray_starts_no_more_processes_than_there_are_nodes(monkeypatch, given, nodes, workers):
    started = []
    monkeypatch.setattr(launch, "_superlink", lambda *_: nullcontext(({}, "")))
    monkeypatch.setattr(launch, "control_api", lambda *_: nullcontext())
    monkeypatch.setattr(launch, "start_run", lambda *arguments: started.append(arguments[-1]))
    monkeypatch.setattr(launch, "follow", lambda *_: None)
    assert call(monkeypatch, "run", "--engine", "flower", *given) == 0
    (resources,) = started
    assert dict(pair.split("=") for pair in resources.split()) == {
        "num-supernodes": str(nodes),
        "client-resources-num-cpus": "1",
        "init-args-num-cpus": str(workers),
    }


def test_a_finished_run_is_not_resumed_nor_a_simulation_started_for_it(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": RunConfig().to_flat(), "clients": ["a"], "rounds": 1}))
    (tmp_path / "summary.json").write_text(json.dumps({"finished": True}))
    monkeypatch.setattr(launch, "_superlink", lambda *_: pytest.fail("a SuperLink was started"))
    assert call(monkeypatch, "run", "--engine", "flower", "--resume", str(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: resume = ")
    assert "that run has finished" in line


def test_what_a_terminal_cannot_show_ends_nothing():
    code = "from fedtta_flwr.processes import as_command\nas_command(lambda: print('\u2500 3 %'))"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "? 3 %\n")


def test_closed_outputs_end_nothing_and_no_file_takes_their_place(tmp_path):
    code = (
        "import os, sys\nfrom fedtta_flwr.processes import as_command\n"
        f"file = {str(tmp_path / 'file')!r}\n"
        "def work():\n with open(file, 'w') as out:\n  print(sys.stdout.isatty(), sys.stderr.isatty())\n"
        "  print(out.fileno() > 2, file=out)\n"
        "as_command(work)"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == "True\n"


def test_what_may_not_be_read_is_one_line(capsys):
    def work():
        raise PermissionError(13, "Permission denied", "/home/other/data")

    with pytest.raises(SystemExit) as end:
        as_command(work)
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: /home/other/data: this user may not read it, or enter its folder; see to its rights\n"
    )
