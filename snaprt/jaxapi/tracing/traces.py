"""Under which trace a thread runs its operations."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _partial_eval

# Any: our subclasses answer where the base classes are typed to raise.
Tracer: Any = _core.Tracer
Trace: Any = _core.Trace
set_current_trace = _core.set_current_trace


def evaluating() -> AbstractContextManager[Any]:
    """Return a context in which operations run at once, as they do in plain eager JAX."""
    return set_current_trace(_core.eval_trace)


def evaluating_compiled() -> AbstractContextManager[Any]:
    """Return a context as `evaluating` does, in which programs are compiled and called.

    That holds under `jax.disable_jit` too: what was recorded there is single operations already.
    """
    return _with_jit() if jit_is_disabled() else evaluating()


def jit_is_disabled() -> bool:
    """Return whether jitted functions run operation by operation, under `jax.disable_jit`."""
    return _config.disable_jit.value


@contextmanager
def _with_jit() -> Iterator[None]:
    with _config.disable_jit(False), evaluating():
        yield


_P = ParamSpec("_P")


def once(teach: Callable[_P, None]) -> Callable[_P, None]:
    """Return a function that changes JAX: only its first call does something."""
    called: list[None] = []

    @functools.wraps(teach)
    def teach_once(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if not called:
            called.append(None)
            teach(*args, **kwargs)

    return teach_once


class _Staging(threading.local):
    for_constants = ""  # what traces
    only_shapes = False  # whether what comes of it is shapes and dtypes alone


#: What this thread traces whose closures may hold no tracers: see `snaprt.jaxapi.tracing.teaching`.
staging = _Staging()


#: The types of arrays whose values are such constants.
read_as_constants: set[type] = set()


@contextmanager
def staging_for_constants(name: str) -> Iterator[None]:
    """Have what is traced inside close over values; ``name`` is what traces."""
    outer, staging.for_constants = staging.for_constants, name
    try:
        yield
    finally:
        staging.for_constants = outer


@contextmanager
def staging_for_shapes() -> Iterator[None]:
    """Have what is traced inside take and close over no values, for nobody runs it."""
    outer, staging.only_shapes = staging.only_shapes, True
    try:
        yield
    finally:
        staging.only_shapes = outer


def current_trace() -> Any:
    """Return this thread's current trace (``None`` while JAX 0.12 binds a primitive)."""
    return _core.trace_ctx.trace


#: Its ``value`` is this thread's current trace: `current_trace`, three times as fast.
current_trace_setting: Any = _core.trace_state_strong_ref


def set_thread_trace(trace: Any) -> None:
    """Make ``trace`` this thread's current trace until told otherwise; ``None`` means eager."""
    _core.trace_ctx.set_trace(_core.eval_trace if trace is None else trace)


def is_staging() -> bool:
    """Return whether a function is being traced here whose operations run later, more than once."""
    trace = current_trace()
    while trace is not None:
        if isinstance(trace, _partial_eval.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_traced_reference(value: Any) -> bool:
    """Return whether ``value`` is the tracer of a reference, which is no `jax.Array`."""
    return isinstance(value, Tracer) and not isinstance(value, jax.Array)


def refuse_escaped_tracer(value: Any) -> None:
    """Raise `jax.errors.UnexpectedTracerError`, as eager JAX does, if ``value`` is a tracer."""
    if isinstance(value, Tracer):
        raise _core.escaped_tracer_error(value)
