"""Bytes and seconds of recording an inference model again and again, with --dedupe and without.

Run it: python tests/bench/bench_dedupe.py [--megabytes N] [--executions N] [--folder DIR]

The model has 8 layers of random bfloat16 weights, which are the same at each execution; what goes
in and comes out differs. Each way has a process and a folder of its own. The limit: all executions
with --dedupe take at most 1.1 times the bytes of one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import measuring

MEGABYTES = 200
EXECUTIONS = 20
LAYERS = 8
LIMIT = 1.1

ONCE, DEDUPED, PLAIN = "one execution", "with --dedupe", "without"


def model(weights: list[Any], x: Any) -> Any:
    """Return x of shape (batch, width) after as many layers as there are weights."""
    import jax.numpy as jnp

    for one in weights:
        x = jnp.tanh(x @ one)
    return x


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(folder: Path, megabytes: int, executions: int) -> dict[str, Any]:
    """Record executions; return bytes, seconds each was held up, seconds until all is on disk."""
    import jax
    import jax.numpy as jnp

    import snaprt
    from snaprt.snapshot.recorder.record import process_recorder

    width = int((megabytes * (1 << 20) / 2 / LAYERS) ** 0.5)
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(key, (width, width), jnp.bfloat16) * 0.02 for key in keys]
    jax.block_until_ready(weights)

    def step(number: int) -> float:
        x = jnp.full((4, width), number, jnp.bfloat16)
        with snaprt.lazy():
            y = model(weights, x)
            started = time.perf_counter()
            snaprt.mark_step(wait=True)
            ended = time.perf_counter()
        del y
        return ended - started

    step(0)
    without = min(step(0) for _ in range(3))
    os.environ["SNAPRT_DUMP_DIR"] = str(folder)
    started = time.perf_counter()
    blocked = [step(number) - without for number in range(executions)]
    if not process_recorder().flush(600):
        raise SystemExit("the snapshots are not on disk after 600 seconds")
    complete = time.perf_counter() - started
    if len(list(folder.glob("*.snap"))) != 2 * executions:
        raise SystemExit(f"{folder} has not two snapshots for each of {executions} executions")
    return {"bytes": size_of(folder), "blocked": blocked, "complete": complete}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="of the weights")
    parser.add_argument("--executions", type=int, default=EXECUTIONS)
    parser.add_argument("--folder", type=Path, help="where to write (default: temporary files)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    where = arguments.folder or Path(tempfile.gettempdir())
    if arguments.child:
        print(json.dumps(measure(where, arguments.megabytes, arguments.executions)))
        return
    needed = (arguments.executions + 2) * arguments.megabytes << 20
    if shutil.disk_usage(where).free < needed:
        raise SystemExit(f"{where} has not the {needed:,} bytes free that are needed")
    print(f"{measuring.machine()}; {arguments.megabytes} MiB of weights", flush=True)
    ways = ((ONCE, 1, "off"), (DEDUPED, arguments.executions, "on"),
            (PLAIN, arguments.executions, "off"))  # fmt: skip
    found = {}
    for way, executions, dedupe in ways:
        environment = measuring.clean_environment()
        environment |= {"SNAPRT_CACHE": "off", "SNAPRT_RECORD_DEDUPE": dedupe}
        with tempfile.TemporaryDirectory(dir=where) as folder:
            words = ["--child", "--folder", folder, "--megabytes", str(arguments.megabytes),
                     "--executions", str(executions)]  # fmt: skip
            found[way] = measuring.run_child(__file__, words, environment)
    rows = [
        [
            way,
            str(executions),
            f"{found[way]['bytes'] / (1 << 20):.1f}",
            f"{found[way]['bytes'] / found[ONCE]['bytes']:.3f}",
            f"{measuring.median(found[way]['blocked']):.3f}",
            f"{found[way]['complete']:.2f}",
        ]
        for way, executions, _ in ways
    ]
    print()
    heads = ["", "executions", "MiB on disk", "to one", "s held up, median", "s until all on disk"]
    measuring.show_table(heads, rows)
    ratio = found[DEDUPED]["bytes"] / found[ONCE]["bytes"]
    print(f"\n{DEDUPED}:{ONCE} {ratio:.3f} (limit {LIMIT})")


if __name__ == "__main__":
    main()
