"""One recorded execution with a 512 MB input, beside XLA's own dump and a plain write.

Run it: python tests/bench/bench_snapshot.py [--rounds N] [--megabytes N] [--folder DIR]

Every measurement has a process of its own, and the three take turns. The input is random, so that
nothing can compress it. Then: what recording costs an execution while it is off, or while the
callback returns ''.
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

ROUNDS = 3
MEGABYTES = 512
NEEDED_BYTES = 4 << 30
STEPS = 3  # of which the fastest counts: what an execution takes without recording
TAKES = 3  # in each process: the first finds memory that the machine has not handed out before
RUNS = 2000  # in one loop of the idle measurement
LOOPS = 40

OURS, XLA, PLAIN, IDLE = "snaprt", "XLA", "plain write", "idle"


def random_input(megabytes: int) -> Any:
    """Return float32 of shape (rows, 16384), normally distributed."""
    import numpy as np

    shape = (megabytes * (1 << 20) // 4 // 16384, 16384)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def program(x: Any) -> Any:
    """Use all of the input; the result has one number a row."""
    import jax.numpy as jnp

    return jnp.sum(x * 0.5 + 1.0, axis=1)


def wait_for_files(folder: Path, pattern: str, count: int) -> None:
    while len(list(folder.glob(pattern))) < count:
        time.sleep(0.002)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def clear(folder: Path, content: int) -> int:
    """Empty the folder and return how many bytes were in it: at least ``content``, or it fails.

    Nothing is left that the disk would have to do while the next is measured.
    """
    written = size_of(folder)
    if written < content:
        raise SystemExit(f"{written:,} bytes were written of {content:,}")
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    os.sync()
    return written


def measure_ours(folder: Path, megabytes: int) -> dict[str, Any]:
    """Time steps without recording, and with it until they end and their files are complete."""
    import jax

    import snaprt

    x = jax.device_put(random_input(megabytes)).block_until_ready()

    def step() -> float:
        with snaprt.lazy():
            y = program(x)
            started = time.perf_counter()
            snaprt.mark_step(wait=True)
            ended = time.perf_counter()
        del y
        return ended - started

    step()
    without = min(step() for _ in range(STEPS))
    os.environ["SNAPRT_DUMP_DIR"] = str(folder)
    takes, written = [], 0
    for _ in range(TAKES):
        started = time.perf_counter()
        ended = step()
        wait_for_files(folder, "*.snap", 2)  # they get these names when they are whole and synced
        takes.append((ended, time.perf_counter() - started))
        written = clear(folder, x.nbytes)
    return {"without": without, "takes": takes, "bytes": written}


def measure_xla(folder: Path, megabytes: int) -> dict[str, Any]:
    """Time the same for `jax.jit` with XLA's own snapshots, which XLA_FLAGS ask for."""
    import jax

    x = jax.device_put(random_input(megabytes)).block_until_ready()
    lowered = jax.jit(program).lower(x)
    quiet = lowered.compile(compiler_options={"xla_dump_hlo_snapshots": False})
    dumping = lowered.compile()

    def step(compiled: Any) -> float:
        started = time.perf_counter()
        jax.block_until_ready(compiled(x))
        return time.perf_counter() - started

    step(quiet)
    without = min(step(quiet) for _ in range(STEPS))
    if list(folder.glob("*.snapshot.*")):
        raise SystemExit("XLA wrote a snapshot although the compiler was told not to")
    takes, written = [], 0
    for _ in range(TAKES):
        started = time.perf_counter()
        ended = step(dumping)
        wait_for_files(folder, "*.snapshot.*", 1)
        takes.append((ended, time.perf_counter() - started))
        written = clear(folder, x.nbytes)
    return {"without": without, "takes": takes, "bytes": written}


def measure_plain(folder: Path, megabytes: int) -> dict[str, Any]:
    """Time writing the input's bytes, and until they are synced."""
    content = memoryview(random_input(megabytes)).cast("B")
    takes, written = [], 0
    for _ in range(TAKES):
        started = time.perf_counter()
        with open(folder / "plain", "wb", buffering=0) as file:
            done = 0
            while done < len(content):
                done += file.write(content[done:])
            ended = time.perf_counter() - started
            os.fsync(file.fileno())
        takes.append((ended, time.perf_counter() - started))
        written = clear(folder, len(content))
    return {"without": 0.0, "takes": takes, "bytes": written}


