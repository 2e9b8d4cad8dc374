"""A process that runs jobs for another: ``python child.py FOLDERS DESCRIPTOR``.

FOLDERS is a JSON object: where our packages are, for another Python environment, which takes them
alone from here; other packages beside them were built for another Python. The file is run as a
script and needs nothing but the standard library until it has found them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def child_environment() -> dict[str, str]:
    """Return the variables with which a process finds the modules that this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def child_command(descriptor: int, python: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Return how to start a process that serves jobs, and its environment variables.

    Args:
        descriptor: Of the socket that it inherits.
        python: The interpreter of another environment; None for this one.
    """
    script = str(Path(__file__).resolve())
    if python is None:
        return [sys.executable, script, "{}", str(descriptor)], child_environment()
    packages = map(importlib.import_module, ("snaprt", "snaprt_cache", "snaprt_replay"))
    folders = {package.__name__: str(Path(package.__path__[0]).parent) for package in packages}
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return [python, script, json.dumps(folders), str(descriptor)], variables


class _OurPackages:
    """Finds our top-level packages in folders that stay off ``sys.path``."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a package of ours is; None for all others."""
        if name not in self._folders:
            return None
        return PathFinder.find_spec(name, [self._folders[name]])


if __name__ == "__main__":
    del sys.path[0]  # a script's own folder
    sys.meta_path.insert(0, _OurPackages(json.loads(sys.argv[1])))
    importlib.import_module("snaprt_replay.run.work").serve(int(sys.argv[2]))
