"""Keeps snaprt's own frames out of stacks and tracebacks: what they show is the user's lines.

Importing it is enough. The command line adds its own: see `snaprt.cli.run.command`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from snaprt import jaxapi

_PACKAGE: Final = Path(__file__).parents[1]
_PARTS: Final = (
    "compile",
    "explain",
    "graph",
    "jaxapi",
    "runtime",
    "snapshot",
    "trace",
)

for _part in _PARTS:
    jaxapi.hide_frames_below(_PACKAGE / _part)
    jaxapi.hide_traceback_below(_PACKAGE / _part)
