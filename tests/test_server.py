"""From a run config to a strategy."""

import json
import sys
from pathlib import Path

import pytest

from fedtta_flwr.config import RunConfig
from fedtta_flwr.errors import ConfigError, FederationError, FedTTAError
from fedtta_flwr.local_grid import LocalGrid
from fedtta_flwr.models import build
from fedtta_flwr.models.checkpoints import save
from fedtta_flwr.reports.terminal import Terminal
from fedtta_flwr.server import doubts, federation, make_strategy
from fedtta_flwr.strategies.fedavgm import FedAvgM
from fedtta_flwr.strategies.fedctta import FedCTTA
from tests.conftest import TINY, RecordingGrid


def test_a_name_becomes_its_strategy() -> None:
    assert isinstance(make_strategy(RunConfig()), FedCTTA)


def test_a_plugin_that_is_no_strategy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", "collections")
    with pytest.raises(ConfigError, match=r"collections:Counter.*PersonalizedStrategy"):
        make_strategy(RunConfig(strategy="collections:Counter"))


class Slower(FedAvgM):
    """One of a user's own, known by no name."""


@pytest.mark.parametrize(
    "method", [{"strategy": "fedavgm"}, {"strategy": "ldawa"}, {"task": "tgfl"}, {"strategy": f"{__name__}:Slower"}]
)
def test_no_weight_is_capped_where_all_receive_one_model(method: dict[str, str], monkeypatch) -> None:
    monkeypatch.setenv("FEDTTA_PLUGINS", __name__.partition(".")[0])
    with pytest.raises(ConfigError, match=r"weight-cap = 0\.5: .* sends one model to all; allowed: 1\.0"):
        make_strategy(RunConfig.from_flat(method | {"weight-cap": 0.5}))
    make_strategy(RunConfig.from_flat(method))


def test_a_plugin_that_raises_on_import_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "raising_on_import.py").write_text("raise RuntimeError('first line\\nsecond line')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", "raising_on_import")
    with pytest.raises(ConfigError, match="RuntimeError: first line second line") as caught:
        make_strategy(RunConfig(strategy="raising_on_import:Mine"))
    assert "\n" not in str(caught.value)


