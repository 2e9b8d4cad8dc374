"""Measures one thing on JAX's default device, and prints it as one JSON object.

Run by check.py: ``python figures.py NAME [ARGUMENT ...]``. It measures what the benchmarks of
`tests/bench` measure, in few rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "bench"), str(TESTS / "support")]


def large_snapshot(megabytes: str, folder: str) -> dict[str, float]:
    """Record one execution with a large input; its files stay in ``folder``."""
    import bench_snapshot
    import jax

    import snaprt
    from snaprt.snapshot.recorder.record import process_recorder

    x = jax.device_put(bench_snapshot.random_input(int(megabytes)))
    step = jax.jit(bench_snapshot.program)

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(step(x))
        return time.perf_counter() - started

    run()
    without = min(run() for _ in range(bench_snapshot.STEPS))
    with snaprt.record("all", folder):
        started = time.perf_counter()
        blocked = run() - without
        process_recorder().flush()
        complete = time.perf_counter() - started
    return {
        "execution_ms": 1e3 * without,
        "blocked_ms": 1e3 * blocked,
        "complete_s": complete,
        "mib_written": bench_snapshot.size_of(Path(folder)) / (1 << 20),
    }


def starts() -> dict[str, float]:
    """Start a 12-layer transformer with a cold and a warm cache: snaprt's, and JAX's own."""
    import bench_start

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        bytecode = Path(folder, "bytecode")
        for side in (bench_start.OURS, bench_start.PEER):
            for kind in ("compiled modules of Python", "cold", "warm"):
                cache = Path(folder, f"{side} {kind == 'compiled modules of Python'}")
                one = bench_start.start(side, cache, bytecode)
                if (one["hits"] > 0) != (kind == "warm"):
                    raise SystemExit(f"a {kind} start of {side} hit its cache {one['hits']} x")
                found[f"{side} {kind}_s"] = one["total"]
    return {name: seconds for name, seconds in found.items() if "Python" not in name}


def armed() -> dict[str, float]:
    """Return what a lazy step of 1 ms takes longer while a condition is armed, in microseconds."""
    import bench_recorder_armed as bench

    bench.LOOPS = 20
    os.environ["SNAPRT_CACHE"] = "off"
    modes = {
        bench.OFF: {},
        **{mode: bench.ARMED[mode] for mode in ("error", "nan", "--keep-last 5")},
    }
    with tempfile.TemporaryDirectory() as folder:
        steps = bench.sized(bench.lazy_steps, 4, 1000, 20)
        found = bench.measure_steps(steps, 20, modes, Path(folder))
    off = found.pop(bench.OFF)
    more = {
        f"{mode}_us": statistics.median([a - b for a, b in zip(values, off, strict=True)])
        for mode, values in found.items()
    }
    return {"step_us": statistics.median(off)} | more


def jit_calls() -> dict[str, float]:
    """Return what the recorder adds to a small jitted call, in microseconds."""
    import bench_recorder_jit as bench

    found = bench.measure(bench.small_step, 400, 10)
    plain = statistics.median(found.pop(bench.PLAIN))
    more = {f"{way}_us": statistics.median(values) - plain for way, values in found.items()}
    return {"call_us": plain} | more


def planted_fault(suspect: str, reference: str) -> dict[str, float]:
    """Plant a fault in a module that only ``suspect`` compiles with it, and localize it.

    Raises:
        SystemExit: Another instruction was found, or none.
    """
    import bench_planted
    import planted_faults
    from snaprt_replay.run.workers import Workers

    with tempfile.TemporaryDirectory() as folder, Workers(2) as workers:
        os.environ["SNAPRT_CACHE_DIR"] = folder
        models = [planted_faults.lower("transformer")]
        (result,) = bench_planted.run_all(workers, models, 1, reference, 0, suspect)
    if result.outcome == bench_planted.WRONG:
        raise SystemExit("the fault was not found")
    return {
        "instructions": result.instructions,
        "compiles": result.compiles,
        "search_s": result.seconds,
    }


MEASUREMENTS = {
    one.__name__: one for one in (large_snapshot, starts, armed, jit_calls, planted_fault)
}

if __name__ == "__main__":
    print(json.dumps(MEASUREMENTS[sys.argv[1]](*sys.argv[2:])))
