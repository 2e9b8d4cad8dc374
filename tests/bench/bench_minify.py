"""Plant faults in real models, and see how small `snaprt minify` makes the program that shows them.

Run it: python tests/bench/bench_minify.py [--all] [--count N] [--reference cpu|f64] [--seed N]

As in bench_planted.py, one side compiles every module with one instruction broken, the other as it
is; minifying is given both sides and the inputs, nothing else. Small counts what is left beside
parameters and constants. The models are those of the planted faults and a transformer of about
1,000 instructions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import measuring
from planting import draw, run_plants, share_of

SMALL = 5
NEEDED = 0.8
MOST_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """What came of one plant."""

    model: str
    kind: str
    before: int
    after: int
    elements: int
    looked_at: int
    seconds: float


def broken(hlo: bytes, plant) -> bytes:
    """Return a module with the fault; as it is where the fault needs more elements than it has."""
    import planted_faults

    try:
        return planted_faults.planted(hlo, plant)
    except IndexError:
        return hlo


def minify_all(
    workers, models: Sequence, count: int, reference: str, seed: int
) -> Iterator[Result]:
    """Plant, minify."""
    from snaprt_replay.minify.checks import MISMATCH, Patience
    from snaprt_replay.minify.cutting import Tap, normalized
    from snaprt_replay.minify.shrink import shrink
    from snaprt_replay.run.variants.variants import parse_variant
    from snaprt_replay.run.workers import Outcome

    cpu, right = parse_variant("cpu"), parse_variant(reference)
    for index, model in enumerate(models):
        found = normalized([model.program.module], model.inputs)
        assert found is not None
        candidate, _ = found

        def start(side, variant, hlo, inputs, plant=None) -> Future[Outcome]:
            if side == 1:
                return workers.submit(right, hlo, inputs)
            return workers.submit(cpu, broken(hlo, plant) if plant else hlo, inputs)

        def visible(plant, candidate=candidate) -> bool:
            def run(tried, side):
                return start(side, None, tried.content(side), tried.inputs, plant)

            return MISMATCH.see(candidate, run) is not None

        for plant in draw(model, share_of(count, models, index), seed, visible):
            began = time.perf_counter()

            def broken_start(side, variant, hlo, inputs, plant=plant) -> Future[Outcome]:
                return start(side, variant, hlo, inputs, plant)

            def taps(_) -> list[Tap]:
                return [Tap(1, lambda hlo, inputs: workers.submit(right, hlo, inputs))]

            shrunk = shrink(candidate, MISMATCH, broken_start, Patience(), taps)
            assert shrunk is not None, plant
            after = shrunk.candidate
            if after.instructions > SMALL:
                print(
                    f"{after.instructions} instructions: {plant} in {model.name}", file=sys.stderr
                )
            yield Result(
                model.name,
                plant.kind,
                candidate.instructions,
                after.instructions,
                sum(one.size for one in after.inputs),
                shrunk.asked,
                time.perf_counter() - began,
            )


def show(results: Sequence[Result]) -> None:
    """Print the table by model and kind."""
    rows = []
    groups = dict.fromkeys((one.model, one.kind) for one in results)
    for model, kind in [*groups, ("all", "")]:
        chosen = [one for one in results if (one.model, one.kind) == (model, kind) or not kind]
        after = [one.after for one in chosen]
        rows.append(
            [
                model,
                kind,
                str(len(chosen)),
                str(int(measuring.median([one.before for one in chosen]))),
                str(int(measuring.median(after))),
                str(max(after)),
                f"{sum(one <= SMALL for one in after) / len(chosen):.0%}",
                str(int(measuring.median([one.elements for one in chosen]))),
                str(int(measuring.median([one.looked_at for one in chosen]))),
                f"{measuring.median([one.seconds for one in chosen]):.1f}",
                f"{max(one.seconds for one in chosen):.1f}",
            ]
        )
    heads = ["model", "kind", "plants", "before", "after", "most", f"<= {SMALL}"]
    measuring.show_table([*heads, "elements", "looked at", "seconds", "most"], rows)


def main() -> None:
    """Plant, minify, print the table; fail where too few become small, or it takes too long."""
    results = run_plants(minify_all, __doc__, with_large=True)
    show(results)
    small = sum(one.after <= SMALL for one in results) / len(results)
    seconds = measuring.median([one.seconds for one in results])
    print(f"at most {SMALL} instructions in {small:.1%}, needed {NEEDED:.0%}")
    print(f"median {seconds:.1f} s, at most {MOST_SECONDS:.0f} s")
    if small < NEEDED or seconds > MOST_SECONDS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
