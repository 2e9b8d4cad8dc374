"""Compare 1 GB of outputs, against reading both sides once from memory.

Run: python tests/bench/bench_compare.py [MIB]
"""

from __future__ import annotations

import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
from measuring import machine, show_table, taking_turns
from snaprt_replay.compare.compare import compare
from snaprt_replay.load.case import NamedArray

ROUNDS = 3
THREADS = min(os.cpu_count() or 1, 8)  # as many as `compare` uses


def read(arrays: list[np.ndarray]) -> None:
    """Read arrays once, over as many threads as `compare` uses: a reduction that costs nothing."""
    parts = [part for array in arrays for part in np.array_split(array.view(np.uint64), THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(np.bitwise_xor.reduce, parts))


def differing_arrays(size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return pairs of ``size`` bytes each, by what differs."""
    random = np.random.default_rng(0)
    plain = random.standard_normal(size // 4, dtype=np.float32)
    rounded = plain * (1 + random.standard_normal(plain.size, dtype=np.float32) * np.float32(1e-6))
    holed = plain.copy()
    holed[:: plain.size // 1000] = np.nan
    few = plain.copy()
    few[:: 1 << 20] *= np.float32(1.5)
    other = random.standard_normal(size // 4, dtype=np.float32)
    halves = [array.view(np.uint32) >> 16 for array in (plain, other)]
    small = np.concatenate(halves).astype(np.uint16).view(ml_dtypes.bfloat16)
    whole = plain.view(np.int32)
    return {
        "float32, identical": (plain, plain.copy()),
        "float32, few elements differ": (plain, few),
        "float32, all differ by rounding": (plain, rounded),
        "float32, 1000 NaN on one side": (plain, holed),
        "float32, all differ wildly": (plain, other),
        "float64, all differ by rounding": (
            plain[: size // 8].astype(np.float64),
            rounded[: size // 8].astype(np.float64),
        ),
        "bfloat16, identical": (small, small.copy()),
        "bfloat16, all differ by rounding": (small, (small.view(np.uint16) ^ 1).view(small.dtype)),
        "int32, identical": (whole, whole.copy()),
        "int32, all differ": (whole, whole + 1),
    }


def main() -> None:
    """Print the time of comparing against that of reading."""
    size = (int(sys.argv[1]) if len(sys.argv) > 1 else 1024) << 20
    print(machine())
    rows = []
    for name, (expected, actual) in differing_arrays(size).items():
        sides = [NamedArray("out0", expected)], [NamedArray("out0", actual)]
        reading = functools.partial(read, [expected, actual])
        comparing = functools.partial(compare, *sides)
        works = {"read": lambda work=reading: work, "compare": lambda work=comparing: work}
        took = taking_turns(works, ROUNDS)
        pairs = list(zip(*took.values(), strict=True))
        cells = [f"{one:.3f}" for pair in pairs for one in pair]
        ratios = [f"{comparing / reading:.1f}x" for reading, comparing in pairs]
        rows.append([name, *cells, *ratios])
    heads = ["read, s", "compare, s", "read, CPU s", "compare, CPU s", "ratio", "ratio, CPU"]
    show_table([f"2 x {size >> 20} MiB, {THREADS} threads", *heads], rows)


if __name__ == "__main__":
    main()
