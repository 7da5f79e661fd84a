"""`fedtta data` and `fedtta source convert` from the command line."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta_flwr import catalogue, cli
from fedtta_flwr.config import RunConfig
from fedtta_flwr.data import cifar as cifar_module
from fedtta_flwr.data import reference, zenodo
from fedtta_flwr.data.datasets import open_test_set
from fedtta_flwr.data.measure import accuracies
from fedtta_flwr.errors import ConfigError, DataError
from fedtta_flwr.models import build
from fedtta_flwr.models.checkpoints import load, save
from fedtta_flwr.models.source import load_source
from fedtta_flwr.run_config import read_overrides

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
STATISTICS = ["--mean", ".485,.456,.406", "--std", ".229,.224,.225"]


@pytest.fixture
def fedtta(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; return (status, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedtta", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return run


def foreign(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint such as training scripts leave."""
    torch.manual_seed(0)
    ours = build("resnet20-a", 10).state_dict()
    theirs = {f"module.{key.replace('head.', 'linear.')}": v for key, v in ours.items() if "normalize" not in key}
    torch.save({"state_dict": theirs, "best_prec1": 91.7}, path)
    return ours


def test_convert_shows_every_renaming(fedtta: Any, tmp_path: Path) -> None:
    ours = foreign(tmp_path / "x.th")
    status, out, _ = fedtta(
        "source", "convert", tmp_path / "x.th", "--architecture", "resnet20-a", "--classes", 10, *STATISTICS,
        "--output", tmp_path / "new" / "x.safetensors",
    )  # fmt: skip
    assert status == 0
    for line in ("module.* -> *", "linear.weight -> head.weight", "best_prec1 -> (not a weight)"):
        assert line in out
    model = load(tmp_path / "new" / "x.safetensors", architecture="resnet20-a", classes=10)
    assert model.normalize.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    torch.testing.assert_close(model.state_dict()["conv1.weight"], ours["conv1.weight"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--architecture", "resnet20"], "does not fit the architecture"),
        (["--architecture", "resnet99"], "resnet99"),
        (["--mean", "a,b,c"], "--mean 'a,b,c'"),
        (["--std", "0,1,1"], "std"),
        (["--classes", "100"], "does not fit"),
    ],
)
def test_convert_refuses_in_one_line(fedtta: Any, tmp_path: Path, change: list[str], words: str) -> None:
    foreign(tmp_path / "x.th")
    status, _, err = fedtta(
        "source", "convert", tmp_path / "x.th", "--architecture", "resnet20-a", "--classes", 10, *STATISTICS,
        "--output", tmp_path / "x.safetensors", *change,
    )  # fmt: skip
    assert status == 2
    assert words in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x.safetensors").exists()


# --------------------------------------------------------------------------------------------------- corrupt and check


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`cifar10` is 40 images here, so that all of it is quick."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8), np.arange(40) % 10
    monkeypatch.setitem(cifar_module.READERS, "cifar10", lambda folder: (images, labels, 10))
    return tmp_path


def test_corrupt(fedtta: Any, small_cifar: Path) -> None:
    out = small_cifar / "out"
    arguments = ["data", "corrupt", "--data-dir", small_cifar, "--output", out, "--workers", 1]
    status, text, _ = fedtta(*arguments, "--corruptions", "contrast, pixelate", "--severities", "5,1")
    assert (status, "2 arrays written" in text) == (0, True)
    assert np.load(out / "contrast.npy")[:40].any()
    assert not np.load(out / "contrast.npy")[40:160].any()
    status, text, _ = fedtta(*arguments, "--corruptions", "contrast", "--severities", "1")
    assert (status, "1 were finished" in text) == (0, True)


def test_what_was_not_rebuilt_is_by_the_command_that_is_told(
    fedtta: Any, small_cifar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zenodo, "PER_SEVERITY", 40)
    monkeypatch.setattr(zenodo, "SHAPE", (200, 32, 32, 3))
    out = small_cifar / "an output"
    options = ["--corruptions", "contrast", "--severities", "5", "--workers", 1, "--seed", 3]
    assert fedtta("data", "corrupt", "--data-dir", small_cifar, "--output", out, *options)[0] == 0
    with pytest.raises(DataError, match="contrast was not rebuilt at severity 4") as caught:
        open_test_set("cifar10-c", str(out), 0).images("contrast", 4)
    (told,) = re.findall("`fedtta (.*)`", str(caught.value))
    command = [str(small_cifar) if part == "CLEAN" else part for part in shlex.split(told)]
    assert fedtta(*command, "--workers", 1)[0] == 0
    assert open_test_set("cifar10-c", str(out), 0).images("contrast", 4)[np.arange(40)].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--severities", "6"], "--severities '6'"),
        (["--severities", ""], "--severities"),
        (["--dataset", "digits"], "cifar10, cifar100"),
        (["--corruptions", "haze"], "haze"),
        (["--data-dir", "/no/such"], "no such folder"),
        (["--corruptions", "frost", "--frost-dir", "/no/such"], "frost"),
    ],
)
def test_corrupt_refuses_in_one_line(fedtta: Any, small_cifar: Path, change: list[str], words: str) -> None:
    out = small_cifar / "out"
    status, _, err = fedtta("data", "corrupt", "--data-dir", small_cifar, "--output", out, "--workers", 1, *change)
    assert status == 2
    assert words in err
    assert err.strip().count("\n") == 0


