"""JAX's settings as a thread has them; must not know what is traced or compiled under them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import config as _config


def x64_enabled() -> bool:
    """Return whether 64-bit types are enabled for this thread."""
    return bool(_config.enable_x64.value)


@contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """Enable or disable 64-bit types for this thread inside the context."""
    with _config.enable_x64(enabled):
        yield


def default_device() -> Any:
    """Return the device that `jax.default_device` names, or ``None`` for JAX's own choice."""
    return _config.default_device.value


# Settings of JAX that take no part in what an operation is lowered to: by the start of their name.
_UNRELATED_SETTINGS = (
    *("check_vma", "jax_check", "jax_compilation_cache", "jax_cpu_get", "jax_cross_host"),
    *("jax_debug_log", "jax_default_device", "jax_dump", "jax_enable_compilation_cache"),
    *("jax_explain", "jax_log", "jax_persistent_cache", "jax_platform", "jax_pprint"),
    *("jax_raise", "jax_traceback", "jax_tracer", "jax_transfer_guard"),
)


def configuration() -> list[tuple[str, str]]:
    """Return JAX's settings as this thread has them, but for those that lowering ignores."""
    return [
        (name, repr(getattr(jax.config, name, value)))
        for name, value in sorted(jax.config.values.items())
        if not name.startswith(_UNRELATED_SETTINGS)
    ]
