"""Measure how two float arrays of any size differ; it must not know verdicts, names or files.

The work is done in chunks that stay in a core's cache, over several threads (NumPy lets the others
run), by `chunk_errors`. The tolerance depends on the expected side's root mean square, so what is
beyond it is counted at the end, and only in chunks whose worst errors leave that open.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from snaprt_replay.chunk_errors import ChunkMeter, count_beyond
from snaprt_replay.error_totals import FloatErrors, OpenChunk
from snaprt_replay.tolerance import Tolerance

_CHUNK_BYTES = 1 << 17
_ELEMENTS_PER_THREAD = 1 << 20
_MOST_THREADS = 8

_Chunk = TypeVar("_Chunk")


def measure(
    expected: np.ndarray, actual: np.ndarray, tolerance_for: Callable[[float], Tolerance]
) -> FloatErrors:
    """Compare two arrays element by element.

    Everything is exact but the histogram of ULP distances, which beyond half a million elements
    counts a sample of the chunks in which much differs.

    Args:
        expected: One dimension, C-contiguous, any real float dtype.
        actual: The same shape and dtype.
        tolerance_for: Gives the tolerance for a root mean square of the expected side.
    """
    step = _CHUNK_BYTES // max(4, expected.itemsize)
    chunks = [(start, min(start + step, expected.size)) for start in range(0, expected.size, step)]

    def measure_part(part: Sequence[tuple[int, int]]) -> FloatErrors:
        meter = ChunkMeter(expected, actual, min(step, expected.size))
        with np.errstate(all="ignore"):  # each thread has its own
            for start, stop in part:
                meter.measure(start, stop)
        return meter.errors

    result = FloatErrors()
    for errors in _in_threads(measure_part, chunks, expected.size):
        result.merge(errors)
    tolerance = result.tolerance = tolerance_for(result.rms)

    def count_part(part: Sequence[OpenChunk]) -> FloatErrors:
        errors = FloatErrors()
        with np.errstate(all="ignore"):
            for chunk in part:
                count_beyond(errors, expected, actual, tolerance, chunk)
        return errors

    still_open = [chunk for chunk in result.open_chunks if not chunk.is_within(tolerance)]
    for errors in _in_threads(count_part, still_open, len(still_open) * step):
        result.merge(errors)
    return result


def _in_threads(
    work: Callable[[Sequence[_Chunk]], FloatErrors], chunks: Sequence[_Chunk], elements: int
) -> list[FloatErrors]:
    """Deal chunks to as many threads as are worth starting; results come in array order."""
    count = max(1, min(os.cpu_count() or 1, _MOST_THREADS, elements // _ELEMENTS_PER_THREAD))
    if count == 1:
        return [work(chunks)]
    edges = [len(chunks) * index // count for index in range(count + 1)]
    parts = [chunks[low:high] for low, high in itertools.pairwise(edges)]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, parts))
