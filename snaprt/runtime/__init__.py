"""A running program: here, and only here, trace, compile and snapshot meet."""

from __future__ import annotations

from snaprt import jaxapi

jaxapi.hide_own_frames()  # the command line adds its own: see `snaprt.cli.run.command`
