"""What it takes to record thousands of small executions, and to list them.

    python tests/bench/bench_record_many.py [--executions N] [--rounds N] [--folder DIR]

Each way is timed in turn, in one process: every execution of a small jitted function recorded until
all files are there, and as many files of the same size written by plain Python, each under another
name first. ``snaprt ls`` then lists them in a process of its own. The targets: 150 us of CPU an
execution, and 2 s for the list of 10,000. On a folder in memory, the disk takes no part.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["SNAPRT_CACHE"] = "off"

import jax
import jax.numpy as jnp
import measuring

import snaprt
from snaprt.snapshot.recorder.record import process_recorder


def record(folder: Path, executions: int) -> float:
    """Record so many executions; return the CPU seconds of this thread alone."""
    step, x = jax.jit(lambda x: x * 2 + 1), jnp.ones(16)
    with snaprt.record(when="all", folder=folder):
        jax.block_until_ready(step(x))
        started = time.thread_time()
        for _ in range(executions - 1):
            step(x)
        spent = time.thread_time() - started
    process_recorder().flush()
    return spent


def write_plainly(folder: Path, executions: int, size: int) -> float:
    folder.mkdir()
    content = os.urandom(size)
    started = time.thread_time()
    for number in range(2 * executions):
        path = folder / f"{number:06d}.snap"
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
    return time.thread_time() - started


def processor_seconds(work: Callable[..., float], *arguments: object) -> tuple[float, float]:
    """Return CPU seconds: of the whole process, and those that ``work`` returns."""
    started = time.process_time()
    own = work(*arguments)
    return time.process_time() - started, own


def list_files(folder: Path, bytecode: Path) -> float:
    """Return the CPU seconds of ``snaprt ls``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "snaprt", "ls", folder],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=measuring.clean_environment(bytecode),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write, by default a temporary one")
    options = parser.parse_args()
    recorded: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    listed: list[float] = []
    bytecode = Path(tempfile.mkdtemp())
    for _ in range(options.rounds):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            snapshots = folder / "snapshots"
            recorded.append(processor_seconds(record, snapshots, options.executions))
            size = next(snapshots.glob("*.snap")).stat().st_size
            list_files(snapshots, bytecode)  # compiles its modules
            listed.append(list_files(snapshots, bytecode))
            plain.append(
                processor_seconds(write_plainly, folder / "plain", options.executions, size)
            )
        finally:
            shutil.rmtree(folder)
    shutil.rmtree(bytecode)
    print(measuring.machine())

    def cell(values: list[float]) -> str:
        each = [1e6 * value / options.executions for value in values]
        return f"{min(each):.0f}/{measuring.median(each):.0f}"

    measuring.show_table(
        ["CPU, us an execution, min/median", "all threads", "the caller's"],
        [
            ["recorded", *map(cell, map(list, zip(*recorded, strict=True)))],
            ["two plain files", *map(cell, map(list, zip(*plain, strict=True)))],
        ],
    )
    print(f"snaprt ls: {min(listed):.2f}/{measuring.median(listed):.2f} s of CPU")


if __name__ == "__main__":
    main()
