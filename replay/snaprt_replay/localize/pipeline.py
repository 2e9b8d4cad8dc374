"""Find where two sides of a program start to differ, or where one side first goes wrong.

The pipeline of `snaprt localize` on one page: load both programs, run them whole, choose the
question, search, and report the result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np

from snaprt.errors import UsageError
from snaprt.hlo.proto import HloModuleProto, parse
from snaprt_replay.hlo import hlo_module
from snaprt_replay.hlo.extract import Value
from snaprt_replay.load.case import Case, NamedArray, on_one_device, same_bits
from snaprt_replay.load.modules import hlo_of
from snaprt_replay.localize import nonfinite
from snaprt_replay.localize.alignment import aligned
from snaprt_replay.localize.edits import MOST_NAMED, Edit, edits_between, prove, whole
from snaprt_replay.localize.findings import (
    FindingKind,
    InstructionPlace,
    Localization,
    PassEffect,
    RegionError,
    ValueDifference,
    error_text,
    sentence,
)
from snaprt_replay.localize.matching import ComputationDiff, count_matched, signature
from snaprt_replay.localize.measure import difference, largest_error
from snaprt_replay.localize.program import FlatModule, flatten
from snaprt_replay.localize.search import Found, Search, try_passes
from snaprt_replay.localize.session import BudgetSpentError, RunModule, Session, Side, Values
from snaprt_replay.localize.sides import ComputationFrame, Pair, frame_of
from snaprt_replay.localize.suspect import nonfinite_suspect, runnable, suspect_of
from snaprt_replay.run.player import (
    check_branches_alone,
    check_playable,
    check_runs_on_one_device,
)
from snaprt_replay.run.variants.variants import Variant, parse_variant, with_options
from snaprt_replay.run.workers import Workers

SearchTarget = Literal["auto", "difference", "nonfinite"]
_DEFAULT_REFERENCE = "f64"


@dataclasses.dataclass(frozen=True)
class LocalizeRequest:
    """What to localize, and how."""

    # The side to search; None for the platform that the case was recorded on.
    suspect: Variant | None = None
    # The side to compare it with; None for float64 or, with another case, for the suspect's own
    # variant.
    reference: Variant | None = None
    # What to search for; ``auto`` searches for NaN and Inf where nothing else differs, or where no
    # instruction is at fault for those of the suspect.
    find: SearchTarget = "auto"
    budget: float | None = None  # seconds; None for no limit
    timeout: float = 120.0  # seconds for one module
    # A folder that keeps the state of the search, so that it can continue after an interruption;
    # None for none. When the search ends, it removes that state.
    state: Path | None = None


def localize(
    case: Case,
    request: LocalizeRequest | None = None,
    against: Case | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Localization:
    """Localize a difference.

    Args:
        case: A case with inputs; the suspect side runs its module.
        request: See `LocalizeRequest`.
        against: Another case of the same program, edited or recorded on another device; the
            reference side runs its module. Both sides take the inputs of `case`.
        tell: Called with a line of progress.

    Raises:
        UsageError: There are no inputs, a variant cannot be run, or the programs differ in their
            inputs or results.
        SnapshotError: A module cannot be read.
        ExecutionError: A side fails on a part of the program.
        DeviceError: There is no such device or interpreter as a side runs on.
    """
    request = request or LocalizeRequest()
    check_playable(case, 1)
    check_runs_on_one_device(case)
    case, case_notes = on_one_device(case)
    suspect = suspect_of(case, request.suspect)
    reference = runnable(request.reference)
    programs = (read_program(case), read_program(against) if against is not None else None)
    with Workers(2, request.timeout) as workers:
        check_branches_alone(case, workers)
        if against is None and request.find != "difference":
            suspect, notes = nonfinite_suspect(case, request.suspect, workers.submit)
            case_notes = (*case_notes, *notes)
        if reference is None:
            reference = suspect if against is not None else parse_variant(_DEFAULT_REFERENCE)
        names = [suspect.text, reference.text]
        if against is not None:
            names = [f"{names[0]} of {case.path.name}", f"{names[1]} of {against.path.name}"]
        if names[0] == names[1]:
            names = [f"{names[0]} (a)", f"{names[1]} (b)"]

        @functools.cache
        def run(variant: Variant) -> RunModule:
            return _submitting(workers, with_options(variant, case.compiler_options))

        def side(variant: Variant, name: str, program: FlatModule) -> Side:
            return Side(name, program, run(variant))

        sides = (
            side(suspect, names[0], programs[0]),
            side(reference, names[1], programs[1] or programs[0]),
        )

        def vary(addition: str) -> Side:
            text = f"{suspect.text},{addition}"
            return side(parse_variant(text), text, programs[0])

        session = Session(request.state, request.budget, tell)
        inputs = [array.value for array in case.inputs or ()]
        recorded = None if case.outputs is None else [output.value for output in case.outputs]
        localization = search(session, sides, inputs, request.find, vary, recorded)
    if localization.kind != "unfinished":
        session.forget()
    notes = (*case_notes, *localization.notes, *_notes_on_files(case, against))
    return dataclasses.replace(localization, notes=notes)


def search(
    session: Session,
    sides: tuple[Side, Side],
    inputs: Sequence[np.ndarray],
    find: SearchTarget = "auto",
    vary: Callable[[str], Side] | None = None,
    recorded: Sequence[np.ndarray] | None = None,
) -> Localization:
    """Localize on two sides that are ready to run.

    Args:
        session: Runs them.
        sides: The suspect and the reference, of different names.
        inputs: The program's inputs, in order.
        find: See `LocalizeRequest`.
        vary: Returns the suspect with an addition to its variant; None where it has no variant.
        recorded: The recorded outputs, to report which side reproduces them.

    Raises:
        UsageError: The two are not the same program, or a side cannot run such a program.
        ExecutionError: A side fails on a part of the program.
        DeviceError: There is no such device or interpreter as a side runs on.
    """
    task = _task(session, sides, inputs)
    try:
        outputs = _run_whole(task)
        result = _answer(task, outputs, find, vary)
    except BudgetSpentError:
        return _localization(task, None, Found("unfinished", ()))
    notes = (*result.notes, *_notes_on_recorded(task.frame, outputs, recorded))
    return dataclasses.replace(result, notes=notes)


@dataclasses.dataclass(frozen=True, eq=False)
class _Task:
    """The programs, sides and inputs of one localization."""

    session: Session  # runs it
    sides: tuple[Side, Side]  # the suspect and the reference, each with its program
    frame: ComputationFrame  # the suspect's program on both sides
    compared: ComputationDiff  # the two programs
    inputs: Sequence[np.ndarray]  # the inputs of both


def _answer(
    task: _Task, outputs: Pair, find: SearchTarget, vary: Callable[[str], Side] | None
) -> Localization:
    differ = outputs.error() > 1.0
    if find == "nonfinite" or (find == "auto" and not differ and _is_nonfinite(outputs)):
        return _localize_nonfinite(task, outputs)
    if not differ:
        return _agreement(task, outputs)
    if task.compared.is_same:
        return _between_variants(task, outputs, find, vary)
    # Does the difference come from the programs, or from the way in which each is run?
    suspect, reference = task.sides
    crossed = outputs.reference
    if suspect.run is not reference.run:
        crossed = dict(zip(crossed, _run_crossed(task).values(), strict=True))
    if Pair(outputs.suspect, crossed).error() > 1.0:
        return _between_programs(task, outputs, crossed)
    sides = (dataclasses.replace(suspect, program=reference.program), reference)
    task = _task(task.session, sides, task.inputs)
    outputs = _run_whole(task)
    return _between_variants(task, outputs, find, vary)


def _between_variants(
    task: _Task, outputs: Pair, find: SearchTarget, vary: Callable[[str], Side] | None
) -> Localization:
    """Localize a difference between two ways to run one program."""
    session = task.session
    state = Search(session)
    finding = state.whole(task.frame, outputs)
    if find == "auto" and finding.kind in _NO_FAULT and _is_misplaced(task, outputs):
        # A value that exceeds its dtype's range is nobody's fault, but the NaN begins somewhere.
        result = _localize_nonfinite(task, outputs)
        if result.kind == "instruction":
            return dataclasses.replace(result, notes=(_note_on_range(task, outputs),))
    effects: tuple[PassEffect, ...] = ()
    if state.healed is not None and finding.kind == "interaction" and vary is not None:
        effects = try_passes(session, state.healed, vary)
    result = dataclasses.replace(
        _localization(task, outputs, finding),
        path=tuple(state.path),
        observer_effect=state.observer_effect,
        passes=effects,
        notes=_notes_on_regions(state.path),
    )
    return dataclasses.replace(result, sentence=sentence(result))


def _notes_on_regions(path: Sequence[RegionError]) -> tuple[str, ...]:
    wrong = sum(region.made > 1.0 and not region.chosen for region in path if region.depth == 0)
    return (f"{wrong} more of the first regions go wrong with the same inputs",) if wrong else ()


def _between_programs(task: _Task, outputs: Pair, crossed: Values) -> Localization:
    """Localize a difference between two programs that are both run as the suspect is."""
    suspect = task.sides[0]
    proof = prove(task.session, suspect, task.compared, task.inputs, outputs.suspect, crossed)
    kind: FindingKind = "candidates"
    if proof.is_proven:
        kind = "instruction" if len(proof.edits) == 1 else "interaction"
    named, differences = _edited(proof.edits, proof.before)
    result = _localization(task, outputs, Found(kind, named, differences))
    result = dataclasses.replace(result, substituted=(proof.before, proof.after))
    if proof.others:
        places = "1 more place" if proof.others == 1 else f"{proof.others} more places"
        note = f"the programs differ in {places} that do not cause the difference"
        result = dataclasses.replace(result, notes=(*result.notes, note))
    return dataclasses.replace(result, sentence=sentence(result))


def _agreement(task: _Task, outputs: Pair) -> Localization:
    edits = [] if task.compared.is_same else edits_between(task.compared)
    places, differences = _edited(edits[:MOST_NAMED], outputs.error())
    finding = Found("nothing", places, differences)
    return _localization(task, outputs, finding)


def _edited(
    edits: Sequence[Edit], error: float
) -> tuple[tuple[InstructionPlace, ...], tuple[ValueDifference, ...]]:
    places = tuple(place for edit in edits for place in edit.places)
    reasons = [reason for edit in edits for reason in edit.reasons]
    differences = (
        ValueDifference(place.name, error, reason)
        for place, reason in zip(places, reasons, strict=True)
    )
    return places, tuple(differences)


def read_program(case: Case) -> FlatModule:
    """Return a case's module as a flat HLO program.

    Raises:
        SnapshotError: It cannot be read, or has no HLO.
    """
    module = parse(HloModuleProto, hlo_of(case), case.path)
    program = flatten(module)
    hlo_module.verify(module)
    return program


def _submitting(workers: Workers, variant: Variant) -> RunModule:
    return lambda module, inputs: workers.submit(variant, module, inputs)


def _task(session: Session, sides: tuple[Side, Side], inputs: Sequence[np.ndarray]) -> _Task:
    suspect, reference = sides
    compared = aligned(suspect.program, reference.program)
    if signature(compared.lines[0]) != signature(compared.lines[1]):
        raise UsageError(
            "the two files do not hold the same program: their inputs or results differ in "
            "number, shape or type",
            hint="`snaprt inspect FILE` shows the contents of a file",
        )
    entry = suspect.program.module.entry_computation_id
    one_program = (suspect, dataclasses.replace(reference, program=suspect.program))
    frame = frame_of(one_program, (entry, entry), [{Value(0): array} for array in inputs])
    return _Task(session, sides, frame, compared, inputs)


def _run_whole(task: _Task) -> Pair:
    """Run both sides' programs unchanged."""
    ((suspect,), (reference,)) = task.session.run(
        *(whole(side, task.inputs) for side in task.sides)
    )
    return Pair(suspect, dict(zip(suspect, reference.values(), strict=True)))


