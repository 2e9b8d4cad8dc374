"""What ``--watchdog`` adds to a program that makes progress: per jit call and per lazy step.

    python tests/bench/bench_watchdog.py [--quick]

One process runs the same steps with the watchdog and without it, in turn; a step counts until its
loss is there. The calls that it follows are measured on a step that takes about nothing, where
microseconds can be told; what its threads and the process beside take is processor time, measured
while the program sleeps, less what JAX takes. The ratio is the sum of both to a step of 10 ms and
of 100 ms; the target is under 0.1 %. A real step of about 10 ms is measured too, where noise is
larger than that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["SNAPRT_CACHE"] = "off"
os.environ["SNAPRT_WATCHDOG"] = "300s"

import jax
import jax.numpy as jnp
import measuring

import snaprt
from snaprt import jaxapi
from snaprt.fleet import watchdog
from snaprt.snapshot.recorder import progress

Step = Callable[[Any], tuple[Any, jax.Array]]


def update(state: Any) -> tuple[Any, jax.Array]:
    """Return a training step of eight small arrays: the new state and a loss."""
    state = jax.tree.map(lambda w: w * 0.999 + 0.001, state)
    return state, jnp.sum(state["w0"])


def long_update(state: Any) -> tuple[Any, jax.Array]:
    """Return a step of about 10 ms."""
    x = state["w0"]
    for _ in range(12):
        x = jnp.tanh(x @ state["w1"])
    return {**state, "w0": x}, jnp.sum(x)


def lazy_step(state: Any) -> tuple[Any, jax.Array]:
    """Run the small step lazily."""
    state, loss = update(state)
    snaprt.mark_step()
    return state, loss


def new_state(size: int) -> Any:
    return {f"w{number}": jnp.ones((size, size)) * 0.01 for number in range(8)}


def microseconds(step: Step, state: Any, calls: int) -> float:
    """Return what a step takes, of so many."""
    started = time.perf_counter()
    for _ in range(calls):
        state, loss = step(state)
        jax.block_until_ready(loss)
    return 1e6 * (time.perf_counter() - started) / calls


class Switch:
    """Has the program followed or not, as it is with the watchdog and without."""

    def __init__(self) -> None:
        watchdog.watch()
        self._followed = progress.watch_progress(closely=True)

    def set(self, is_on: bool) -> None:
        progress._progress = self._followed if is_on else None
        jaxapi.set_process_watch(() if is_on else None)


def measure(switch: Switch, step: Step, size: int, calls: int, rounds: int) -> tuple[float, ...]:
    """Return the least and the median microseconds without the watchdog, then with it."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for is_on in (False, True):
            switch.set(is_on)
            state = new_state(size)
            microseconds(step, state, 3)
            took = microseconds(step, state, calls)
            if number:
                found[is_on].append(took)
    return tuple(of(found[is_on]) for is_on in (False, True) for of in (min, measuring.median))


def idle_share(seconds: float) -> float:
    """Return the share of a processor that this process takes while it sleeps, with its helper."""
    helpers = [
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdecimal() and _is_bystander(int(pid), os.getpid())
    ]
    began, of_helpers = time.process_time(), sum(map(_processor_seconds, helpers))
    time.sleep(seconds)
    of_helpers = sum(map(_processor_seconds, helpers)) - of_helpers
    return (time.process_time() - began + of_helpers) / seconds


def _is_bystander(pid: int, parent: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[1]) == parent and "bystander" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, to try the script")
    is_quick = parser.parse_args().quick
    rounds = 3 if is_quick else 21
    print(measuring.machine())
    folder = tempfile.TemporaryDirectory()
    os.chdir(folder.name)
    jax.block_until_ready(new_state(16))  # JAX has threads of its own from here on
    seconds = 4 if is_quick else 20
    share_without = idle_share(seconds)
    switch = Switch()
    jitted, jitted_long = jax.jit(update), jax.jit(long_update)
    rows = []
    added = {}
    for name, step, size, calls in (
        ("a small jit step", jitted, 16, 2000),
        ("a small lazy step", lazy_step, 16, 200),
        ("a long jit step", jitted_long, 320, 20),
    ):
        if step is lazy_step:
            snaprt.enable()
        least, median, least_on, median_on = measure(switch, step, size, calls, rounds)
        if step is lazy_step:
            snaprt.disable()
        added[name] = least_on - least, median_on - median
        rows.append(
            [name, *(f"{value:.1f}" for value in (least, least_on, median, median_on))]
            + [f"{value:+.2f}" for value in added[name]]
        )
    switch.set(True)
    share = max(0.0, idle_share(seconds) - share_without)
    print("Microseconds a step, the least and the median, without and with the watchdog:")
    print()
    heads = ["step", "least", "with", "median", "with", "added (least)", "added (median)"]
    measuring.show_table(heads, rows)
    print()
    print(f"threads and process beside: {1e6 * share:.0f} us of a processor each second")
    for milliseconds in (10, 100):
        for name in ("a small jit step", "a small lazy step"):
            of_calls = max(added[name]) / (1000 * milliseconds)
            print(
                f"{name.removeprefix('a small ')} of {milliseconds} ms: "
                f"{100 * (of_calls + share):.4f} % (calls {100 * of_calls:.4f} %, "
                f"threads {100 * share:.4f} %)"
            )


if __name__ == "__main__":
    main()
