"""What profiles cost where none is taken: to ask for one, and one that waits for its step.

    python tests/bench/bench_profile_gate.py

`jaxapi.is_profiled` is asked at each execution; its limit is 0.15 us. A run with
``--profile-steps 1000000-`` follows each call of a jitted function, as ``--watchdog`` does, and
each marked step; the same process calls the same functions before and after it begins to.
"""

from __future__ import annotations

import os
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

os.environ["SNAPRT_CACHE"] = "off"

import jax
import jax.numpy as jnp
import measuring

import snaprt
from snaprt import jaxapi
from snaprt.runtime.profile_session import ProfileSession, Steps

REPEATS = 7
ASKED = 1_000_000
CALLS = 5_000
LIMIT_US = 0.15


@jax.jit
def jitted(x: jax.Array) -> jax.Array:
    """Return a step that takes about nothing."""
    return x * 0.5


def lazy(x: jax.Array) -> jax.Array:
    """Run the same step lazily."""
    x = x * 0.5
    snaprt.mark_step()
    return x


def microseconds(step: Callable[[jax.Array], jax.Array]) -> float:
    """Return what a call takes: of several series the fastest, for others use this machine too."""
    best = float("inf")
    for _ in range(REPEATS):
        x = jnp.ones(8)
        started = time.perf_counter()
        for _ in range(CALLS):
            x = step(x)
        jax.block_until_ready(x * 1)
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / CALLS


def measured() -> tuple[float, float]:
    """Return what a call of a jitted function and a lazy step take."""
    of_jit = microseconds(jitted)
    with snaprt.lazy():
        return of_jit, microseconds(lazy)


def main() -> None:
    print(measuring.machine())
    spent = min(timeit.repeat(jaxapi.is_profiled, number=ASKED, repeat=REPEATS)) / ASKED
    measured()  # compiles
    jit_before, lazy_before = measured()
    with tempfile.TemporaryDirectory() as folder:
        session = ProfileSession(Path(folder), Steps(1_000_000, None), 60, print)
        session.listen()
        measured()
        jit_waiting, lazy_waiting = measured()
        session.end()
    rows = [
        ("asking whether a profile is taken", f"{1e6 * spent:.3f}", f"limit {LIMIT_US}"),
        ("a call of a jitted function", f"{jit_before:.2f}", "without"),
        ("the same", f"{jit_waiting:.2f}", "a profile waits"),
        ("a lazy step", f"{lazy_before:.2f}", "without"),
        ("the same", f"{lazy_waiting:.2f}", "a profile waits"),
    ]
    measuring.show_table(("", "us", ""), rows)


if __name__ == "__main__":
    main()