def _run_crossed(task: _Task) -> Values:
    """Run the reference's program in the way that the suspect's program is run."""
    suspect, reference = task.sides
    crossed = dataclasses.replace(suspect, program=reference.program)
    ((values,),) = task.session.run(whole(crossed, task.inputs))
    return values


def _is_nonfinite(outputs: Pair) -> bool:
    return not all(map(nonfinite.is_finite, outputs.suspect.values()))


# Results that name no instruction that goes wrong on correct inputs.
_NO_FAULT: Final = ("amplification", "candidates")


def _is_misplaced(task: _Task, outputs: Pair) -> bool:
    """Return whether the suspect makes NaN or infinities of finite inputs where they do not belong.

    The reference may have some too, in other places: float64 also overflows, only later.
    """
    return (
        _is_nonfinite(outputs)
        and math.isinf(outputs.error())
        and all(map(nonfinite.is_finite, task.inputs))
    )


def _note_on_range(task: _Task, outputs: Pair) -> str:
    suspect, reference = task.sides
    finite = all(map(nonfinite.is_finite, outputs.reference.values()))
    have = "are finite" if finite else "have NaN or infinity in fewer or other places"
    return (
        f"the outputs of {reference.name} {have}, and no instruction is proven to go wrong on "
        f"{suspect.name}: a value exceeds the range of its dtype, or rounding errors grow"
    )


