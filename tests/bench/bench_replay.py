"""What replaying a snapshot takes beyond compiling and executing its program alone.

Run: python tests/bench/bench_replay.py [--rounds N]

Alone is JAX: it compiles what it has lowered before, runs it on NumPy arrays, and fetches the
results. A replay reads the file, compiles and runs what is in it, and compares with what was
recorded. Both take turns in one process, without a cache; CPU seconds tell them apart on a machine
that others use too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import measuring
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

MOST = 0.2


def perceptron() -> tuple[Callable, tuple]:
    """Return a training step of eight layers of 4 MiB, and its arguments."""
    import jax

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jax.nn.gelu(y @ w)
            return (y**2).mean()

        grads = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    random = np.random.default_rng(0)
    weights = [random.normal(size=(1024, 1024), scale=1 / 32).astype(np.float32) for _ in range(8)]
    return step, (weights, np.ones((64, 1024), np.float32))


def programs() -> Mapping[str, Callable[[], tuple[Callable, tuple]]]:
    """Return the programs by name."""
    import planted_faults

    return {**planted_faults.MODELS, **planted_faults.LARGE, "MLP step, 8 x 4 MiB": perceptron}


def recorded(function: Callable, arguments: tuple, folder: Path) -> Path:
    """Return the snapshot of one call."""
    import jax

    import snaprt

    with snaprt.record(folder=folder):
        jax.jit(function)(*arguments)
    from snaprt.snapshot.recorder.record import process_recorder

    assert process_recorder().flush(60)
    (path,) = folder.glob("*.inputs.snap")
    return path


def main() -> None:
    """Measure, print the table; fail where a replay adds too much."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    os.environ.update(measuring.clean_environment())
    os.environ["SNAPRT_CACHE"] = "0"
    import jax
    from snaprt_replay.run.rerun import replay

    print(measuring.machine())
    rows, worst = [], 0.0
    for name, make in programs().items():
        function, arguments = make()

        def prepare_alone(function=function, arguments=arguments) -> Callable[[], object]:
            jax.clear_caches()  # or it would be what was compiled before
            lowered = jax.jit(function).lower(*arguments)

            def alone() -> object:
                return jax.tree.map(np.asarray, lowered.compile()(*arguments))

            return alone

        with tempfile.TemporaryDirectory() as folder:
            path = recorded(function, arguments, Path(folder))

            def prepare_replay(path=path) -> Callable[[], object]:
                def whole() -> object:
                    found = replay(path)
                    assert found.comparison is not None
                    assert found.comparison.verdict == "identical"
                    return found

                return whole

            works = {"alone": prepare_alone, "replay": prepare_replay}
            took = measuring.taking_turns(works, rounds)
        wall, processor = zip(*took.values(), strict=True)
        added = processor[1] / processor[0] - 1
        worst = max(worst, added)
        cells = [f"{one:.3f}" for pair in (wall, processor) for one in pair]
        rows.append([name, *cells, f"{wall[1] / wall[0] - 1:+.0%}", f"{added:+.0%}"])
    heads = ["program", "alone, s", "replay, s", "alone, CPU s", "replay, CPU s"]
    measuring.show_table([*heads, "added", "added, CPU"], rows)
    print(f"at most {worst:+.0%} of CPU time, allowed {MOST:+.0%}")
    if worst > MOST:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
