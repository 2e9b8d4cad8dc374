"""Four processes from their start to the first step's end: by ``snaprt launch``, and by hand.

Run it: python tests/bench/bench_launch.py [--processes N] [--rounds N]

Both start the same program, which joins its processes by ``jax.distributed.initialize()`` and runs
one jitted sum over the devices of all; by hand it is given the three arguments that the launcher
makes superfluous. Measured is the time until all have printed the sum, taking turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PROGRAM = """
import os, sys, jax
by_hand = dict(coordinator_address=sys.argv[1], num_processes=int(sys.argv[2]),
               process_id=int(sys.argv[3])) if len(sys.argv) > 1 else {}
jax.distributed.initialize(**by_hand)
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
count = jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("data",))
x = jax.make_array_from_callback(
    (count,), NamedSharding(mesh, P("data")), lambda at: np.arange(float(count))[at])
assert float(jax.jit(jnp.sum)(x)) == count * (count - 1) / 2
os._exit(0)  # the first step has ended; leaving together takes both as long
"""


def main() -> None:
    import measuring

    from snaprt.fleet.launch import free_address

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    arguments = parser.parse_args()
    count = str(arguments.processes)
    print(measuring.machine())
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(PROGRAM)
        environment = measuring.clean_environment(Path(folder, "bytecode"))

        def wait_for(*commands: list[str]) -> None:
            processes = [
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
                for command in commands
            ]
            statuses = [process.wait() for process in processes]
            if any(statuses):
                raise SystemExit(f"a process of {commands[0]} failed")

        def launched() -> Callable[[], object]:
            words = ["-m", "snaprt", "launch", "-n", count, "--", str(script)]
            return lambda: wait_for([sys.executable, *words])

        def by_hand() -> Callable[[], object]:
            address = free_address()
            commands = [
                [sys.executable, str(script), address, count, str(rank)]
                for rank in range(arguments.processes)
            ]
            return lambda: wait_for(*commands)

        took = measuring.taking_turns(
            {"by hand": by_hand, "snaprt launch": launched}, arguments.rounds
        )
    peer = took["by hand"][0]
    rows = [[name, f"{wall:.2f}", f"{wall / peer:.2f}"] for name, (wall, _) in took.items()]
    measuring.show_table([f"{count} processes, {os.cpu_count()} cores", "seconds", "ratio"], rows)


if __name__ == "__main__":
    main()