@pytest.fixture
def set_of_two(tmp_path: Path) -> Path:
    """CIFAR-10-C with two corruptions that are empty but for labels."""
    np.save(tmp_path / "labels.npy", np.tile(np.arange(10_000) % 10, 5).astype(np.uint8))
    for name in ("fog", "snow"):
        np.lib.format.open_memmap(tmp_path / f"{name}.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3))
    save(build("resnet20-a", 10), tmp_path / "m.safetensors", {"architecture": "resnet20-a", "classes": "10"})
    return tmp_path


@pytest.mark.parametrize(("fog", "status"), [(67.9, 0), (68.1, 1), (63.9, 1)])
def test_check_compares_and_says_so_with_its_status(
    fedtta: Any, set_of_two: Path, monkeypatch: pytest.MonkeyPatch, fog: float, status: int
) -> None:
    monkeypatch.setattr(reference, "MEAN_TOLERANCE", 1.0)
    measured = {"fog": fog, "snow": 68.41}
    monkeypatch.setattr("fedtta_flwr.data.measure.accuracies", lambda *a, **k: measured)
    arguments = ["data", "check", "--data-dir", set_of_two, "--checkpoint", set_of_two / "m.safetensors"]
    found, out, _ = fedtta(*arguments)
    assert found == status
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert lines["fog"][:3] == [f"{fog:.2f}", "66.02", f"{fog - 66.02:+.2f}"]
    assert lines["snow"] == ["68.41", "68.41", "+0.00"]
    assert float(lines["mean"][0]) == pytest.approx((fog + 68.41) / 2, abs=0.01)
    assert ("out of tolerance" in out) == bool(status)


def test_check_refuses(fedtta: Any, set_of_two: Path) -> None:
    arguments = ["data", "check", "--data-dir", set_of_two, "--checkpoint", set_of_two / "m.safetensors"]
    for change, words in (
        (["--corruptions", "saturate"], "saturate"),
        (["--column", "bn7"], "bn7"),
        (["--checkpoint", "/no/such"], "/no/such"),
        (["--data-dir", "/no/such"], "/no/such"),
    ):
        status, _, err = fedtta(*arguments, *change)
        assert status == 2
        assert words in err


def test_accuracies_with_both_kinds_of_statistics() -> None:
    digits = open_test_set("digits", "", 0)
    model = load_source(RunConfig(), 10)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.from_numpy(digits.images("contrast", 5)[np.arange(797)]).permute(0, 3, 1, 2).float() / 255
    plain = 100 * float((model(x).argmax(1).numpy() == digits.labels).mean())
    assert accuracies(digits, model, ["contrast"], 5)["contrast"] == pytest.approx(plain)
    own = torch.cat([torch.nn.functional.softmax(_adaptive(model, part), dim=1) for part in x.split(200)])
    expected = 100 * float((own.argmax(1).numpy() == digits.labels).mean())
    assert accuracies(digits, model, ["clean", "contrast"], 5, "bn200")["contrast"] == pytest.approx(expected)
    assert expected > plain + 20
    assert not model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="bn200"):
        accuracies(digits, model, ["contrast"], 5, "bn50")