BROKEN = """
import torch

from fedtta_flwr.adaptation.source import Source
from fedtta_flwr.errors import ConfigError
from fedtta_flwr.strategies.base import PersonalizedStrategy
from fedtta_flwr.strategies.local import Local

def broken(here):
    return 1 / here  # line 10

class Raising(Local):
    def __init__(self, config):
        super().__init__(config)
        self.share = broken(0)

class Unlike(Local):
    def __init__(self):
        pass

class Forgetful(Local):
    def __init__(self, config):
        self.share = 1

class Abstract(PersonalizedStrategy):
    pass

class Choosy(Local):
    def __init__(self, config):
        raise ConfigError("choosy.share = 2: allowed: 0 to 1")

class RaisingAdapter(Source):
    def select(self):
        return {"fc.weight": self.model.nothing}

class Matrix(Local):
    def collaboration_matrix(self, updates):
        return torch.ones(len(updates), len(updates))

class Half(Local):
    def collaboration_matrix(self, updates):
        return torch.softmax(torch.arange(16.0).reshape(4, 4), dim=1).half()

class Undefined(Local):
    def personalize(self, updates):
        return {name: t * torch.nan for name, t in updates.state.items()}

class RaisingLate(Local):
    def collaboration_matrix(self, updates):
        if updates.round == 2:
            broken(0)
        return super().collaboration_matrix(updates)

class Remembering(Local):
    def memory(self):
        return {"history": [1, 2]}

class RememberingNothing(Local):
    def memory(self):
        return None

class RememberingOneTensor(Local):
    def memory(self):
        return torch.ones(3)

class RememberingSparsely(Local):
    def memory(self):
        return {"history": torch.eye(3).to_sparse()}

class Forgetting(Local):
    def memory(self):
        return {"history": torch.ones(3)}

class Sparse(Local):
    def collaboration_matrix(self, updates):
        return torch.eye(len(updates)).to_sparse()

class Undescribed(Local):
    def collaboration_matrix(self, updates):
        return self.required_descriptor(updates)

class Described(Local):
    descriptor = "noise-logits"

    def collaboration_matrix(self, updates):
        assert self.required_descriptor(updates).shape == (len(updates), 10)
        return super().collaboration_matrix(updates)

class Misspelt(Local):
    descriptor = "noise-logit"

class MisspeltOption(Local):
    descriptor = "noise-logits"
    descriptor_options = {"sample": 4}

class NoOptions(Local):
    descriptor = "noise-logits"
    descriptor_options = None

class NoSamples(Local):
    descriptor = "noise-logits"
    descriptor_options = {"samples": 0}

class MisspeltTerm(Local):
    objectives = {"fedprx.mu": 0.1}

class MisspeltSetting(Local):
    objectives = {"fedprox.m": 0.1}

class NoNumber(Local):
    objectives = {"fedprox.mu": "a"}

class Mute(Local):
    def objectives(self):
        return {"fedprox.mu": 0.1}

class Unasked(Local):
    def personalize(self, updates, weights):
        return updates.state

class UnaskedStep(Source):
    def step(self):
        return 0

class Unprepared(Local):
    def prepare(self, adapter):
        broken(0)

class RaisingStep(Source):
    def step(self, x):
        return broken(0)

class Ending(Local):
    def collaboration_matrix(self, updates):
        raise SystemExit(0)

class EndingStep(Source):
    def step(self, x):
        raise SystemExit(4)

class Keeping(Source):
    def __init__(self, model, options):
        super().__init__(model, options)
        self.keep({"count": 3})

class Selecting(Source):
    def select(self):
        return []

class Interrupted(Local):
    def collaboration_matrix(self, updates):
        if updates.round == 3:
            raise SystemExit(143)  # as the handler of SIGTERM does, wherever it finds us
        return super().collaboration_matrix(updates)

class Learned(Local):
    def collaboration_matrix(self, updates):
        return torch.softmax(torch.zeros(4, 4, requires_grad=True), dim=1)
"""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "broken_plugin.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDTTA_PLUGINS", "broken_plugin")
    yield
    sys.modules.pop("broken_plugin", None)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("strategy Raising", r"Raising\(RunConfig\) raised ZeroDivisionError: .* \(broken_plugin\.py, line 10\)"),
        ("strategy Unlike", r"Unlike\(RunConfig\) raised TypeError: .* takes 1 positional argument"),
        ("strategy Abstract", r"Abstract\(RunConfig\) raised TypeError: .*collaboration_matrix"),
        ("strategy Forgetful", r"Forgetful.*super\(\)\.__init__\(config\)"),
        ("strategy Choosy", r"Choosy': choosy\.share = 2: allowed: 0 to 1$"),
        ("strategy RaisingAdapter", r"RaisingAdapter.*no subclass of fedtta_flwr\.strategies\.base\."),
        (
            "strategy Misspelt",
            r"Misspelt': descriptor 'noise-logit': unknown; allowed: noise-logits, .* or '' for none$",
        ),
        ("strategy MisspeltOption", r"MisspeltOption': descriptor_options: 'sample' is unknown; allowed: samples, "),
        ("strategy NoOptions", r"NoOptions': descriptor_options is a NoneType; allowed: a mapping, "),
        ("strategy NoSamples", r"NoSamples': descriptor_options: samples = 0; allowed: a whole number above 0$"),
        ("strategy MisspeltTerm", r"MisspeltTerm': objectives: 'fedprx\.mu' is unknown; allowed: fedprox\.mu, "),
        ("strategy MisspeltSetting", r"objectives: 'fedprox\.m' is unknown; allowed: fedprox\.mu, "),
        ("strategy NoNumber", r"NoNumber': objectives: fedprox\.mu = 'a'; allowed: a finite number$"),
        ("strategy Mute", r"Mute': objectives is a method; allowed: a mapping, "),
        ("strategy Unprepared", r"^Unprepared\.prepare raised ZeroDivisionError: .* \(broken_plugin\.py, line 10\)$"),
        ("adapter RaisingAdapter", r"RaisingAdapter\(ResNet, NoOptions\) raised AttributeError: .*nothing"),
        ("adapter Keeping", r"Keeping': keep\(\) takes tensors; count is int: make it one$"),
        ("adapter Selecting", r"^adapter 'broken_plugin:Selecting': select\(\) returned list; return a dict"),
        ("adapter Raising", r"Raising.*no subclass of fedtta_flwr\.adaptation\.base\.Adapter"),
    ],
)
def test_a_plugin_that_cannot_be_made_is_one_line_before_anything_begins(broken, tmp_path, override, words) -> None:
    kind, name = override.split()
    config = {kind: f"broken_plugin:{name}", "output-dir": str(tmp_path / "run")}
    with pytest.raises(FedTTAError, match=words) as caught, federation(config):
        pytest.fail("the run began")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_raises_in_a_class_that_ships_is_no_fault_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: FedCTTA, config: RunConfig) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FedCTTA, "__init__", raises)
    with pytest.raises(ZeroDivisionError):
        make_strategy(RunConfig())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Matrix", r"^round 1: Matrix's collaboration matrix: a row sums to .* divide each by its sum$"),
        ("Half", r"^round 1: Half's collaboration matrix: torch\.float16, expected torch\.float32"),
        (
            "RaisingLate",
            r"^round 2: RaisingLate\.collaboration_matrix raised ZeroDivisionError: .* \(\S+\.py, line 10\)$",
        ),
        (
            "Remembering",
            r"^round 1: Remembering\.memory returned list for 'history', expected tensors by name; make it",
        ),
        ("RememberingNothing", r"^round 1: RememberingNothing\.memory returned NoneType, expected tensors by name"),
        ("RememberingSparsely", r"^round 1: RememberingSparsely\.memory returned torch\.sparse_coo for 'history', "),
        (
            "RememberingOneTensor",
            r"RememberingOneTensor\.memory returned Tensor, expected tensors by name: return",
        ),
        (
            "Forgetting",
            r"^round 1: Forgetting has a memory and no load_memory, so that a resumed run would go on without",
        ),
        (
            "Sparse",
            r"^round 1: Sparse's collaboration matrix: torch\.sparse_coo, expected .*: return its to_dense",
        ),
        ("Undescribed", r"^round 1: Undescribed names no descriptor; set its class attribute `descriptor`, e\.g\."),
        (
            "Unasked",
            r"^round 1: Unasked\.personalize\(\) missing 1 .*'weights': the method takes other arguments than ",
        ),
        ("Undefined", r"^round 1: Undefined\.personalize: .*running_mean is not finite"),
        ("Ending", r"^round 1: Ending\.collaboration_matrix raised SystemExit: 0 \(broken_plugin\.py, line \d+\)$"),
    ],
)
def test_a_plugin_that_makes_what_nobody_can_use_ends_the_run_with_one_line(broken, run_local, name, words) -> None:
    with pytest.raises(FederationError, match=words) as caught:
        run_local(strategy=f"broken_plugin:{name}", scores="", **{"checkpoint-every": 1})
    assert "\n" not in str(caught.value)


