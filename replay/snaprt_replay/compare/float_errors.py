"""Measure how two float arrays of any size differ; it must not know verdicts, names or files.

The work is done over several threads (NumPy and XLA let the others run): where there is much of
it, in large blocks by `block_errors`, else in chunks that stay in a core's cache by `chunk_errors`.
The tolerance depends on the expected side's root mean square, so what is
beyond it is counted at the end, and only in chunks whose worst errors leave that open.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from snaprt_replay.compare.block_errors import BlockMeter, Sides, count_beyond_in_block
from snaprt_replay.compare.chunk_errors import ChunkMeter, count_beyond
from snaprt_replay.compare.error_totals import FloatErrors
from snaprt_replay.compare.fused_kernels import BLOCK, kernels_for
from snaprt_replay.compare.threads import in_threads
from snaprt_replay.compare.tolerance import Tolerance

_CHUNK_BYTES = 1 << 17
# Importing JAX and compiling the kernels takes longer than comparing fewer with NumPy alone.
_FUSED_FROM = 4 * BLOCK


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
    kernels = kernels_for(expected.dtype) if expected.size >= _FUSED_FROM else None

    def measure_part(low: int, high: int) -> FloatErrors:
        chunks = ChunkMeter(expected, actual, min(step, expected.size))
        if kernels is not None:
            sides = Sides(expected, actual)
            blocks = BlockMeter(sides, kernels, chunks)
            first = min(sides.first_aligned(low), high)
            _measure_chunks(chunks, low, first, step)
            low = first + (high - first) // BLOCK * BLOCK
            for start in range(first, low, BLOCK):
                blocks.measure(start)
        _measure_chunks(chunks, low, high, step)
        return chunks.errors

    result = FloatErrors()
    for errors in in_threads(measure_part, expected.size, expected.size):
        result.merge(errors)
    tolerance = result.tolerance = tolerance_for(result.rms)
    open_blocks = [block for block in result.open_blocks if block.open_rows(tolerance).size]
    open_chunks = [chunk for chunk in result.open_chunks if not chunk.is_within(tolerance)]

    def count_in_blocks(low: int, high: int) -> FloatErrors:
        errors, sides = FloatErrors(), Sides(expected, actual)
        for block in open_blocks[low:high]:
            assert kernels is not None
            count_beyond_in_block(errors, sides, kernels, tolerance, block)
        return errors

    def count_in_chunks(low: int, high: int) -> FloatErrors:
        errors = FloatErrors()
        for chunk in open_chunks[low:high]:
            count_beyond(errors, expected, actual, tolerance, chunk)
        return errors

    for errors in in_threads(count_in_blocks, len(open_blocks), len(open_blocks) * BLOCK):
        result.merge(errors)
    for errors in in_threads(count_in_chunks, len(open_chunks), len(open_chunks) * step):
        result.merge(errors)
    return result


def _measure_chunks(meter: ChunkMeter, low: int, high: int, step: int) -> None:
    for start in range(low, high, step):
        meter.measure(start, min(start + step, high))
