"""What JAX calls in every process where snaprt is installed: the plugin for plain ``jax.jit``.

JAX looks for its plugins when it first creates its devices. Unless one of the settings below is on,
this does nothing, and imports only the settings.
"""

from __future__ import annotations

import sys

from snaprt import settings
from snaprt.errors import UsageError


def initialize() -> None:
    """Set up ``jax.jit`` as the settings request: the compile cache, the recorder, checks.

    An invalid setting is reported here, because JAX would print a traceback and continue.
    """
    try:
        _initialize()
    except UsageError as error:
        print(f"snaprt is inactive for jax.jit: {error}", file=sys.stderr)


def _initialize() -> None:
    if settings.get("SNAPRT_JAX_CACHE"):
        from snaprt import cache

        cache.install_if_on()
    if settings.get("SNAPRT_CHECK_RANKS"):
        from snaprt.fleet import rank_check

        rank_check.start()
    if settings.get("SNAPRT_RECORD_JIT") and not _is_snaprt_itself():
        from snaprt.runtime.jit import record_process

        record_process()
    if settings.get("SNAPRT_WATCHDOG") is not None and not _is_snaprt_itself():
        from snaprt.fleet import watchdog

        watchdog.watch()
    if settings.get("SNAPRT_NO_COMPILE_AFTER") is not None and not _is_snaprt_itself():
        from snaprt.explain import no_compile
        from snaprt.runtime.jit import watch_process

        no_compile.start()
        watch_process()
    if settings.get("SNAPRT_REPRO_AFTER") is not None:
        from snaprt.runtime.jit import watch_process

        watch_process()


def _is_snaprt_itself() -> bool:
    """Return whether the process runs one of our own commands, or works for one."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.partition(".")[0] in ("snaprt", "snaprt_replay")
