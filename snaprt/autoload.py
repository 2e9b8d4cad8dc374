"""What JAX calls in every process where snaprt is installed: the cache goes under ``jax.jit`` here.

JAX looks for its plugins when it first makes its devices. Unless ``SNAPRT_JAX_CACHE`` is set, this
does nothing, and imports nothing but the settings.
"""

from __future__ import annotations

from snaprt import settings


def initialize() -> None:
    """Put the compile cache under ``jax.jit`` if ``SNAPRT_JAX_CACHE`` says so."""
    if settings.get("SNAPRT_JAX_CACHE"):
        from snaprt import cache

        cache.install_if_on()
