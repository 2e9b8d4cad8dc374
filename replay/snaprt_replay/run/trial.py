"""Run two variants and a reference of one file, and judge which of them is wrong."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence

import numpy as np

from snaprt.errors import UsageError
from snaprt_replay import floatbits
from snaprt_replay.compare.verdict import Evidence, Judgement, Yardstick, judge
from snaprt_replay.load.case import Case, on_one_device
from snaprt_replay.run import player
from snaprt_replay.run.variants.variants import Variant, parse_variant
from snaprt_replay.run.workers import Outcome, Workers

F64 = parse_variant("f64")
RANDOM_ROUNDING = parse_variant("random-rounding")

PROCESSES = 2
"""How many processes suit a trial, whose variants take about equally long."""

_SAMPLES = 8
# As many runs as fit in this many bytes of outputs, but at least two.
_SAMPLE_BYTES = 1 << 31


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A file that was run in two ways and judged."""

    case: Case  # what was run
    a: Outcome  # the outcome of the first variant
    b: Outcome  # the outcome of the second variant
    reference: Outcome  # the outcome of the reference
    judgement: Judgement  # which side is wrong


def try_case(
    case: Case,
    a: Variant,
    b: Variant,
    reference: Variant = F64,
    *,
    workers: Workers,
    repeat: int = 1,
) -> Trial:
    """Run two variants and a reference of one case in separate processes, and judge them.

    Args:
        case: What to run.
        a: The first side; ``recorded`` takes the outputs in the file.
        b: The second side.
        reference: What both are measured against.
        workers: Where they run.
        repeat: How often to run each side, to see whether it is deterministic.

    Raises:
        SnaprtError: The case lacks what a variant needs from it.
    """
    player.check_playable(case, repeat)
    player.check_runs_on_one_device(case)
    case, adaptations = on_one_device(case)
    for variant in (a, b, reference):
        _check_recorded(case, variant)
    player.check_branches_alone(case, workers)

    def start(variant: Variant, runs: int) -> concurrent.futures.Future[Outcome]:
        return _start(workers, case, variant, runs)

    running = [start(a, repeat), start(b, repeat), start(reference, 1)]
    center = running[2] if reference == F64 else start(F64, 1)
    samples = start(RANDOM_ROUNDING, _sample_count(case))
    first, second, reference_outcome = (future.result() for future in running)
    yardstick, notes = _yardstick(reference, reference_outcome, center.result(), samples.result())
    count = max(len(outcome.outputs or ()) for outcome in (first, second, reference_outcome))
    names = player.output_names(case, count)
    sides = [(a, _evidence(a, first)), (b, _evidence(b, second))]
    of_a, of_b = _in_own_types(case, sides)
    judgement = judge(of_a, of_b, yardstick, names, (*adaptations, *notes))
    return Trial(case, first, second, reference_outcome, judgement)


def _check_recorded(case: Case, variant: Variant) -> None:
    if variant.kind == "recorded" and case.outputs is None:
        why = "no outputs were recorded for these inputs"
        if case.input_parts:
            names = ", ".join(case.input_parts)
            why = f"the recorded outputs come from copies of {names} that differ between devices"
        raise UsageError(
            f"{case.path}: {why}",
            hint="use another variant for this side: --a op-by-op, --a cpu,optimization=0",
        )


def _start(
    workers: Workers, case: Case, variant: Variant, runs: int
) -> concurrent.futures.Future[Outcome]:
    if variant.kind == "recorded":
        recorded: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        recorded.set_result(Outcome(tuple(array.value for array in case.outputs or ()), None))
        return recorded
    return workers.submit_job(player.job_of(case, variant, runs, devices=1))


def _sample_count(case: Case) -> int:
    elements = sum(array.value.size for array in case.outputs or case.inputs or ())
    size = elements * np.dtype(np.float64).itemsize
    return int(np.clip(_SAMPLE_BYTES // max(1, size), 2, _SAMPLES))


def _evidence(variant: Variant, outcome: Outcome) -> Evidence:
    failure = outcome.failure
    message = "" if failure is None else f"{failure}: {failure.message.splitlines()[0]}"
    return Evidence(variant.text, outcome.outputs, outcome.other_runs, message)


def _in_own_types(case: Case, sides: Sequence[tuple[Variant, Evidence]]) -> list[Evidence]:
    """Return the evidence of both sides in the program's own types, as float64 can be rounded to.

    A side that computes in float64 is compared with the other as what the program would return.
    """
    recorded = [array.value for array in case.outputs or ()]
    computed = [evidence.outputs or () for variant, evidence in sides if variant != F64]
    of_program: Sequence[np.ndarray] = next(filter(None, (recorded, *computed)), ())

    def rounded(outputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        if len(outputs) != len(of_program):
            return outputs
        with np.errstate(all="ignore"):
            return tuple(
                value.astype(own.dtype) if floatbits.is_inexact(value.dtype) else value
                for value, own in zip(outputs, of_program, strict=True)
            )

    return [
        dataclasses.replace(
            evidence,
            outputs=None if evidence.outputs is None else rounded(evidence.outputs),
            other_runs=tuple(map(rounded, evidence.other_runs)),
        )
        if variant == F64
        else evidence
        for variant, evidence in sides
    ]


def _yardstick(
    reference: Variant, reference_outcome: Outcome, center: Outcome, samples: Outcome
) -> tuple[Yardstick | None, tuple[str, ...]]:
    """Return the yardstick, or None, and notes: why there is none, or what is special about it."""
    notes = [*reference_outcome.notes]
    for what, outcome in (
        (f"the reference ({reference.text})", reference_outcome),
        ("the float64 program", center),
        ("the program with random rounding", samples),
    ):
        if outcome.failure is not None:
            failure = outcome.failure
            return None, (*notes, f"{what} gave no result: {failure}: {failure.message}")
    assert reference_outcome.outputs is not None
    assert center.outputs is not None
    assert samples.outputs is not None
    if center.outputs is not reference_outcome.outputs:
        notes += center.notes
    runs = (samples.outputs, *samples.other_runs)
    return Yardstick(reference.text, reference_outcome.outputs, center.outputs, runs), tuple(notes)
