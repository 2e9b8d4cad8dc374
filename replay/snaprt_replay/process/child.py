"""A process that works for another: ``python -m snaprt_replay.process.child TASK ARGUMENT``."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: Task -> the module whose function ``serve`` does it, with the argument as text. Names, for what a
#: task needs imports this, and takes long.
TASKS: Final[Mapping[str, str]] = {
    "play": "snaprt_replay.run.isolate",
    "work": "snaprt_replay.run.work",
}


def run_child(
    task: str,
    path: Path,
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a task to its end, or for so many seconds.

    Args:
        task: One of `TASKS`.
        path: The task's argument.
        seconds: How long it may take; None for no limit.
        environment: Variables that it finds set, beside those here.

    Raises:
        subprocess.TimeoutExpired: It took longer.
    """
    return subprocess.run(
        [sys.executable, "-m", "snaprt_replay.process.child", task, str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            **(environment or {}),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        check=False,
        timeout=seconds,
    )


if __name__ == "__main__":
    importlib.import_module(TASKS[sys.argv[1]]).serve(sys.argv[2])
