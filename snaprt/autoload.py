"""What JAX calls in every process where snaprt is installed: the plugin for plain ``jax.jit``.

JAX looks for its plugins when it first creates its devices. Unless one of the settings below is on,
this does nothing, and imports only the settings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, NamedTuple

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


def is_asked_for() -> bool:
    """Return whether a setting requests anything of plain ``jax.jit``."""
    return any(_is_on(part) for part in _PARTS)


def _initialize() -> None:
    for part in _PARTS:
        if _is_on(part) and not (part.is_for_programs and _is_snaprt_itself()):
            part.start()


def _start_cache() -> None:
    from snaprt import cache

    cache.install_if_on()


def _start_rank_check() -> None:
    from snaprt.fleet import rank_check

    rank_check.start()


def _start_recording() -> None:
    from snaprt.runtime.jit import record_process

    record_process()


def _start_watchdog() -> None:
    from snaprt.fleet import watchdog

    watchdog.watch()


def _start_no_compile() -> None:
    from snaprt.explain import no_compile
    from snaprt.runtime.jit import watch_process

    no_compile.start()
    watch_process()


def _start_repro() -> None:
    from snaprt.runtime.jit import watch_process

    watch_process()


def _start_log() -> None:
    from snaprt import logs

    logs.follow_environment()


class _Part(NamedTuple):
    """What a setting starts, in every program or in those that are no command of ours."""

    setting: str
    start: Callable[[], None]
    is_for_programs: bool


_PARTS: Final = (
    _Part("SNAPRT_LOG_FILE", _start_log, is_for_programs=True),
    _Part("SNAPRT_JAX_CACHE", _start_cache, is_for_programs=False),
    _Part("SNAPRT_CHECK_RANKS", _start_rank_check, is_for_programs=False),
    _Part("SNAPRT_RECORD_JIT", _start_recording, is_for_programs=True),
    _Part("SNAPRT_WATCHDOG", _start_watchdog, is_for_programs=True),
    _Part("SNAPRT_NO_COMPILE_AFTER", _start_no_compile, is_for_programs=True),
    _Part("SNAPRT_REPRO_AFTER", _start_repro, is_for_programs=False),
)


def _is_on(part: _Part) -> bool:
    return settings.get(part.setting) not in (None, False)


def _is_snaprt_itself() -> bool:
    """Return whether the process runs one of our own commands, or works for one."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.partition(".")[0] in ("snaprt", "snaprt_replay")