def test_what_an_adapter_raises_is_logged_once_from_its_own_code_on(broken, run_local, warned) -> None:
    words = r": RaisingStep\.step raised ZeroDivisionError: division by zero \(broken_plugin\.py, line 10\)$"
    with pytest.raises(FederationError, match=words):
        run_local(adapter="broken_plugin:RaisingStep", strategy="local", scores="")
    logged = [line for line in warned if line.startswith("Traceback")]
    assert len(logged) == 1
    assert "in step" in logged[0].splitlines()[1]


def test_an_adapter_that_ends_the_process_ends_no_more_than_its_visit(broken, run_local) -> None:
    with pytest.raises(FederationError, match=r": EndingStep\.step raised SystemExit: 4 \(broken_plugin"):
        run_local(adapter="broken_plugin:EndingStep", strategy="local", scores="")


@pytest.mark.parametrize(
    ("every", "then"), [(0, "run it anew, in another folder: there is no"), (2, "`fedtta run --resume {}`")]
)
def test_a_signal_ends_a_run_whatever_it_is_at_and_says_how_to_go_on(
    broken, apps, tmp_path, warned, every, then
) -> None:
    config = {"strategy": "broken_plugin:Interrupted", "checkpoint-every": every, "output-dir": str(tmp_path / "run")}
    with pytest.raises(SystemExit) as caught:
        LocalGrid(apps[1], RunConfig.from_flat(TINY | config).to_flat(), 2).run_server(apps[0])
    assert caught.value.code == 143
    then = then.format(tmp_path / "run")
    assert warned[-1].startswith(f"interrupted; {tmp_path / 'run'} holds what was found; to go on, {then}")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"stream": "mine:one"}, "checkpoint is empty: the embedded network of the ten digits predicts what stream = "),
        ({"stream": "mine:one", "checkpoint": "x.safetensors"}, ""),
        ({"spatial-heterogeneity": 0.35}, "spatial-heterogeneity = 0.35: 7 groups, but 6 corruptions, so that some "),
        ({"spatial-heterogeneity": 0.3}, ""),
        ({"spatial-heterogeneity": 1.0, "corruptions": "none"}, ""),
    ],
)
def test_what_may_not_be_meant_is_said(config, said) -> None:
    found = list(doubts(RunConfig.from_flat(config)))
    assert len(found) == bool(said)
    assert all(line.startswith(said) for line in found)


