"""What the check of ranks costs: at a program's first run, at a later step, and a no_compile scope.

Run it: python tests/bench/bench_rank_check.py [--processes N] [--programs N]

The processes of one job meet, and run a program over the devices of all that is new; they do so for
many programs, once with --check-ranks and once without. Asked are less than 20 ms more for a first
run of 4 processes, 1 us more for a step that was checked, and 0.3 us more for a jitted call inside
of ``snaprt.no_compile()``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import json, statistics, sys, time
import jax, jax.numpy as jnp, numpy as np, snaprt
jax.distributed.initialize()
programs = int(sys.argv[1])
mesh = jax.make_mesh((jax.device_count(),), ("data",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
x = jax.make_array_from_callback((8 * jax.device_count(),), sharding, lambda at: np.ones(8))
meet = jax.jit(jnp.sum)
float(meet(x))
first = []
for number in range(programs):
    program = jax.jit(lambda x, number=number: jnp.tanh(x * number).sum())
    float(meet(x))
    started = time.perf_counter()
    float(program(x))
    first.append(time.perf_counter() - started)
own = jax.jit(lambda x: x + 1)
small = jnp.ones(4)
own(small)
def per_call(call, array, count):
    took = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(count):
            result = call(array)
        took.append((time.perf_counter() - started) / count)
        jax.block_until_ready(result)
    return min(took)
plain = per_call(own, small, 5000)
with snaprt.no_compile():
    guarded = per_call(own, small, 5000)
step = per_call(meet, x, 200)
if jax.process_index() == 0:
    checks = snaprt.metrics.metric_data("RankCheckTime")
    print("RESULT" + json.dumps({
        "first": statistics.median(first), "step": step, "plain": plain, "guarded": guarded,
        "checks": checks and [checks[0], checks[1]]}))
"""


def main() -> None:
    import measuring

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--programs", type=int, default=20, metavar="N")
    arguments = parser.parse_args()
    print(measuring.machine())
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(PROGRAM)
        environment = measuring.clean_environment(Path(folder, "bytecode"))

        def measured(*options: str) -> dict[str, float]:
            words = [sys.executable, "-m", "snaprt", "launch", "-n", str(arguments.processes)]
            words += [*options, "--", str(script), str(arguments.programs)]
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
            result = next(line for line in done.stdout.splitlines() if "RESULT" in line)
            found: dict[str, float] = json.loads(result.partition("RESULT")[2])
            return found

        without, checked = measured(), measured("--check-ranks")
    rows = [
        ["first run, ms", f"{1e3 * without['first']:.1f}", f"{1e3 * checked['first']:.1f}"],
        ["step, us", f"{1e6 * without['step']:.1f}", f"{1e6 * checked['step']:.1f}"],
    ]
    head = [f"{arguments.processes} processes, {os.cpu_count()} cores", "plain", "--check-ranks"]
    measuring.show_table(head, rows)
    more = 1e3 * (checked["first"] - without["first"])
    print(f"a first run takes {more:.1f} ms more; asked: 20")
    guarded, plain = 1e6 * without["guarded"], 1e6 * without["plain"]
    print(f"a jitted call: {plain:.2f} us; inside of no_compile: {guarded:.2f} us")


if __name__ == "__main__":
    main()
