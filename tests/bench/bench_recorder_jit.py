"""What the recorder adds to a call of a jitted function: while it waits, and while it records.

    python tests/bench/bench_recorder_jit.py [--quick]

Each way calls the same function in turn, in one process: plain, inside `snaprt.record` with a
condition that never holds, with one that waits for an error, with the last five executions held
(the flight recorder), and with all recorded. A call counts until its result is there. The targets:
armed but not firing, at most 5 us of a 20 us step, and 2 % of a 1 ms one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["SNAPRT_CACHE"] = "off"

import jax
import jax.numpy as jnp
import measuring

import snaprt
from snaprt.snapshot.recorder.record import process_recorder

PLAIN, ARMED, ERROR = "plain jit", "armed", "armed for errors"
KEPT, ALL = "last 5 held", "all recorded"
WAYS = {
    ARMED: {"SNAPRT_RECORD": "name=never"},
    ERROR: {"SNAPRT_RECORD": "error"},
    KEPT: {"SNAPRT_RECORD_KEEP_LAST": "5"},
    ALL: {"SNAPRT_RECORD": "all"},
}
NEVER_FIRES = (PLAIN, ARMED, ERROR, KEPT)


def small_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a step of about 20 us, most of it the call itself."""
    params = {f"w{number}": jnp.ones(16) for number in range(4)}

    def step(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w: w - 0.01 * x * w, params)

    return jax.jit(step), (params, jnp.ones(16))


def large_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a step of about 1 ms."""
    params = {f"w{number}": jnp.ones((192, 192)) * 0.01 for number in range(4)}

    def step(params: Any, x: jax.Array) -> Any:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return x

    return jax.jit(step), (params, jnp.ones((192, 192)))


def microseconds(step: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    """Return what one call takes, of so many."""
    jax.block_until_ready(step(*arguments))
    started = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(step(*arguments))
    return 1e6 * (time.perf_counter() - started) / calls


@contextlib.contextmanager
def recording(variables: dict[str, str], folder: Path) -> Iterator[None]:
    """Record inside what environment variables ask for."""
    os.environ.update(variables, SNAPRT_DUMP_DIR=str(folder))
    with snaprt.record():
        yield
    for name in (*variables, "SNAPRT_DUMP_DIR"):
        del os.environ[name]


def measure(
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]], calls: int, rounds: int
) -> dict[str, list[float]]:
    step, arguments = make()
    found: dict[str, list[float]] = {way: [] for way in (PLAIN, *WAYS)}
    folder = Path(tempfile.mkdtemp())
    for _ in range(rounds):
        for way in found:
            with recording(WAYS[way], folder) if way in WAYS else contextlib.nullcontext():
                # Where each is written, a few: else the queue fills, and calls wait for the disk.
                count = calls if way in NEVER_FIRES else min(calls, 20)
                found[way].append(microseconds(step, arguments, count))
            if way == ALL:
                process_recorder().flush()
    shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, to try the script")
    rounds = 5 if parser.parse_args().quick else 25
    print(measuring.machine())
    print("Microseconds a call, until the result is there: minimum/median, and what is added to")
    print("plain jit. Where other processes run, the minima say more.")
    rows = []
    for name, make, calls in (("small", small_step, 400), ("large", large_step, 60)):
        found = measure(make, calls, rounds)
        for way, values in found.items():
            cells: list[list[str]] = [[], [], []]
            for of in (min, measuring.median):
                value, plain = of(values), of(found[PLAIN])
                texts = f"{value:.1f}", f"{value - plain:+.1f}", f"{100 * (value / plain - 1):+.1f}"
                for cell, text in zip(cells, texts, strict=True):
                    cell.append(text)
            rows.append([f"{name}: {way}", *map("/".join, cells)])
    print()
    measuring.show_table(["step", "us a call", "added", "% of plain"], rows)


if __name__ == "__main__":
    main()
