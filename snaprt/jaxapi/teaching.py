"""Teaches JAX's functions arrays and traces of other kinds; must not know what those are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import api as _api
from jax._src import core as _core
from jax._src import sharding_impls as _shardings

from snaprt.jaxapi.traces import current_trace_setting

_device_get_patched = False


def teach_device_get(kind: type, read: Callable[[Any], np.ndarray]) -> None:
    """Make `jax.device_get` read instances of ``kind``, which it would hand back as tracers."""
    global _device_get_patched
    if _device_get_patched:
        return
    original = _api._device_get

    @functools.wraps(original)
    def device_get_leaf(x: Any) -> Any:
        return read(x) if isinstance(x, kind) else original(x)

    _api._device_get = device_get_leaf
    _device_get_patched = True


def teach_compiled(kind: type, read: Callable[[Any], jax.Array]) -> None:
    """Let what `jax.stages.Lowered.compile` returns take the values of instances of ``kind``.

    JAX takes them for tracers, to which it refuses to apply a compiled function. Checked with jax
    0.10.2 and 0.12.0: whatever is no plain array comes by this method.
    """
    original: Any = jax.stages.Compiled.call
    if getattr(original, "intercepted", False):
        return

    def value(leaf: Any) -> Any:
        return read(leaf) if isinstance(leaf, kind) else leaf

    def call(params: Any, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(value, (args, kwargs))
        return original(params, *args, **kwargs)

    call.intercepted = True  # type: ignore[attr-defined]
    jax.stages.Compiled.call = staticmethod(call)  # type: ignore[method-assign]


_set_mesh_patched = False


def teach_set_mesh(kind: type) -> None:
    """Let `jax.set_mesh` and `jax.sharding.get_mesh` work under a trace of type ``kind``.

    Both refuse to where JAX traces, which they ask `trace_state_clean`; recording lazily is not
    tracing to them. Whoever else asks gets the old answer.
    """
    global _set_mesh_patched
    if _set_mesh_patched:
        return
    original = _core.trace_state_clean
    asked_by = {_shardings.set_mesh.__init__.__code__, _shardings.get_mesh.__code__}

    @functools.wraps(original)
    def trace_state_clean() -> bool:
        return original() or (
            type(current_trace_setting.value) is kind and sys._getframe(1).f_code in asked_by
        )

    _core.trace_state_clean = trace_state_clean
    _set_mesh_patched = True