def test_a_run_that_is_interrupted_before_it_began_has_kept_nothing(tmp_path, warned) -> None:
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), federation(TINY | {"output-dir": str(path)}):  # as while clients join
        raise KeyboardInterrupt
    assert not path.exists()
    assert warned[-1] == "interrupted before it began; to go on, run it again"


def test_a_run_that_has_ended_well_stays_so_while_others_are_told(apps, tmp_path, warned) -> None:
    """A tracker may still be sending when Ctrl-C comes."""

    class Interrupted(Terminal):
        def on_end(self) -> None:
            raise KeyboardInterrupt

    def run() -> None:
        flat = TINY | {"output-dir": str(tmp_path / "run"), "rounds": 1}
        with federation(flat) as strategy:
            strategy.observers.append(Interrupted(strategy.observers[0]))
            strategy.start(LocalGrid(apps[1], RunConfig.from_flat(flat).to_flat(), 1))

    with pytest.raises(KeyboardInterrupt):
        run()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]
    assert not any("to go on" in line for line in warned)


def test_a_step_that_takes_other_arguments_is_one_line(broken, run_local) -> None:
    with pytest.raises(FederationError, match=r"UnaskedStep\.step\(\) takes 1 .*: the method takes other arguments"):
        run_local(adapter="broken_plugin:UnaskedStep", strategy="local", scores="")


def test_what_raises_in_a_strategy_that_ships_is_no_fault_of_the_users(monkeypatch, run_local) -> None:
    monkeypatch.setattr(FedCTTA, "collaboration_matrix", lambda self, updates: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_local(scores="")


def test_a_descriptor_needs_no_options(broken, run_local) -> None:
    assert run_local(strategy="broken_plugin:Described", scores="", rounds=1).summary["finished"]


def test_a_matrix_may_come_from_what_learns(broken, run_local) -> None:
    run = run_local(strategy="broken_plugin:Learned", scores="")
    assert run.summary["finished"]
    assert [line["collaboration"]["self_weight"] for line in run.lines()] == [0.25] * 4


def test_what_is_wrong_with_a_file_is_found_before_a_run_directory_is_made(tmp_path) -> None:
    broken = tmp_path / "page.safetensors"
    broken.write_text("<!DOCTYPE html><html>not found</html>")
    output = tmp_path / "run"
    with (
        pytest.raises(Exception, match="web page") as caught,
        federation({"checkpoint": str(broken), "output-dir": str(output)}),
    ):
        pytest.fail("the run began")
    assert "\n" not in str(caught.value)
    assert not output.exists()


def test_devices_that_all_have_another_source_model_than_the_server_are_refused(apps, tmp_path) -> None:
    path = tmp_path / "other.safetensors"
    save(build("resnet8", 10), path, {"architecture": "resnet8", "classes": "10"})
    config = RunConfig.from_flat(TINY | {"output-dir": str(tmp_path / "run")}).to_flat()
    grid = RecordingGrid(apps[1], config, 2)
    for context, names in zip(grid._contexts.values(), ["client-00,client-01", "client-02,client-03"], strict=True):
        context.node_config = {"clients": names, "checkpoint": str(path)}
    with pytest.raises(FederationError, match="node 2 has another source model"):
        grid.run_server(apps[0])


def test_of_two_runs_in_one_folder_the_second_is_refused_and_nothing_of_it_stays(tmp_path) -> None:
    output = tmp_path / "deep" / "run"
    with federation({"output-dir": str(output)}):
        with (
            pytest.raises(ConfigError, match=r"^output-dir = .*: another run writes there; wait for") as caught,
            federation({"output-dir": str(output)}),
        ):
            pytest.fail("the second run began")
        assert "\n" not in str(caught.value)
        assert output.is_dir()
    assert not (tmp_path / "deep").exists()  # it never began


def unfinished(path: Path) -> None:
    """Make a run one that was killed at its very end."""
    about = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(about | {"finished": False}))


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_that_has_finished_stays_as_it_is(run_local, every: int) -> None:
    run = run_local(**{"checkpoint-every": every})
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with (
        pytest.raises(ConfigError, match=r"^resume = .*: that run has finished"),
        federation(TINY | {"resume": str(run.path), "checkpoint-every": every}),
    ):
        pytest.fail("the run began")
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before