def _localize_nonfinite(task: _Task, outputs: Pair) -> Localization:
    origin = nonfinite.first_origin(task.session, task.frame, outputs.suspect)
    if origin is None:
        result = _localization(task, outputs, Found("nothing", ()))
        answer = nonfinite.no_origin_sentence(task.sides[0].name, _is_nonfinite(outputs))
        return dataclasses.replace(result, reference="", sentence=answer)
    finding = Found("instruction", (origin.place,), (), float("inf"))
    result = _localization(task, outputs, finding)
    return dataclasses.replace(result, reference="", sentence=nonfinite.origin_sentence(origin))


def _localization(task: _Task, outputs: Pair | None, finding: Found) -> Localization:
    matched, count = count_matched(task.compared)
    session = task.session
    result = Localization(
        kind=finding.kind,
        sentence="",
        suspect=task.sides[0].name,
        reference=task.sides[1].name,
        instructions=finding.places,
        difference=finding.difference,
        outputs=_output_differences(outputs) if outputs is not None else (),
        matched=matched,
        instruction_count=count,
        compiles=session.compiles,
        executions=session.executions,
        seconds=session.seconds,
    )
    return dataclasses.replace(result, sentence=sentence(result))


def _output_differences(outputs: Pair) -> tuple[ValueDifference, ...]:
    return tuple(
        difference(f"out{index}", outputs.reference[value], array)
        for index, (value, array) in enumerate(outputs.suspect.items())
    )


