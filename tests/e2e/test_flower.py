"""`flwr run .` for real: Ray, a local SuperLink, two checkouts."""

import json

import pytest


def test_flwr_run_prints_the_table_and_leaves_a_run_directory(flwr_run, root, small, tmp_path):
    printed, summary = flwr_run(root, small, "run")
    assert summary is not None, printed
    assert summary["finished"]
    assert summary["rounds"] == 4
    assert set(summary["accuracy"]) == {"source", "local", "pre", "tta", "post"}
    assert "accuracy in %" in printed
    average = next(line for line in printed.splitlines() if line.strip().startswith("average"))
    assert [float(word) for word in average.split()[1:]] == [
        round(summary["accuracy"][score]["micro"], 2) for score in ("source", "local", "pre", "tta", "post")
    ]
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]


def test_three_routes_give_the_same_metrics(fedtta, small, tmp_path):
    routes = {
        "local": ["--engine", "local", "--nodes", "1"],
        "one worker": ["--engine", "flower", "--nodes", "2", "--workers", "1"],
        "two workers": ["--engine", "flower", "--nodes", "4", "--workers", "2"],
    }
    accuracies, matrices = {}, {}
    for name, arguments in routes.items():
        done = fedtta("run", *arguments, "--run-config", small, "--output", str(tmp_path / name))
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        accuracies[name] = summary["accuracy"]
        matrices[name] = [
            json.loads(line)["collaboration"]["self_weight"] for line in (tmp_path / name / "rounds.jsonl").open()
        ]
    assert accuracies["local"]["post"]["micro"] > accuracies["local"]["source"]["micro"]
    assert accuracies["one worker"] == accuracies["local"]
    assert accuracies["two workers"] == accuracies["local"]
    assert matrices["one worker"] == matrices["two workers"] == matrices["local"]


def test_a_second_checkout_runs_its_own_code(flwr_run, checkout, small):
    first, second = checkout("first"), checkout("second")
    _, summary = flwr_run(first, small, "a")
    assert summary is not None
    assert summary["finished"]

    # The local SuperLink that the first checkout started serves the second one, too.
    marked = second / "fedtta_flwr" / "client.py"
    marked.write_text(marked.read_text() + '\nprint("the second checkout adapts", flush=True)\n')
    printed, summary = flwr_run(second, small, "b")
    assert summary is not None, printed
    assert summary["finished"]

    # Without the guard in client_app.py the first one's client code would run, and the server refuses it.
    app = second / "client_app.py"
    app.write_text(app.read_text().replace("os.chdir(", "str("))
    printed, summary = flwr_run(second, small, "c")
    assert summary is None
    assert "runs other code than the server" in printed


def test_workers_see_the_gpus_that_the_command_sees(fedtta, small, tmp_path):
    """Ray hides them from who asks for no share of one, as Flower does."""
    (tmp_path / "peeking_plugin.py").write_text(
        "import os, pathlib, sys\n"
        "from fedtta_flwr.adaptation.bn_stats import BNStats\n"
        "class Peeking(BNStats):\n"
        "    def step(self, x):\n"
        "        seen = os.environ['CUDA_VISIBLE_DEVICES']\n"
        "        (pathlib.Path(__file__).parent / f'seen-{os.getpid()}').write_text(f'{sys.argv[0]} {seen}')\n"
        "        return super().step(x)\n"
    )
    done = fedtta(
        *("run", "--engine", "flower", "--output", str(tmp_path / "run"), "--run-config", small),
        *("--run-config", "adapter='peeking_plugin:Peeking'"),
        FEDTTA_PLUGINS="peeking_plugin",
        PYTHONPATH=str(tmp_path),
        CUDA_VISIBLE_DEVICES="7",  # where there is no such one, it computes on the CPU
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [path.read_text() for path in tmp_path.glob("seen-*")]
    assert any("ray" in line for line in seen), seen
    assert all(line.endswith(" 7") for line in seen), seen


def test_a_failed_run_exits_non_zero(fedtta, small, tmp_path):
    plugin = tmp_path / "raising_plugin.py"
    plugin.write_text(
        "from fedtta_flwr.strategies.local import Local\n"
        "class Raising(Local):\n"
        "    def collaboration_matrix(self, updates):\n"
        "        raise ZeroDivisionError('the matrix is not there')\n"
    )
    done = fedtta(
        *("run", "--engine", "flower", "--output", str(tmp_path / "run"), "--run-config", small),
        *("--run-config", "strategy='raising_plugin:Raising'"),
        FEDTTA_PLUGINS="raising_plugin",
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode != 0
    assert "the matrix is not there" in done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"] is False


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("strategy='fedsgd'", ["strategy", "fedsgd", "fedctta"]),
        ("batch-size=0", ["batch-size", "0", "1 to 65536"]),
        ("batch-size=798", ["batch-size", "798", "797"]),
        ("checkpoint='/nowhere/model.safetensors'", ["/nowhere/model.safetensors"]),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_starts(fedtta, tmp_path, override, words):
    for engine in ("local", "flower"):
        output = tmp_path / f"run-{engine}"
        done = fedtta("run", "--engine", engine, "--run-config", override, "--output", str(output))
        assert done.returncode == 2
        assert done.stdout == ""
        assert len(done.stderr.strip().splitlines()) == 1
        assert all(word in done.stderr for word in words), done.stderr
        assert not output.exists()
