"""The process in which `isolate` runs a case: ``python -m snaprt_replay.child FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from snaprt_replay import isolate

if __name__ == "__main__":
    isolate.serve(Path(sys.argv[1]))
