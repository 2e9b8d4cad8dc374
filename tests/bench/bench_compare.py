"""Compare 1 GB of outputs, against reading both sides once from memory; and what replay adds.

Run: python tests/bench/bench_compare.py [MIB]
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from measuring import machine, median, show_table
from snaprt_replay.case import NamedArray
from snaprt_replay.compare import compare
from snaprt_replay.load import load
from snaprt_replay.player import play
from snaprt_replay.rerun import replay

ROUNDS = 3
THREADS = min(os.cpu_count() or 1, 8)  # as many as `compare` uses


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of some runs."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


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
    half = plain.view(np.uint32) >> 16
    small = half.astype(np.uint16).view(ml_dtypes.bfloat16)
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
        "bfloat16, all differ by rounding": (small, (small.view(np.uint16) ^ 1).view(small.dtype)),
        "int32, all differ": (whole, whole + 1),
    }


def compare_memory(size: int) -> None:
    """Print the time of comparing against that of reading."""
    rows = []
    for name, (expected, actual) in differing_arrays(size).items():
        reading = seconds(functools.partial(read, [expected, actual]))
        sides = [NamedArray("out0", expected)], [NamedArray("out0", actual)]
        comparing = seconds(functools.partial(compare, *sides))
        rows.append([name, f"{reading:.3f} s", f"{comparing:.3f} s", f"{comparing / reading:.1f}x"])
    show_table([f"2 x {size >> 20} MiB, {THREADS} threads", "read", "compare", "ratio"], rows)


def replay_overhead() -> None:
    """Print what `replay` adds to compiling and executing alone."""

    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x
            for w in weights:
                y = jax.nn.gelu(y @ w)
            return (y**2).mean()

        grads = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    weights = [
        np.random.default_rng(i).normal(size=(1024, 1024)).astype(np.float32) for i in range(8)
    ]
    x = np.ones((64, 1024), np.float32)
    with tempfile.TemporaryDirectory() as name:
        module, inputs = Path(name) / "module.mlir", Path(name) / "inputs.npz"
        module.write_text(jax.jit(step).lower([jnp.asarray(w) for w in weights], x).as_text())
        np.savez(inputs, *[np.asarray(w) for w in weights], x)
        case = load(module, inputs)
        alone = seconds(lambda: play(case))
        whole = seconds(lambda: replay(module, inputs=inputs, isolated=False))
    rows = [
        [
            "MLP step, 8 x 4 MiB",
            f"{alone:.3f} s",
            f"{whole:.3f} s",
            f"{whole / alone - 1:+.0%}",
        ]
    ]
    show_table(["replay", "compile + execute", "replay", "added"], rows)


if __name__ == "__main__":
    os.environ["SNAPRT_CACHE"] = "0"
    print(machine())
    compare_memory((int(sys.argv[1]) if len(sys.argv) > 1 else 1024) << 20)
    print()
    replay_overhead()
