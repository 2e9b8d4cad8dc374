"""The process's persistent compile cache: opened at first use, and its events counted."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from snaprt_cache import modes
from snaprt_cache.errors import CacheError
from snaprt_cache.frame import read_key_file
from snaprt_cache.store import Cache

from snaprt import metrics, settings

if TYPE_CHECKING:
    from snaprt_cache.remote import Tier

_log = logging.getLogger("snaprt.cache")
_lock = threading.Lock()
_open: dict[_Settings, Cache | None] = {}
_told_of: set[tuple[str, ...]] = set()


@dataclass(frozen=True)
class _Settings:
    """What the environment says about the cache."""

    folder: Path | None
    max_bytes: int | None
    mode: str
    key_file: Path | None
    shared: bool
    remote: str | None
    remote_timeout: float


def persistent_cache() -> Cache | None:
    """Return the cache that the settings name, or ``None`` where there is none to use.

    ``SNAPRT_CACHE=0`` means none, as do passes of the program's own in the compiler. A folder that
    cannot be used is reported once, and the program goes on without a cache.

    Raises:
        CacheError: It cannot be used, and ``SNAPRT_CACHE_MODE=fail-on-miss`` lets nothing compile.
    """
    if not settings.get("SNAPRT_CACHE") or is_bypassed():
        return None
    configuration = _settings()
    if configuration.mode == modes.OFF.name:
        return None
    with _lock:
        if configuration not in _open:
            try:
                _open[configuration] = _opened(configuration)
            except CacheError as error:
                if configuration.mode == modes.FAIL_ON_MISS.name:
                    raise
                _log.warning("compiling without a persistent cache: %s", error)
                _open[configuration] = None
        return _open[configuration]


def is_bypassed() -> bool:
    """Say, once, whether programs are compiled with passes that no key tells of."""
    from snaprt import jaxapi  # here alone: who looks after a cache needs no JAX

    passes = jaxapi.registered_passes()
    if passes and passes not in _told_of:
        _told_of.add(passes)
        _log.warning(
            "not using the compile cache: this process has registered compiler passes (%s) that "
            "the cache keys do not include",
            ", ".join(passes),
        )
    return bool(passes)


def open_cache(folder: Path | None = None) -> Cache:
    """Open a cache to look after it, as the settings say, whatever the mode for programs.

    Args:
        folder: Its directory; by default the one that the settings name.

    Raises:
        CacheError: The directory or the key cannot be used.
    """
    configuration = replace(_settings(), mode=modes.READ_WRITE.name, remote=None)
    cache = _opened(replace(configuration, folder=folder) if folder is not None else configuration)
    if cache.path.exists() and not cache.path.is_dir():
        raise CacheError(
            f"{cache.path} is not a directory, so it cannot be a compile cache",
            hint="Name the cache directory with --dir or SNAPRT_CACHE_DIR.",
        )
    return cache


def _settings() -> _Settings:
    return _Settings(
        folder=settings.get("SNAPRT_CACHE_DIR"),
        max_bytes=settings.get("SNAPRT_CACHE_MAX_SIZE"),
        mode=settings.get("SNAPRT_CACHE_MODE"),
        key_file=settings.get("SNAPRT_CACHE_KEY_FILE"),
        shared=settings.get("SNAPRT_CACHE_SHARED"),
        remote=settings.get("SNAPRT_CACHE_REMOTE"),
        remote_timeout=settings.get("SNAPRT_CACHE_REMOTE_TIMEOUT"),
    )


def _opened(configuration: _Settings) -> Cache:
    return Cache.open(
        configuration.folder,
        on_event=count_event,
        max_bytes=configuration.max_bytes,
        mode=configuration.mode,
        signing_key=None
        if configuration.key_file is None
        else read_key_file(configuration.key_file),
        shared=configuration.shared,
        tier=_tier(configuration),
    )


def _tier(configuration: _Settings) -> Tier | None:
    """Open the team's cache behind the directory; one that cannot be is reported, and left out."""
    if configuration.remote is None:
        return None
    from snaprt_cache.remote import open_tier  # here alone: few have a remote

    try:
        return open_tier(configuration.remote, configuration.remote_timeout, count_event)
    except CacheError as error:
        if configuration.mode == modes.FAIL_ON_MISS.name:
            raise
        _log.warning("continuing without the remote compile cache: %s", error)
        return None


def count_event(event: str, value: float) -> None:
    """Count an event of the cache in the metrics."""
    if event in metrics.KINDS:  # an amount rather than a count
        metrics.metric_add(event, value)
    else:
        metrics.counter_add(event, int(value))
