"""Code of the user's own that a run config names: whether it can be imported, and a fingerprint of its source."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from fedtta_flwr.config import Scalar
from fedtta_flwr.registry import ADAPTERS, HEADS, STRATEGIES, resolve

#: keys of the run config that take ``package.module:Class`` -> names in them that are the project's own
KEYS: dict[str, Mapping[str, tuple[str, ...]]] = {
    "strategy": STRATEGIES,
    "adapter": ADAPTERS,
    "head": HEADS,
    "stream": {"": ()},
}


def named(config: Mapping[str, Scalar]) -> dict[str, str]:
    """Return what a flat run config names of the user's own: key -> ``package.module:Class``."""
    return {key: str(config[key]) for key, known in KEYS.items() if key in config and config[key] not in known}


def check_plugins(config: Mapping[str, Scalar]) -> None:
    """Import what a flat run config names of the user's own.

    Raises
    ------
    ConfigError
        If the operator has not allowed it, or it cannot be imported.
    """
    for key, name in named(config).items():
        resolve(key, name, KEYS[key])


def plugin_fingerprints(config: Mapping[str, Scalar]) -> dict[str, str]:
    """Return a short hash of the source of each package of the user's own that a flat run config names.

    Nothing is imported, and nothing remembered: who develops a method changes it while a benchmark goes on.
    """
    packages = {name.partition(":")[0].partition(".")[0] for name in named(config).values()}
    return {package: _fingerprint(package) for package in sorted(packages)}


def _fingerprint(package: str) -> str:
    """Return the hash of a package's .py files, or of a module's file; empty where there is no source."""
    from fedtta_flwr.records import source_hash  # on use: it brings torch, which reading a spec does not need

    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a finder that fails; a module that no file was read for
        spec = None
    if spec is None:
        return ""
    if spec.submodule_search_locations is None:
        file = Path(spec.origin or "")
        return source_hash(file.parent, [file]) if file.is_file() else ""
    (root, *_) = map(Path, spec.submodule_search_locations)
    return source_hash(root, (path for path in root.rglob("*.py") if path.is_file()))  # editors leave dead links
