"""Start `child` in another Python environment; run as ``elsewhere.py FOLDERS TASK ARGUMENT``.

It must import nothing but the standard library before it has found snaprt's own packages, and them
alone: other packages beside them were built for another Python.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


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
    # A script's own folder is on the path: this one has a `case`, a `load`, a `work`.
    del sys.path[0]
    sys.meta_path.insert(0, _OurPackages(json.loads(sys.argv[1])))
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("snaprt_replay.process.child", run_name="__main__")
