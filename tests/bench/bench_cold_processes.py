"""Eight processes that start cold on one program: what compiling costs them in all, beside JAX.

Run it: python tests/bench/bench_cold_processes.py [--processes N] [--layers N]

The program is the training step of bench_start.py, by default with 24 layers. Counted are the CPU
seconds (user and system) of whole processes, as the system reports them: of one that starts with an
empty cache, of one that finds it filled, and of N at the same time, with an empty cache and with a
filled one. Nothing saves a process its imports, its tracing and the loading of an executable, which
is what a warm process does; what a cold one takes above that is compiling, storing and waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROCESSES, LAYERS = 8, 24
LAZY, PLUGIN, PEER = "snaprt, lazily", "snaprt under jax.jit", "JAX's own cache"
WARM_RUNS = 3


def child(side: str, layers: int) -> None:
    """Run one step and print its loss."""
    import bench_start
    import jax

    bench_start.LAYERS = layers
    if side == PLUGIN:
        import snaprt

        snaprt.cache.install()
    state, words = bench_start.state_on_device()
    step = bench_start.training_step()
    if side == LAZY:
        import snaprt

        with snaprt.lazy():
            state, loss = step(state, words)
            snaprt.mark_step()
    else:
        state, loss = jax.jit(step)(state, words)
    print(json.dumps({"loss": float(loss)}))


def start(side: str, cache: Path, bytecode: Path, layers: int) -> subprocess.Popen[str]:
    import measuring

    environment = measuring.clean_environment(bytecode)
    if side == PEER:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    else:
        environment["SNAPRT_CACHE_DIR"] = str(cache)
    return subprocess.Popen(
        [sys.executable, __file__, "--child", side, "--layers", str(layers)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def cpu_seconds(process: subprocess.Popen[str], losses: set[float]) -> float:
    """Wait for a process and return its user and system seconds."""
    assert process.stdout is not None
    shown = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"a process of {process.args} ended with {process.returncode}")
    losses.add(json.loads(shown.splitlines()[-1])["loss"])
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=PROCESSES, metavar="N")
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N")
    parser.add_argument("--child", choices=(LAZY, PLUGIN, PEER), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.layers)
        return
    import measuring

    number, layers = arguments.processes, arguments.layers
    print(measuring.machine())
    losses: set[float] = set()
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bytecode = Path(folder, "bytecode")
        for side in (LAZY, PLUGIN, PEER):
            # The first leaves the compiled Python modules.
            cpu_seconds(start(side, Path(folder, f"first {side}"), bytecode, layers), losses)
            alone = Path(folder, f"alone {side}")
            one = cpu_seconds(start(side, alone, bytecode, layers), losses)
            one_warm = measuring.median(
                [
                    cpu_seconds(start(side, alone, bytecode, layers), losses)
                    for _ in range(WARM_RUNS)
                ]
            )
            both = []
            for _ in ("cold", "warm"):
                together = Path(folder, f"together {side}")
                processes = [start(side, together, bytecode, layers) for _ in range(number)]
                both.append(sum(cpu_seconds(process, losses) for process in processes))
            many, many_warm = both
            above, many_above = one - one_warm, many - many_warm
            figures = (one, one_warm, many, many_warm, many / one)
            figures += (above, many_above, many_above / above)
            rows.append([side, *(f"{figure:.2f}" for figure in figures)])
            print(f"{side}: {many_above / above:.2f}", file=sys.stderr, flush=True)
    print(f"Losses: {', '.join(map(str, sorted(losses)))}\n")
    print("CPU seconds of whole processes, and what cold ones take above as many warm ones:\n")
    heads = ["", "1 cold", "1 warm", f"{number} cold", f"{number} warm", f"{number} cold : 1 cold"]
    measuring.show_table([*heads, "1 above", f"{number} above", "ratio"], rows)


if __name__ == "__main__":
    main()
