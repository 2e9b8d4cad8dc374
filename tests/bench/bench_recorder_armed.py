"""What the recorder costs while it is armed and nothing happens, and what one that fires costs.

Run it: python tests/bench/bench_recorder_armed.py [--rounds N] [--megabytes N] [--folder DIR]

First executions of 20 us and lazy steps of 1 ms with conditions that never hold, beside the same
with recording off; then a training step of 5 ms with and without the NaN watch; what runs is made
as large as this machine needs for that. Then how much more memory a process takes at its peak.
Last, one recorded execution with a large input beside XLA's own dump and a plain write: that is
`bench_snapshot.py`, whose other figures are left out.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_snapshot
import measuring

ROUNDS = 3
MEGABYTES = 512
LOOPS = 100
OFF = "recording off"
ARMED = {
    "name=^nowhere$": {"SNAPRT_RECORD": "name=^nowhere$"},
    "step=1000000-, every=10": {"SNAPRT_RECORD": "step=1000000-, every=10"},
    "error": {"SNAPRT_RECORD": "error"},
    "slower=1h": {"SNAPRT_RECORD": "slower=1h"},
    "nan": {"SNAPRT_RECORD": "nan"},
    "--keep-last 5": {"SNAPRT_RECORD_KEEP_LAST": "5"},
}
BY_HAND = "5 kept by the program"
_NAMES = ("SNAPRT_RECORD", "SNAPRT_RECORD_KEEP_LAST", "SNAPRT_DUMP_DIR", "BENCH_KEEP")


def arm(variables: dict[str, str], folder: Path) -> None:
    for name in _NAMES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    if variables and "BENCH_KEEP" not in variables:
        os.environ["SNAPRT_DUMP_DIR"] = str(folder)


def small_run(links: int) -> Any:
    """Return what runs ``count`` executions of a chain of products, without recording a graph."""
    import jax.numpy as jnp
    from executables import executable_of

    from snaprt.compile.executable import run
    from snaprt.snapshot.recorder.record import process_recorder

    x = jnp.ones((24, 24))

    def chain(x: Any) -> Any:
        y = x
        for _ in range(links):
            y = y @ x * 0.01
        return [y]

    executable = executable_of(chain, x)
    recorder = process_recorder()

    def runs(count: int) -> None:
        for _ in range(count):
            run(executable, [x], recorder)[0].block_until_ready()

    return runs


def lazy_steps(links: int) -> Any:
    """Return what runs ``count`` lazy steps, each of a chain of products."""
    import jax.numpy as jnp

    import snaprt

    w = jnp.ones((320, 320)) / 320

    def runs(count: int) -> None:
        # What the flight recorder holds takes its time whoever holds it.
        kept: collections.deque[Any] = collections.deque(
            maxlen=int(os.environ.get("BENCH_KEEP", "0"))
        )
        with snaprt.lazy():
            x = w
            for _ in range(count):
                kept.append(x)
                for _ in range(links):
                    x = x @ w + w
                snaprt.mark_step(wait=True)

    return runs


def training(batch: int) -> Any:
    """Return what runs ``count`` lazy training steps (MLP, Adam)."""
    import jax
    import jax.numpy as jnp

    import snaprt

    width, layers = 160, 4
    keys = jax.random.split(jax.random.key(0), layers + 1)
    start = [jax.random.normal(key, (width, width)) * 0.08 for key in keys[:layers]]
    x = jax.random.normal(keys[layers], (batch, width))

    @jax.jit
    def update(weights: Any, first: Any, second: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for w in weights:
                h = jax.nn.gelu(h @ w) + h
            return jnp.mean((h - 1.0) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        second = [0.99 * v + 0.01 * g * g for v, g in zip(second, gradients, strict=True)]
        weights = [
            w - 1e-4 * m / (jnp.sqrt(v) + 1e-8)
            for w, m, v in zip(weights, first, second, strict=True)
        ]
        return weights, first, second, value

    state: list[Any] = [start, [w * 0 for w in start], [w * 0 for w in start]]

    def runs(count: int) -> None:
        with snaprt.lazy():
            for _ in range(count):
                *state[:], _loss = update(*state)
                snaprt.mark_step(wait=True)

    return runs


def sized(make: Any, size: int, microseconds: float, count: int) -> Any:
    """Return ``make(size)``, of a size at which a step takes so long while recording is off."""
    runs = make(size)
    runs(count)
    found = []
    for _ in range(9):
        started = time.perf_counter()
        runs(count)
        found.append(1e6 * (time.perf_counter() - started) / count)
    return make(max(1, round(size * microseconds / measuring.median(found))))


def measure_steps(runs: Any, count: int, modes: dict[str, dict[str, str]], folder: Path) -> Any:
    """Return mode -> microseconds a step, of each loop; the modes take turns."""
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for loop in range(LOOPS + 1):
        for mode, variables in modes.items():
            arm(variables, folder)
            runs(2)
            started = time.perf_counter()
            runs(count)
            if loop:  # the first compiles
                found[mode].append(1e6 * (time.perf_counter() - started) / count)
    if list(folder.glob("*.snap")):
        raise SystemExit("something was recorded although no condition holds")
    return found


def measure_armed(folder: Path, megabytes: int) -> dict[str, Any]:
    modes = {OFF: {}, **ARMED}
    # Without a flag, which only lazy graphs and jitted functions get, all arrays are read for NaN.
    unwatched = {mode: variables for mode, variables in modes.items() if mode != "nan"}
    return {
        "20 us": measure_steps(sized(small_run, 10, 20, 200), 200, unwatched, folder),
        "1 ms": measure_steps(
            sized(lazy_steps, 4, 1000, 20), 20, {**modes, BY_HAND: {"BENCH_KEEP": "5"}}, folder
        ),
    }


def measure_nan(folder: Path, megabytes: int) -> dict[str, Any]:
    modes = {OFF: {}, "nan": ARMED["nan"]}
    return {"training": measure_steps(sized(training, 1024, 5000, 10), 10, modes, folder)}


def measure_memory(folder: Path, megabytes: int) -> dict[str, Any]:
    """Return MiB that the peak of this process grows by in steps with a large state.

    Each step makes a new state of the old one; two are alive at once.
    """
    import jax
    import jax.numpy as jnp

    import snaprt

    mode = os.environ["BENCH_MODE"]
    arm({OFF: {}, "all, first=1": {"SNAPRT_RECORD": "all, first=1"}, **ARMED}[mode], folder)
    size = megabytes * (1 << 20) // 4
    with snaprt.lazy():
        x = jnp.zeros(size)
        for _ in range(6):
            x = x + 1.0
            snaprt.mark_step(wait=True)
    jax.block_until_ready(x)
    from snaprt.snapshot.recorder.record import process_recorder

    process_recorder().flush()
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


MEASURE = {"armed": measure_armed, "nan": measure_nan, "memory": measure_memory}


def child(kind: str, megabytes: int, where: Path, **variables: str) -> dict[str, Any]:
    environment = measuring.clean_environment() | {"SNAPRT_CACHE": "off"} | variables
    with tempfile.TemporaryDirectory(dir=where) as folder:
        arguments = ["--child", kind, "--folder", folder, "--megabytes", str(megabytes)]
        return measuring.run_child(__file__, arguments, environment)


def show_steps(title: str, found: dict[str, list[float]]) -> None:
    off = found[OFF]
    rows = []
    for mode, values in found.items():
        # Beside each other in time: what else the machine does changes slowly.
        more = measuring.median([a - b for a, b in zip(values, off, strict=True)])
        cells = [mode, f"{min(values):.2f}/{measuring.median(values):.2f}"]
        share = 100 * more / measuring.median(off)
        rows.append(cells + (["", ""] if mode == OFF else [f"{more:+.2f}", f"{share:+.1f} %"]))
    print(f"\n{title}, microseconds a step:\n")
    measuring.show_table(["", "min/median", "more", "share"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"(default {ROUNDS})")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="of the large input")
    parser.add_argument("--folder", type=Path, help="where to write (default: temporary files)")
    parser.add_argument("--child", choices=tuple(MEASURE), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    where = arguments.folder or Path(tempfile.gettempdir())
    if arguments.child:
        print(json.dumps(MEASURE[arguments.child](where, arguments.megabytes)))
        return
    print(measuring.machine(), flush=True)
    armed = child("armed", arguments.megabytes, where)
    show_steps("An execution of 20 us", armed["20 us"])
    show_steps("A lazy step of 1 ms", armed["1 ms"])
    show_steps("A training step of 5 ms", child("nan", arguments.megabytes, where)["training"])
    modes = (OFF, "error", "nan", "--keep-last 5", "all, first=1")
    peaks = {
        mode: child("memory", arguments.megabytes, where, BENCH_MODE=mode)["peak"] for mode in modes
    }
    print(f"\nPeak memory of six steps with a state of {arguments.megabytes} MiB, MiB:\n")
    rows = [[mode, f"{peak:.0f}", f"{peak - peaks[OFF]:+.0f}"] for mode, peak in peaks.items()]
    measuring.show_table(["", "peak", "more"], rows)
    kinds = (bench_snapshot.OURS, bench_snapshot.XLA, bench_snapshot.PLAIN)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            found[kind].append(bench_snapshot.measure(kind, arguments.megabytes, where))
    bench_snapshot.show(found)


if __name__ == "__main__":
    main()
