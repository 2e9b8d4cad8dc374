"""Teaches JAX's functions arrays and traces of other kinds; must not know what those are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import api as _api
from jax._src import config as _config
from jax._src import core as _core
from jax._src import sharding_impls as _shardings
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax

from snaprt.jaxapi.traces import current_trace_setting, staging, staging_values

_device_get_patched = False


def teach_device_get(kind: type, read: Callable[[Any], np.ndarray]) -> None:
    """Make `jax.device_get` read instances of ``kind``, which it would hand back as tracers."""
    global _device_get_patched
    if _device_get_patched:
        return
    original = _api._device_get

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

    def trace_state_clean() -> bool:
        return original() or (
            type(current_trace_setting.value) is kind and sys._getframe(1).f_code in asked_by
        )

    _core.trace_state_clean = trace_state_clean
    _set_mesh_patched = True


def teach_staging(kind: type, read: Callable[[Any], jax.Array]) -> None:
    """Let JAX take the values of instances of ``kind`` where it refuses tracers.

    These are what the functions of `jax.lax.composite`, of reductions, and of ``lower``, ``trace``
    and `jax.export` close over, and operands inside of `jax.ensure_compile_time_eval`. Checked with
    jax 0.10.2 and 0.12.0.
    """
    trace: Any = _partial_eval.DynamicJaxprTrace
    new_const, process_primitive = trace.new_const, trace.process_primitive
    if getattr(new_const, "taught", False):
        return

    def value(one: Any) -> Any:
        return read(one) if isinstance(one, kind) else one

    def new_const_of_value(self: Any, constant: Any, *args: Any, **kwargs: Any) -> Any:
        taken = value(constant) if staging.takes_values else constant
        return new_const(self, taken, *args, **kwargs)

    def process_values(self: Any, primitive: Any, tracers: Any, params: Any, /) -> Any:
        if _config.eager_constant_folding.value:
            tracers = [value(tracer) for tracer in tracers]
        return process_primitive(self, primitive, tracers, params)

    new_const_of_value.taught = True  # type: ignore[attr-defined]
    trace.new_const, trace.process_primitive = new_const_of_value, process_values
    module: Any = _lax
    for name in ("_trace_composite_to_jaxpr", "_reduction_jaxpr", "_variadic_reduction_jaxpr"):
        setattr(module, name, staging_values()(getattr(module, name)))