def measure_idle(folder: Path, megabytes: int) -> dict[str, Any]:
    """Return microseconds that an execution takes with no recorder, recording off, and ''.

    `run` alone is a bare `compile.run.run`; `step` is a whole small step, recorded and marked.
    """
    import jax
    import jax.numpy as jnp
    from executables import executable_of

    import snaprt
    from snaprt.compile.executable import run
    from snaprt.snapshot.recorder.record import Recorder

    x = jnp.ones((8, 8))
    executable = executable_of(lambda x: [x + 1], x)
    recorder = Recorder()
    snaprt.register_hlo_snapshot_callback(lambda name, index, count: "")

    def runs(observer: Recorder | None) -> float:
        started = time.perf_counter()
        for _ in range(RUNS):
            run(executable, [x], observer)
        return 1e6 * (time.perf_counter() - started) / RUNS

    def steps() -> float:
        count = RUNS // 20
        started = time.perf_counter()
        with snaprt.lazy():
            y = x
            for _ in range(count):
                y = x + x
                snaprt.mark_step()
        jax.block_until_ready(y)
        return 1e6 * (time.perf_counter() - started) / count

    found: dict[str, list[float]] = {}

    def note(name: str, microseconds: float) -> None:
        found.setdefault(name, []).append(microseconds)

    steps()
    for _ in range(LOOPS):
        os.environ.pop("SNAPRT_DUMP_DIR", None)
        note("run, no recorder", runs(None))
        note("run, recording off", runs(recorder))
        note("step, recording off", steps())
        os.environ["SNAPRT_DUMP_DIR"] = str(folder)
        note("run, callback ''", runs(recorder))
        note("step, callback ''", steps())
    if size_of(folder):
        raise SystemExit("something was recorded although the callback said ''")
    return {name: measuring.median(values) for name, values in found.items()} | {
        f"{name} min": min(values) for name, values in found.items()
    }


MEASURE = {OURS: measure_ours, XLA: measure_xla, PLAIN: measure_plain, IDLE: measure_idle}


def measure(kind: str, megabytes: int, where: Path) -> dict[str, Any]:
    """Run one measurement in a process of its own, in a folder that is removed afterwards."""
    environment = measuring.clean_environment()
    environment["SNAPRT_CACHE"] = "off"
    with tempfile.TemporaryDirectory(dir=where) as folder:
        if kind == XLA:
            environment["XLA_FLAGS"] = f"--xla_dump_hlo_snapshots --xla_dump_to={folder}"
        arguments = ["--child", kind, "--folder", folder, "--megabytes", str(megabytes)]
        return measuring.run_child(__file__, arguments, environment)


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    def cells(values: list[float]) -> str:
        return f"{min(values):.3f}/{measuring.median(values):.3f}"

    blocked, complete = (
        {
            kind: [take[moment] - run["without"] for run in runs for take in run["takes"]]
            for kind, runs in found.items()
        }
        for moment in (0, 1)
    )
    rows = [
        [
            kind,
            "" if kind == PLAIN else cells([run["without"] for run in runs]),
            cells(blocked[kind]),
            cells(complete[kind]),
            f"{runs[0]['bytes'] / (1 << 20):.1f}",
        ]
        for kind, runs in found.items()
    ]
    print("\nSeconds, min/median; the last two are beyond the execution itself:\n")
    measuring.show_table(["", "execution", "blocked", "files complete", "MiB written"], rows)

    def ratio(values: dict[str, list[float]], peer: str) -> str:
        return f"{measuring.median(values[OURS]) / measuring.median(values[peer]):.3f}"

    print(f"\n{OURS}:{XLA}, blocked {ratio(blocked, XLA)}, complete {ratio(complete, XLA)}")
    print(f"{OURS}:{PLAIN} with fsync, complete {ratio(complete, PLAIN)}")
    print(f"Files of {OURS} are complete when they are synced; {XLA} does not sync its own.")


def show_idle(found: dict[str, Any]) -> None:
    names = [name for name in found if not name.endswith(" min")]
    beside = {"run": "run, no recorder", "step": "step, recording off"}
    print("\nMicroseconds an execution while nothing is recorded:\n")
    measuring.show_table(
        ["", "min/median", "above the first"],
        [
            [
                name,
                f"{found[f'{name} min']:.2f}/{found[name]:.2f}",
                f"{found[name] - found[beside[name.split(',')[0]]]:+.2f}",
            ]
            for name in sorted(names, key=lambda name: name.startswith("step"))
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"(default {ROUNDS})")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="of the input")
    parser.add_argument("--folder", type=Path, help="where to write (default: temporary files)")
    parser.add_argument("--child", choices=tuple(MEASURE), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    where = arguments.folder or Path(tempfile.gettempdir())
    if arguments.child:
        print(json.dumps(MEASURE[arguments.child](where, arguments.megabytes)))
        return
    free = shutil.disk_usage(where).free
    if free < NEEDED_BYTES:
        raise SystemExit(f"{where} has {free:,} bytes free; {NEEDED_BYTES:,} are needed")
    print(f"{measuring.machine()}; input of {arguments.megabytes} MiB", flush=True)
    found: dict[str, list[dict[str, Any]]] = {OURS: [], XLA: [], PLAIN: []}
    for number in range(arguments.rounds):
        for kind in (OURS, XLA, PLAIN) if number % 2 == 0 else (PLAIN, XLA, OURS):
            found[kind].append(measure(kind, arguments.megabytes, where))
    show(found)
    show_idle(measure(IDLE, arguments.megabytes, where))


if __name__ == "__main__":
    main()
