"""A process that works for another: ``python -m snaprt_replay.process.child TASK ARGUMENT``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Final

#: Task -> the module whose function ``serve`` does it, with the argument as text. Names, for what a
#: task needs imports this, and takes long.
TASKS: Final[Mapping[str, str]] = {
    "play": "snaprt_replay.run.isolate",
    "work": "snaprt_replay.run.work",
}


def child_command(task: str, argument: str) -> list[str]:
    """Return the command of a process that does one of `TASKS` in this Python environment."""
    return [sys.executable, "-m", "snaprt_replay.process.child", task, argument]


def child_environment() -> dict[str, str]:
    """Return the variables with which a process finds the modules that this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


if __name__ == "__main__":
    importlib.import_module(TASKS[sys.argv[1]]).serve(sys.argv[2])
