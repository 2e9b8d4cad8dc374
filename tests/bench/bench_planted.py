"""Plant faults in real models, and see whether `snaprt localize` finds the instruction.

Run it: python tests/bench/bench_planted.py [--all] [--reference cpu|f64] [--seed N]

One side compiles every module with one instruction broken, as a compiler with a bug would; the
other compiles it as it is. The search is given both sides and the inputs, nothing else. Only plants
that change an output beyond its tolerance count: of the others a user would not know.

The sample has one plant of each kind in each model; --all has 200 plants.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import measuring
import numpy as np
from planting import draw, run_plants, share_of

NEEDED = 0.95
RIGHT, HELD, WRONG = "right", "held", "wrong"
MOST_HELD = 4  # a fusion of more instructions than that is no answer


@dataclass(frozen=True)
class Result:
    """What came of one plant."""

    model: str
    kind: str
    outcome: str
    compiles: int
    instructions: int
    seconds: float


def run_all(
    workers, models: Sequence, count: int, reference: str, seed: int, suspect: str = "cpu"
) -> Iterator[Result]:
    """Plant, localize, judge; ``suspect`` is the variant that compiles with the fault."""
    import planted_faults
    from snaprt_replay.hlo.extract import Piece, extract
    from snaprt_replay.localize.measure import error_between
    from snaprt_replay.localize.pipeline import search
    from snaprt_replay.localize.session import Session, Side
    from snaprt_replay.run.variants.variants import parse_variant
    from snaprt_replay.run.workers import Outcome

    wrong, right = parse_variant(suspect), parse_variant(reference)

    def broken_run(plant):
        def run(hlo: bytes, inputs: Sequence[np.ndarray]) -> Future[Outcome]:
            return workers.submit(wrong, planted_faults.planted(hlo, plant), inputs)

        return run

    def right_run(hlo: bytes, inputs: Sequence[np.ndarray]) -> Future[Outcome]:
        return workers.submit(right, hlo, inputs)

    for index, model in enumerate(models):
        entry = model.program.entry
        made = extract(model.program.module, entry.computation, [Piece((entry.root.id,))])
        numbers = [entry.by_id[one.instruction].parameter_number for one in made.parameters[0]]
        inputs = [model.inputs[number] for number in numbers]
        hlo = made.module.SerializeToString()
        outputs = right_run(hlo, inputs).result().outputs

        def visible(plant, hlo=hlo, inputs=inputs, outputs=outputs) -> bool:
            got = broken_run(plant)(hlo, inputs).result().outputs
            if got is None:
                raise SystemExit(f"{plant} does not run")
            return max(map(error_between, outputs, got)) > 1.0

        for plant in draw(model, share_of(count, models, index), seed, visible):
            started = time.perf_counter()
            sides = (
                Side("with the fault", model.program, broken_run(plant)),
                Side("without", model.program, right_run),
            )
            found = search(Session(), sides, model.inputs)
            names = [one.name for one in found.instructions]
            outcome = WRONG
            if names == [plant.instruction] and found.kind == "instruction":
                outcome = RIGHT
            elif plant.instruction in names and len(names) <= MOST_HELD:
                outcome = HELD
            if outcome != RIGHT:
                print(f"{outcome}: {plant} in {model.name}: {found.sentence}", file=sys.stderr)
            yield Result(
                model.name,
                plant.kind,
                outcome,
                found.compiles,
                found.instruction_count,
                time.perf_counter() - started,
            )


def show(results: Sequence[Result]) -> None:
    """Print the table by kind and model."""
    groups = [(kind, model) for kind in _each(results, "kind") for model in _each(results, "model")]
    rows = []
    for kind, model in [*groups, ("all", "")]:
        chosen = [one for one in results if (one.kind, one.model) == (kind, model) or kind == "all"]
        if not chosen:
            continue
        outcomes = Counter(one.outcome for one in chosen)
        rows.append(
            [
                kind,
                model,
                *(str(len(chosen)), *(str(outcomes[one]) for one in (RIGHT, HELD, WRONG))),
                str(int(measuring.median([one.instructions for one in chosen]))),
                str(int(measuring.median([one.compiles for one in chosen]))),
                str(max(one.compiles for one in chosen)),
                f"{measuring.median([one.seconds for one in chosen]):.1f}",
            ]
        )
    heads = ["kind", "model", "plants", "right", "held", "wrong"]
    heads += ["instructions", "compiles", "most", "seconds"]
    measuring.show_table(heads, rows)


def _each(results: Sequence[Result], field: str) -> list[str]:
    return list(dict.fromkeys(getattr(one, field) for one in results))


def main() -> None:
    """Plant, localize, print the table; fail below the share that is needed."""
    results = run_plants(run_all, __doc__)
    show(results)
    found = sum(one.outcome != WRONG for one in results) / len(results)
    print(f"localized {found:.1%} of {len(results)}, needed {NEEDED:.0%}")
    if found < NEEDED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
