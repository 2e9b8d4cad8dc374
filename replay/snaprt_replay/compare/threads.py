"""Deal ranges of things to threads; it must not know what is done with them."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np

_ELEMENTS_PER_THREAD = 1 << 20
_MOST_THREADS = 8

Result = TypeVar("Result")


def in_threads(work: Callable[[int, int], Result], count: int, elements: int) -> list[Result]:
    """Deal ``count`` things, in ranges, to as many threads as ``elements`` are worth starting.

    NumPy's warnings are off in them. Results come in the things' order.
    """

    def quietly(low: int, high: int) -> Result:
        with np.errstate(all="ignore"):  # each thread has its own
            return work(low, high)

    threads = max(1, min(os.cpu_count() or 1, _MOST_THREADS, elements // _ELEMENTS_PER_THREAD))
    if threads == 1:
        return [quietly(0, count)]
    edges = [count * index // threads for index in range(threads + 1)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(quietly, edges[:-1], edges[1:]))
