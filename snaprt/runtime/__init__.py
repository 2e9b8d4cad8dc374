"""A running program: here, and only here, trace, compile and snapshot meet."""

from __future__ import annotations

from pathlib import Path

from snaprt import jaxapi

# What stacks and tracebacks show is the user's lines. The command line adds its own frames: see
# `snaprt.cli.run.command`.
for _part in ("compile", "explain", "fleet", "graph", "jaxapi", "runtime", "snapshot", "trace"):
    jaxapi.hide_frames_below(Path(__file__).parents[1] / _part)
    jaxapi.hide_traceback_below(Path(__file__).parents[1] / _part)
