"""What JAX calls in every process where snaprt is installed: what goes under plain ``jax.jit``.

JAX looks for its plugins when it first makes its devices. Unless ``SNAPRT_JAX_CACHE`` or
``SNAPRT_REPRO_AFTER`` is set, this does nothing, and imports nothing but the settings.
"""

from __future__ import annotations

import sys

from snaprt import settings
from snaprt.errors import UsageError


def initialize() -> None:
    """Put under ``jax.jit`` the compile cache and what saves failing programs, as asked for.

    A setting that is not allowed is told here: JAX would show a traceback, and go on.
    """
    try:
        _initialize()
    except UsageError as error:
        print(f"snaprt does nothing under jax.jit: {error}", file=sys.stderr)


def _initialize() -> None:
    if settings.get("SNAPRT_JAX_CACHE"):
        from snaprt import cache

        cache.install_if_on()
    if settings.get("SNAPRT_REPRO_AFTER") is not None:
        from snaprt.runtime.record_scope import watch_process

        watch_process()
