"""A process that works for another: ``python -m snaprt_replay.run.child TASK ARGUMENT``.

`isolate` gives the task ``play``, `workers` the task ``work``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def _play(folder: str) -> None:
    from snaprt_replay.run import isolate

    isolate.serve_play(Path(folder))


def _work(descriptor: str) -> None:
    from snaprt_replay.run import work

    work.serve(int(descriptor))


_TASKS: Mapping[str, Callable[[str], None]] = {"play": _play, "work": _work}

if __name__ == "__main__":
    _TASKS[sys.argv[1]](sys.argv[2])
