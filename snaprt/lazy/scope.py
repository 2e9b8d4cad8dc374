"""When a thread runs lazily: the `lazy` scope, `enable` and `disable`."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

from snaprt import jaxapi
from snaprt.lazy.step import left_with, thread_trace


class lazy(ContextDecorator):  # noqa: N801 - reads as a function, used as a scope and a decorator
    """Run eager JAX code lazily inside: ``with snaprt.lazy(): ...`` or ``@snaprt.lazy()``.

    Operations are recorded and run together at `mark_step`, or when a value is read. What is
    pending when the scope ends stays pending: its arrays compute themselves when they are used.
    Scopes nest, and each thread has its own.
    """

    def __init__(self) -> None:
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        self._outer.append(jaxapi.current_trace())
        jaxapi.set_thread_trace(thread_trace())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        jaxapi.set_thread_trace(self._outer.pop())
        if error is not None:
            left_with(error)

    def _recreate_cm(self) -> lazy:
        return lazy()


def enable() -> None:
    """Run this thread lazily from here on, until `disable`."""
    jaxapi.set_thread_trace(thread_trace())


def disable() -> None:
    """Run this thread eagerly again; what is pending computes itself when it is used."""
    jaxapi.set_thread_trace(None)
