"""Run two variants and a reference of one file, and have them judged. The order of things."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from pathlib import Path

import numpy as np

from snaprt.errors import UsageError
from snaprt_replay.compare.verdict import Evidence, Judgement, Yardstick, judge
from snaprt_replay.load.case import Case, on_one_device
from snaprt_replay.load.load import load
from snaprt_replay.run import player
from snaprt_replay.run.variants.variants import Variant, parse_variant
from snaprt_replay.run.workers import Outcome, Workers

F64 = parse_variant("f64")
RANDOM_ROUNDING = parse_variant("random-rounding")

PROCESSES = 2
"""How many processes serve a trial well: its variants take about as long as each other."""

_SAMPLES = 8
# As many runs as fit in this many bytes of outputs, but at least two.
_SAMPLE_BYTES = 1 << 31


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A file, run in two ways, and judged."""

    case: Case  # what was run
    a: Outcome  # what the first variant gave
    b: Outcome  # what the second variant gave
    reference: Outcome  # what the reference gave
    judgement: Judgement  # who is wrong


def hold_trial(
    path: str | Path,
    a: Variant,
    b: Variant,
    reference: Variant = F64,
    *,
    workers: Workers,
    repeat: int = 1,
    inputs: str | Path | None = None,
    random_seed: int | None = None,
) -> Trial:
    """Run two variants and a reference of one file in processes of their own, and judge.

    Args:
        path: Any file that `load` takes.
        a: The first side; ``recorded`` takes the outputs that are in the file.
        b: The second side.
        reference: What both are measured against.
        workers: Where they run.
        repeat: How often to run each side, to see whether it agrees with itself.
        inputs: An ``.npz`` file with other inputs.
        random_seed: Draw other inputs, from this seed.

    Raises:
        SnaprtError: The file cannot be read, or has not what a variant takes from it.
    """
    case = load(path, inputs, random_seed)
    return try_case(case, a, b, reference, workers=workers, repeat=repeat)


def try_case(
    case: Case,
    a: Variant,
    b: Variant,
    reference: Variant,
    *,
    workers: Workers,
    repeat: int = 1,
) -> Trial:
    """Do what `hold_trial` does, with what was loaded already."""
    player.check_playable(case, repeat)
    player.check_runs_on_one_device(case)
    case, told = on_one_device(case)
    for variant in (a, b, reference):
        _check_recorded(case, variant)

    def start(variant: Variant, runs: int) -> concurrent.futures.Future[Outcome]:
        return _start(workers, case, variant, runs)

    running = [start(a, repeat), start(b, repeat), start(reference, 1)]
    center = running[2] if reference == F64 else start(F64, 1)
    samples = start(RANDOM_ROUNDING, _sample_count(case))
    first, second, wanted = (one.result() for one in running)
    yardstick, notes = _yardstick(reference, wanted, center.result(), samples.result())
    count = max(len(outcome.outputs or ()) for outcome in (first, second, wanted))
    names = player.output_names(case, count)
    evidence = _evidence(a, first), _evidence(b, second)
    judgement = judge(*evidence, yardstick, names, (*told, *notes))
    return Trial(case, first, second, wanted, judgement)


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
        recorded.set_result(Outcome(tuple(one.value for one in case.outputs or ()), None))
        return recorded
    return workers.submit_job(player.job_of(case, variant, runs, devices=1))


def _sample_count(case: Case) -> int:
    elements = sum(one.value.size for one in case.outputs or case.inputs or ())
    size = elements * np.dtype(np.float64).itemsize
    return int(np.clip(_SAMPLE_BYTES // max(1, size), 2, _SAMPLES))


def _evidence(variant: Variant, outcome: Outcome) -> Evidence:
    failure = outcome.failure
    told = "" if failure is None else f"{failure}: {failure.message.splitlines()[0]}"
    return Evidence(variant.text, outcome.outputs, outcome.other_runs, told)


def _yardstick(
    reference: Variant, wanted: Outcome, center: Outcome, samples: Outcome
) -> tuple[Yardstick | None, tuple[str, ...]]:
    """Return the yardstick, or None, and why there is none or what is particular about it."""
    notes = [*wanted.notes]
    for what, outcome in (
        (f"the reference ({reference.text})", wanted),
        ("the float64 program", center),
        ("the program with random rounding", samples),
    ):
        if outcome.failure is not None:
            failure = outcome.failure
            return None, (*notes, f"{what} gave no result: {failure}: {failure.message}")
    assert wanted.outputs is not None
    assert center.outputs is not None
    assert samples.outputs is not None
    if center.outputs is not wanted.outputs:
        notes += center.notes
    runs = (samples.outputs, *samples.other_runs)
    return Yardstick(reference.text, wanted.outputs, center.outputs, runs), tuple(notes)