def _notes_on_recorded(
    frame: ComputationFrame, outputs: Pair, recorded: Sequence[np.ndarray] | None
) -> tuple[str, ...]:
    """Return notes on which sides reproduce the recorded outputs."""
    if recorded is None or len(recorded) != len(outputs.suspect):
        return ()
    notes = []
    for side, values in zip(frame.sides, (outputs.suspect, outputs.reference), strict=True):
        error = largest_error(values.values(), recorded)
        gives = "reproduces" if error <= 1.0 else "does not reproduce"
        notes.append(f"{side.name} {gives} the recorded outputs (error: {error_text(error)})")
    return tuple(notes)


def _notes_on_files(case: Case, against: Case | None) -> tuple[str, ...]:
    """Return notes on how the recorded inputs and outputs of two files differ."""
    if against is None:
        return ()
    notes = []
    if not _same(case.inputs, against.inputs):
        notes.append(f"{against.path.name} has different inputs; using those of {case.path.name}")
    elif case.outputs is not None and against.outputs is not None:
        same = _same(case.outputs, against.outputs)
        notes.append(
            f"the recorded outputs of the two files are {'identical' if same else 'not identical'}"
        )
    return tuple(notes)


def _same(first: Sequence[NamedArray] | None, second: Sequence[NamedArray] | None) -> bool:
    if first is None or second is None:
        return True  # nothing that could differ
    return len(first) == len(second) and all(
        same_bits(left.value, right.value) for left, right in zip(first, second, strict=True)
    )
