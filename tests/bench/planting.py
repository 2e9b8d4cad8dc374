"""What the benchmarks of planted faults share: arguments, plants, two worker processes."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import measuring

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

ALL = 200

Result = TypeVar("Result")
# Workers, models, the number of plants, the other side's variant, a seed.
Measure = Callable[..., Iterator[Result]]


def draw(model, count: int, seed: int, visible) -> Iterator:
    """Yield plants that can be seen in the outputs, the kinds in turn, while there are any."""
    import planted_faults

    drawn = {kind: planted_faults.draw(model.program, kind, seed) for kind in planted_faults.KINDS}
    while count and drawn:
        for kind in list(drawn):
            plant = next(filter(visible, drawn[kind]), None)
            if plant is None:
                del drawn[kind]
            elif count:
                count -= 1
                yield plant


def run_plants(
    measure: Measure[Result], description: str | None, *, with_large: bool = False
) -> list[Result]:
    """Read the command line, plant faults in its models, and measure what comes of each.

    Args:
        measure: Yields the result of each plant.
        description: What ``--help`` says, in its first line.
        with_large: Whether the large models are among those that are taken by default.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help=f"{ALL} plants")
    parser.add_argument("--count", type=int, help="how many plants")
    parser.add_argument("--model", action="append", help="only this one; several times: only these")
    parser.add_argument("--reference", default="f64", help="the other side's variant")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.update(measuring.clean_environment())
    import planted_faults
    from snaprt_replay.run.workers import Workers

    print(measuring.machine())
    print(f"the other side is {arguments.reference}, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, Workers(2) as workers:
        os.environ["SNAPRT_CACHE_DIR"] = folder
        names = [*planted_faults.MODELS, *(planted_faults.LARGE if with_large else ())]
        models = [planted_faults.lower(name) for name in arguments.model or names]
        count = arguments.count or (ALL if arguments.all else len(models) * 5)
        results = []
        for result in measure(workers, models, count, arguments.reference, arguments.seed):
            results.append(result)
            print(f"{len(results)} of {count}: {result}", file=sys.stderr, flush=True)
    return results


def share_of(count: int, models: Sequence[object], index: int) -> int:
    """Return how many of ``count`` plants go into a model."""
    return count // len(models) + (index < count % len(models))
