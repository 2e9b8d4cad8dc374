"""Threads that a test starts and waits for, and that fail it if they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import snaprt

_Result = TypeVar("_Result")


def in_thread(work: Callable[..., _Result], *arguments: Any) -> _Result:
    """Return what ``work`` returns in a new thread, or raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *arguments).result()


def lazily_in_thread(function: Callable[[], _Result]) -> _Result:
    """Return what ``function`` returns in a thread that has marked no step yet, run lazily."""

    def work() -> _Result:
        with snaprt.lazy():
            return function()

    return in_thread(work)


def in_threads(count: int, work: Callable[[int], _Result]) -> list[_Result]:
    """Call ``work`` with each number below ``count``, in threads that begin together.

    Returns:
        What it returned for each number.

    Raises:
        BaseException: What it raised for the first number for which it did.
    """
    barrier = threading.Barrier(count)

    def begin_together(number: int) -> _Result:
        barrier.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin_together, range(count)))
