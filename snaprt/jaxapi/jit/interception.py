"""Lets another answer the calls under its trace; must not know how it finds the answers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.numpy import indexing as _indexing

from snaprt.jaxapi.jit.entry import (
    NO_FAST_PATH,
    MakeCall,
    ask_before_jit,
    infer_jit,
    parse_jit_call,
    run_jit,
)
from snaprt.jaxapi.tracing.arrays import ArrayImpl
from snaprt.jaxapi.tracing.traces import current_trace_setting

NOT_KNOWN = object()

_FollowJit = Callable[
    [Any, Callable[..., Any], Any, Any, Any],
    tuple[Any, Callable[[Any], None] | None, tuple[Any, Any]],
]


def intercept_jit(kind: type, follow: _FollowJit) -> None:
    """Ask ``follow`` first whenever a jitted function is called under a trace of type ``kind``.

    Args:
        kind: The type of the trace.
        follow: Takes the trace, the function, what JAX knows of the jit, and the arguments. Returns
            what the call returns, or ``NOT_KNOWN`` and what to tell what JAX then returned, with
            the arguments to call it with.
    """

    def ask(fun: Any, info: Any, args: Any, kwargs: Any) -> MakeCall | None:
        trace = current_trace_setting.value
        if type(trace) is not kind:
            return None
        returned, learn, sent = follow(trace, fun, info, args, kwargs)
        if returned is not NOT_KNOWN:
            return lambda: (returned, *NO_FAST_PATH)
        if learn is None:
            return None

        def make() -> tuple[Any, ...]:
            inferred, flat = infer_jit(fun, info, *sent)
            done = run_jit(inferred, flat, fun, *sent)
            learn(done[0])
            return done

        return make

    ask_before_jit(kind, ask)


def intercept_indexing(
    kind: type, follow: Callable[[Any, Any, Any, Callable[[], Any]], Any]
) -> None:
    """Ask ``follow`` whenever an ordinary array is indexed under a trace of type ``kind``.

    Checked with jax 0.10.2 and 0.12.0: ``__getitem__`` of an array calls this function by its name.

    Args:
        kind: The type of the trace.
        follow: Takes the trace, the array, the index, and what computes the result as JAX does.
    """
    take = getattr(_indexing, "rewriting_take", None)
    if take is None or getattr(take, "intercepted", False):
        return

    @functools.wraps(take)
    def rewriting_take(arr: Any, idx: Any, **options: Any) -> Any:
        trace = current_trace_setting.value
        if type(trace) is kind and type(arr) is ArrayImpl and not options:
            return follow(trace, arr, idx, lambda: take(arr, idx))
        return take(arr, idx, **options)

    rewriting_take.intercepted = True  # type: ignore[attr-defined]
    module: Any = _indexing
    module.rewriting_take = rewriting_take


def parse_call(
    function: Callable[..., Any], info: Any, args: Any, kwargs: Any
) -> tuple[Any, Sequence[Any]] | None:
    """Return what identifies a call of a jitted function, and its flat arguments that are traced.

    The first can be hashed and compared; it does not hold the function. ``None`` where arguments
    cannot be hashed.
    """
    try:
        signature, operands = parse_jit_call(info, args, kwargs)
        key = (weakref.ref(function), info, signature)
        hash(key)
    except (TypeError, ValueError):
        return None
    return key, operands
