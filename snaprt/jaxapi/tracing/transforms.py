"""Asks others before JAX transforms a function: `jax.vjp`, `jax.jvp`, `jax.vmap`, `lax.scan` .."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import api as _api
from jax._src.lax.control_flow import loops as _loops

from snaprt.jaxapi.tracing.traces import current_trace_setting, once

NOT_FOLLOWED = object()

#: Follows a call of a transformation: the trace, the transformation, the function that it is given,
#: its operands, and its options. Returns what it returns, or `NOT_FOLLOWED`.
FollowTransform = Callable[[Any, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

#: What `jax.vjp` returns.
Pullback: type = _api.VJP


def code_of_pullback(pullback: Any) -> Any:
    """Return the part of a `Pullback` that does not depend on values; compare it by identity."""
    return pullback.fun


@once
def intercept_transforms(kind: type, follow: FollowTransform) -> None:
    """Ask ``follow`` first wherever a function is transformed under a trace of type ``kind``.

    `jax.grad`, `jax.value_and_grad`, `jax.jacrev` and libraries that wrap them call `jax.vjp` by
    its name in a module of JAX's, so that functions made before this are followed as well; what
    `jax.vmap` and `jax.checkpoint` returned before is not. Checked with jax 0.10.2 and 0.12.0.
    """

    def ask(transform: Callable[..., Any], function: Any, operands: Any, options: Any) -> Any:
        trace = current_trace_setting.value
        return (
            follow(trace, transform, function, operands, options) if type(trace) is kind else _NOT
        )

    def direct(transform: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(transform)
        def transformed(fun: Any, *operands: Any, **options: Any) -> Any:
            result = ask(transform, fun, operands, options)
            return transform(fun, *operands, **options) if result is _NOT else result

        return transformed

    def maker(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def making(*args: Any, **options: Any) -> Any:
            transform = make(*args, **options)
            if not callable(transform) or not args:  # `jax.checkpoint(policy=...)`, for a decorator
                return transform

            @functools.wraps(transform)
            def call(*operands: Any, **kwargs: Any) -> Any:
                result = ask(_call, transform, (operands, kwargs), {})
                return transform(*operands, **kwargs) if result is _NOT else result

            return call

        return making

    def pull(pullback: Any, cotangent: Any, *more: Any) -> Any:
        result = _NOT if more else ask(_pull, None, (pullback, cotangent), {})
        return original_pull(pullback, cotangent, *more) if result is _NOT else result

    original_pull: Any = _api.VJP.__call__

    def _pull(_: None, pullback: Any, cotangent: Any) -> Any:
        return original_pull(pullback, cotangent)

    _replace(direct(_api.vjp), "vjp", _api, jax)
    _replace(direct(_api.jvp), "jvp", _api, jax)
    _replace(direct(_api.linearize), "linearize", _api, jax)
    _replace(maker(_api.vmap), "vmap", _api, jax)
    _replace(maker(_ad_checkpoint.checkpoint), "checkpoint", _ad_checkpoint, jax)
    _replace(maker(_ad_checkpoint.checkpoint), "remat", _ad_checkpoint, jax)
    _replace(direct(_loops.scan), "scan", _loops, jax.lax)
    _api.VJP.__call__ = functools.wraps(original_pull)(pull)  # type: ignore[method-assign]


_NOT = NOT_FOLLOWED


def _call(function: Any, operands: Any, kwargs: Any) -> Any:
    return function(*operands, **kwargs)


def _replace(function: Callable[..., Any], name: str, *modules: Any) -> None:
    for module in modules:
        setattr(module, name, function)