def test_a_run_that_is_older_than_a_key_goes_on(run_local) -> None:
    run = run_local(**{"checkpoint-every": 1})
    unfinished(run.path)
    path = run.path / "config.json"
    about = json.loads(path.read_text())
    momentum = about["config"].pop("bn-stats.momentum")
    path.write_text(json.dumps(about))
    again = TINY | {"resume": str(run.path), "checkpoint-every": 1}
    with federation(again):
        pass
    with (
        pytest.raises(ConfigError, match=r"bn-stats.momentum = None, found 0.5"),
        federation(again | {"bn-stats.momentum": momentum / 2}),
    ):
        pytest.fail("the run began")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b'{"config": {', r"its config\.json is damaged"),
        ("collaboration.npz", b"PK\x03\x04", r"collaboration\.npz cannot be read: .*; restore it from a copy"),
        ("collaboration.npz", None, r"collaboration\.npz is absent; restore it from a copy"),
    ],
)
def test_a_damaged_run_that_shall_go_on_is_named(run_local, apps, name: str, content: bytes | None, words: str) -> None:
    run = run_local(**{"checkpoint-every": 1})
    unfinished(run.path)
    if content is None:
        (run.path / name).unlink()
    else:
        (run.path / name).write_bytes(content)
    again = TINY | {"resume": str(run.path), "checkpoint-every": 1}
    with pytest.raises(FedTTAError, match=rf"^{run.path}: {words}") as caught, federation(again) as strategy:
        strategy.start(LocalGrid(apps[1], RunConfig.from_flat(again).to_flat(), 2))
    assert "\n" not in str(caught.value)


def test_a_run_that_is_stopped_before_it_goes_on_loses_nothing(run_local) -> None:
    run = run_local(**{"checkpoint-every": 1})
    unfinished(run.path)
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.name != "config.json"}

    def begin_and_stop(strategy) -> None:
        for observer in strategy.observers:
            observer.on_start(strategy.config, strategy.config.client_names(), 4)
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        federation(TINY | {"resume": str(run.path), "checkpoint-every": 1}) as strategy,
    ):
        begin_and_stop(strategy)
    assert {path.name: path.read_bytes() for path in run.path.iterdir() if path.name != "config.json"} == before


def test_a_run_that_goes_on_is_not_resumed(run_local, tmp_path) -> None:
    run = run_local(**{"checkpoint-every": 1})
    unfinished(run.path)
    again = TINY | {"resume": str(run.path), "checkpoint-every": 1}
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with (
        federation(again),
        pytest.raises(ConfigError, match=r"^resume = .*: another run writes there; wait for its end"),
        federation(again),
    ):
        pytest.fail("the second run began")
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before
