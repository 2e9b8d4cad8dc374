"""What `snaprt replay --a cpu --b VARIANT` says of correct programs: nobody may be called wrong.

Run: python tests/bench/bench_false_alarms.py [--count N]

Each program runs on the CPU as it is, and under a flag or without a pass that does no harm. The
verdict is that of the command, with float64 as the reference.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import measuring
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

ALL = 200
RIGHT = ("within rounding", "ill-conditioned")


def main() -> None:
    """Judge, print the table; fail where a program is called wrong, or cannot be judged."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=ALL, help="how many programs")
    count = parser.parse_args().count
    os.environ.update(measuring.clean_environment())
    import jax
    from snaprt_replay.load.load import load
    from snaprt_replay.run.trial import PROCESSES, try_case
    from snaprt_replay.run.variants.variants import parse_variant
    from snaprt_replay.run.workers import Workers
    from sound_programs import HARMLESS, KINDS, sound_program

    print(measuring.machine(), flush=True)
    kinds = sorted(KINDS)
    judged: list[tuple[str, str, float]] = []  # the kind, the verdict, seconds
    with tempfile.TemporaryDirectory() as name, Workers(PROCESSES) as workers:
        folder = Path(name)
        os.environ["SNAPRT_CACHE_DIR"] = name
        module, inputs = folder / "module.mlir", folder / "inputs.npz"
        for number in range(count):
            kind, seed = kinds[number % len(kinds)], number // len(kinds)
            program, arrays = sound_program(kind, seed)
            module.write_text(jax.jit(program, keep_unused=True).lower(*arrays).as_text())
            np.savez(inputs, *arrays)
            sides = parse_variant("cpu"), parse_variant(HARMLESS[seed % len(HARMLESS)])
            started = time.perf_counter()
            found = try_case(load(module, inputs), *sides, workers=workers).judgement
            judged.append((kind, found.kind, time.perf_counter() - started))
            if found.kind not in RIGHT:
                print(f"{kind}, seed {seed}: {found.sentence}", file=sys.stderr, flush=True)
    rows = []
    for kind in [*dict.fromkeys(kind for kind, _, _ in judged), "all"]:
        chosen = [one for one in judged if kind in ("all", one[0])]
        counts = Counter(verdict for _, verdict, _ in chosen)
        others = len(chosen) - sum(counts[one] for one in RIGHT)
        cells = [str(len(chosen)), *(str(counts[one]) for one in RIGHT), str(others)]
        rows.append([kind, *cells, f"{measuring.median([seconds for *_, seconds in chosen]):.1f}"])
    measuring.show_table(["programs", "judged", *RIGHT, "another", "seconds"], rows)
    if any(verdict not in RIGHT for _, verdict, _ in judged):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
