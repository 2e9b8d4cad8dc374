"""Teaches JAX's functions arrays and traces of other kinds; must not know what those are."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import jax
from jax._src import api as _api
from jax._src import core as _core
from jax._src import pmap as _pmap
from jax._src import sharding_impls as _shardings
from jax._src.lax import lax as _lax

from snaprt.jaxapi.meshes import under_mesh
from snaprt.jaxapi.tracing.traces import current_trace_setting, evaluating

_device_get_patched = False


def teach_device_get(kind: type, read: Callable[[Any], Any]) -> None:
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

    @functools.wraps(original)
    def call(params: Any, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(value, (args, kwargs))
        return original(params, *args, **kwargs)

    call.intercepted = True  # type: ignore[attr-defined]
    jax.stages.Compiled.call = staticmethod(call)  # type: ignore[method-assign]


_trace_state_patched = False


def teach_trace_state(kind: type) -> None:
    """Let those of JAX's functions work as ever that do otherwise where JAX traces.

    They ask `trace_state_clean`, and recording lazily under a trace of type ``kind`` is not tracing
    to them. `jax.set_mesh`, `jax.sharding.get_mesh` and compiled functions refuse to work there,
    and `jax.pmap` leaves its operands where they lie. Whoever else asks gets the old answer.
    """
    global _trace_state_patched
    if _trace_state_patched:
        return
    original = _core.trace_state_clean
    compiled: Any = inspect.unwrap(jax.stages.Compiled.call)
    pmap: Any = inspect.unwrap(_pmap.pmap)
    asked_by = {
        _shardings.set_mesh.__init__.__code__,
        _shardings.get_mesh.__code__,
        compiled.__code__,
        *(code for code in pmap.__code__.co_consts if isinstance(code, CodeType)),
    }

    @functools.wraps(original)
    def trace_state_clean() -> bool:
        return original() or (
            type(current_trace_setting.value) is kind and sys._getframe(1).f_code in asked_by
        )

    _core.trace_state_clean = trace_state_clean
    _trace_state_patched = True


_full_patched = False


def teach_full(kind: Any) -> None:
    """Let what fills arrays (`jnp.zeros`, `jnp.ones_like`, ...) follow shardings lazily too.

    JAX 0.10.2 and 0.12.0 heed a sharding only where the value to fill with is an array of their
    own, and take an instance of ``kind`` that is to be resembled for a tracer, which has none.
    """
    global _full_patched
    if _full_patched:
        return
    original = _lax.full

    @functools.wraps(original)
    def full(shape: Any, fill_value: Any, dtype: Any = None, *, sharding: Any = None) -> Any:
        if sharding is None or not sharding._is_concrete:
            return original(shape, fill_value, dtype, sharding=sharding)
        with under_mesh(None):  # the sharding alone says where
            value: Any = original((), fill_value, dtype)
            if type(value) is not kind:
                return original(shape, fill_value, dtype, sharding=sharding)
            if value.committed:
                with evaluating():
                    return original(shape, value.full_lower(), dtype, sharding=sharding)
            return _broadcast_over(sharding)(value, _core.canonicalize_shape(shape))

    _replace_in_lax("full", full)
    for name in ("full_like", "empty_like"):  # the second in JAX 0.12 alone
        if hasattr(_lax, name):
            _replace_in_lax(name, _of_described(getattr(_lax, name), kind))
    _full_patched = True


class _Description(jax.ShapeDtypeStruct):
    """Describes an array; JAX asks its abstract value alone whether the type is weak."""

    def __init__(self, array: Any) -> None:
        self.aval = array.aval
        is_weak = getattr(self.aval, "weak_type", False)
        sharding = array.sharding if array.committed and not is_weak else None
        super().__init__(array.shape, array.dtype, sharding=sharding, weak_type=is_weak)


def _of_described(like: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    """Return ``like`` for an array that may be of ``kind``, whose description is then used."""

    @functools.wraps(like)
    def described(x: Any, *args: Any, **kwargs: Any) -> Any:
        return like(_Description(x) if type(x) is kind else x, *args, **kwargs)

    return described


@functools.lru_cache(maxsize=64)
def _broadcast_over(sharding: jax.sharding.Sharding) -> Callable[..., Any]:
    return jax.jit(jax.lax.broadcast, static_argnums=1, out_shardings=sharding)


def _replace_in_lax(name: str, function: Callable[..., Any]) -> None:
    for module in (_lax, jax.lax):
        if hasattr(module, name):
            setattr(module, name, function)
