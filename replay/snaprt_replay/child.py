"""The process in which `isolate` works: ``python -m snaprt_replay.child TASK PATH``."""

from __future__ import annotations

import sys
from pathlib import Path

from snaprt_replay import isolate

_TASKS = {"parse": isolate.serve_parse, "play": isolate.serve_play}

if __name__ == "__main__":
    _TASKS[sys.argv[1]](Path(sys.argv[2]))