def _adaptive(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Batch statistics by hooks instead of by train mode."""

    def normalise(m: Any, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
        z = inputs[0]
        mean, var = z.mean((0, 2, 3), keepdim=True), z.var((0, 2, 3), keepdim=True, correction=0)
        return (z - mean) / (var + m.eps).sqrt() * m.weight.view(1, -1, 1, 1) + m.bias.view(1, -1, 1, 1)

    hooks = [m.register_forward_hook(normalise) for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    try:
        with torch.no_grad():
            return model(x)
    finally:
        for hook in hooks:
            hook.remove()


# --------------------------------------------------------------------------------------------------------------- show


def test_show_draws_a_picture(fedtta: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    changes = (
        'class-skew=0.1 severity-schedule="gradual"',
        "mixed-domains=true",
        "num-clients=1 spatial-heterogeneity=1.0",
    )
    for i, change in enumerate(changes):
        path = tmp_path / f"{i}.png"
        status, _, err = fedtta("data", "show", "--run-config", change, "--output", path)
        assert (status, err) == (0, "")
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.width > 1000
            colours = len(image.convert("RGB").getcolors(10**7))
        assert colours > 50


def test_show_names_the_extra_that_is_missing(fedtta: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = fedtta("data", "show", "--output", tmp_path / "x.png")
    assert status == 2
    assert ".[plots]" in err
    assert err.count("\n") == 1


def test_show_cannot_draw_what_will_arrive(fedtta: Any, tmp_path: Path) -> None:
    for config, word in (('dataset="live" classes=10 rounds=1', "live"), ('task="tgfl"', "two heads have test sets")):
        status, _, err = fedtta("data", "show", "--run-config", config, "--output", tmp_path / "x.png")
        assert (status, word in err) == (2, True)


# ------------------------------------------------------------------------------------------------- models and configs


def test_a_zoo_model_is_looked_for_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fedtta_flwr.models import robustbench

    asked: list[Any] = []
    monkeypatch.setattr(robustbench, "load_robustbench", lambda *a, **k: asked.append((*a, k)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = RunConfig.from_flat({"model": "robustbench:Standard"})
    load_source(config, 10)
    load_source(RunConfig.from_flat(config.to_flat() | {"checkpoint": "/zoo", "legacy-no-norm": True}), 100)
    expected = {"model_dir": tmp_path / "fedtta" / "robustbench", "legacy_no_norm": False}
    assert asked[0] == ("robustbench:Standard", "cifar10", expected)
    assert asked[1] == ("robustbench:Standard", "cifar100", {"model_dir": Path("/zoo"), "legacy_no_norm": True})
    with pytest.raises(ConfigError, match="10 or 100 classes"):
        load_source(config, 7)
    with pytest.raises(ConfigError, match="robustbench:ID"):
        load_source(RunConfig.from_flat({"model": "robustbench:../x"}), 10)


def test_legacy_no_norm_takes_the_normalisation_away(tmp_path: Path) -> None:
    legacy = load_source(RunConfig.from_flat({"legacy-no-norm": True}), 10)
    model = load_source(RunConfig(), 10)
    assert legacy.normalize.is_identity
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(legacy(model.normalize(x)), model(x))
    path = tmp_path / "m.safetensors"
    save(build("resnet8", 10), path, {"architecture": "resnet8", "classes": "10"})
    with pytest.raises(ConfigError, match="legacy-no-norm"):
        load_source(RunConfig.from_flat({"legacy-no-norm": True, "checkpoint": str(path)}), 10)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_config_is_valid_and_begins_with_its_command(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith(f"# fedtta run --run-config configs/{path.name}")
    assert catalogue._headline(path)
    RunConfig.from_flat(read_overrides([str(path)]))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "presets").glob("*.toml")), ids=lambda path: path.name)
def test_every_preset_is_valid_where_its_command_names_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    config, preset = re.fullmatch(r"# fedtta run --run-config (\S+) --run-config (\S+)", first).groups()  # type: ignore[union-attr]
    assert ROOT / preset == path
    assert catalogue._headline(path)
    values, default = read_overrides([str(path)]), RunConfig().to_flat()
    assert values
    assert all(default[key] != value for key, value in values.items())
    RunConfig.from_flat(read_overrides([str(ROOT / config), str(path)]))


def test_the_digits_config_is_the_default() -> None:
    assert RunConfig.from_flat(read_overrides([str(ROOT / "configs" / "fedctta-digits.toml")])) == RunConfig()


def test_the_real_set_rebuilt_and_measured(cifar: Path, fedtta: Any, tmp_path: Path) -> None:
    """Two corruptions of the real images; the whole set is `fedtta data corrupt` and `fedtta data check`."""
    checkpoint = SHARED / "checkpoints" / "akamaster_resnet20-12fca82f.th"
    if not checkpoint.is_file():
        pytest.skip("../shared/data/checkpoints is absent")
    out = tmp_path / "out"
    names = ["--corruptions", "contrast"]
    assert fedtta("data", "corrupt", "--data-dir", cifar, "--output", out, "--severities", 5, *names)[0] == 0
    reference_model = tmp_path / "r20.safetensors"
    arguments = ["--architecture", "resnet20-a", "--classes", 10, *STATISTICS, "--output", reference_model]
    assert fedtta("source", "convert", checkpoint, *arguments)[0] == 0
    status, text, _ = fedtta("data", "check", "--data-dir", out, "--checkpoint", reference_model, *names)
    assert (status, "contrast" in text) == (0, True)
