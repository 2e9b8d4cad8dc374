"""The pipeline of `snaprt minify`.

Load the program of a file, choose the sides, shrink it, check the result, and write the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from snaprt import jaxapi
from snaprt.errors import SnapshotError, UsageError
from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import instructions
from snaprt_replay.load.case import Case, on_one_device
from snaprt_replay.localize.measure import error_between
from snaprt_replay.localize.pipeline import read_program
from snaprt_replay.localize.suspect import nonfinite_suspect, suspect_of
from snaprt_replay.minify import checks
from snaprt_replay.minify import folder as folders
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.checks import Check, CheckName, Patience
from snaprt_replay.minify.cutting import Tap, normalized
from snaprt_replay.minify.shrink import Shrunk, Start, Tell, shrink, still_fails
from snaprt_replay.run.player import (
    check_branches_alone,
    check_playable,
    check_runs_on_one_device,
)
from snaprt_replay.run.variants.variants import RECORDED, Variant, parse_variant, with_options
from snaprt_replay.run.workers import Outcome, Workers

_F64 = parse_variant("f64")
# If the suspect fails, these variants may still compute the values inside the program.
_CAREFUL = tuple(map(parse_variant, ("cpu,optimization=0", "interpreter")))
_MOST_TAP_FAILURES = 2
_SLOW_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class MinifyRequest:
    """What to minify, and how."""

    check: CheckName = "mismatch"  # what counts as the failure
    suspect: Variant | None = None  # side A; None for the platform that the case was recorded on
    # Side B of a mismatch; None for the recorded outputs, or float64 if there are none.
    reference: Variant | None = None
    command: Sequence[str] = ()  # the words of the command, if the check is one
    # Compiling for longer than these seconds is slow; None for half of the original's time.
    slower_than: float | None = None
    patience: Patience = dataclasses.field(default_factory=Patience)  # how long to look
    timeout: float = 120.0  # seconds that one program may take to compile and run


@dataclasses.dataclass(frozen=True, eq=False)
class Minified:
    """A file, minified."""

    shrunk: Shrunk  # the minified program
    check: CheckName  # the failure that was searched for
    confirmed: bool  # whether the smallest program also failed in new processes
    # Whether `repro.py` fails when run by itself; None if it cannot show the failure.
    script_fails: bool | None
    folder: Path  # where everything was written
    notes: tuple[str, ...]  # what the reader should know


def minify(
    case: Case,
    request: MinifyRequest,
    folder: Path,
    against: Case | None = None,
    tell: Tell = lambda line: None,
) -> Minified | None:
    """Make the program of a case as small as possible while it still fails.

    Args:
        case: With inputs.
        request: See `MinifyRequest`.
        folder: Where to write the results; created if missing.
        against: Another case of the same program, whose module the reference side runs.
        tell: Called with a line of progress.

    Returns:
        None if the program does not fail.

    Raises:
        UsageError: There are no inputs, a side cannot be run, or the programs are not the same.
        DeviceError: There is no such device or interpreter as a side runs on.
        SnapshotError: A module cannot be read, or neither the folder nor one for temporary files
            can be written.
    """
    check_playable(case, 1)
    check_runs_on_one_device(case)
    case, adaptations = on_one_device(case)
    caching = _cache_off() if request.check == "slow-compile" else contextlib.nullcontext()
    with caching:
        with Workers(request.patience.jobs, request.timeout) as workers:
            check_branches_alone(case, workers)
            start = functools.partial(_start, workers)
            candidate, notes = _candidate(case, request, against, start)
            check = _check(request, candidate, start)
            taps = _Taps(request.check, start)
            shrunk = shrink(candidate, check, start, request.patience, taps, tell)
        if shrunk is None:
            return None
        tell("checking the result in new processes")
        with Workers(request.patience.jobs, request.timeout) as workers:
            start = functools.partial(_start, workers)
            confirmed = still_fails(shrunk, check, start, request.patience)
            write = functools.partial(
                folders.write, case=case, shrunk=shrunk, check=check, start=start
            )
            try:
                script_fails = write(folder)
            except SnapshotError as error:  # the disk has become full in what may be hours
                folder = _other_folder(error)
                script_fails = write(folder)
                notes = (*notes, f"{error.message}; {error.hint}")
    return Minified(shrunk, request.check, confirmed, script_fails, folder, (*adaptations, *notes))


def _other_folder(error: SnapshotError) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="minified-"))
    except OSError:
        raise error from None


# --- the sides ---


def _candidate(
    case: Case, request: MinifyRequest, against: Case | None, start: Start
) -> tuple[Candidate, tuple[str, ...]]:
    """Return the program with its sides chosen, and notes on that choice."""
    notes: tuple[str, ...] = ()
    suspect = suspect_of(case, request.suspect)
    if request.check == "nan":
        suspect, notes = nonfinite_suspect(case, request.suspect, functools.partial(start, 0))
    suspect = with_options(suspect, case.compiler_options)
    modules = [read_program(source).module for source in (case, *([against] if against else []))]
    _check_alone(case, modules[0])
    normal = normalized(modules, [array.value for array in case.inputs or ()])
    if normal is None:
        raise UsageError(
            "the two files do not hold the same program",
            hint="`snaprt inspect FILE` shows the contents of a file",
        )
    candidate, picks = normal
    if request.check != "mismatch":
        return dataclasses.replace(candidate, variants=(suspect,)), notes
    reference = request.reference
    if reference is None and against is None and case.outputs is not None:
        reference = RECORDED
    if reference is None:
        reference = suspect if against is not None else _F64
    if reference.kind != "recorded":
        sides = (suspect, with_options(reference, case.compiler_options))
        return dataclasses.replace(candidate, variants=sides), ()
    if case.outputs is None or against is not None:
        raise UsageError(f"{case.path}: no outputs were recorded to compare with")
    expected = tuple(case.outputs[index].value for index in picks)
    return _compared_with_recorded(candidate, suspect, expected, start)


def _check_alone(case: Case, module: XlaMessage) -> None:
    for instruction in instructions(module):
        if jaxapi.is_python_callback(instruction.custom_call_target):
            raise UsageError(
                f"{case.path}: the program calls back into Python at {instruction.name}, which is "
                "impossible from a file",
                hint="remove jax.pure_callback or io_callback from it, and record it again",
            )


def _compared_with_recorded(
    candidate: Candidate, suspect: Variant, expected: tuple[np.ndarray, ...], start: Start
) -> tuple[Candidate, tuple[str, ...]]:
    """Let float64 replace the recorded outputs if it reproduces them: it can run any part."""
    right = start(1, _F64, candidate.content(0), candidate.inputs).result().outputs
    candidate = dataclasses.replace(candidate, variants=(suspect, _F64))
    if right is not None and all(
        error_between(reproduced, recorded) <= 1.0
        for reproduced, recorded in zip(right, expected, strict=True)
    ):
        return candidate, (
            "f64 reproduces the recorded outputs and replaces them for smaller programs",
        )
    note = (
        "f64 does not reproduce the recorded outputs: minify may drop outputs but not change "
        "their programs"
    )
    return dataclasses.replace(candidate, expected=expected), (note,)


def _check(request: MinifyRequest, candidate: Candidate, start: Start) -> Check:
    if request.check == "slow-compile":
        return checks.slow_compile(request.slower_than or _half_of_compiling(candidate, start))
    if request.check == "command":
        return checks.command(tuple(request.command), folders.write_candidate)
    return _CHECKS[request.check]


_CHECKS: Mapping[CheckName, Check] = {
    check.name: check for check in (checks.MISMATCH, checks.NONFINITE, checks.CRASH)
}


def _half_of_compiling(candidate: Candidate, start: Start) -> float:
    outcome = start(0, candidate.variants[0], candidate.content(0), candidate.inputs).result()
    return outcome.compile_seconds * _SLOW_SHARE


class _Taps:
    """The variants that record intermediate values, except those that failed too often."""

    def __init__(self, check: CheckName, start: Start) -> None:
        self._check = check
        self._start = start
        self._failures: Counter[Variant] = Counter()

    def __call__(self, candidate: Candidate) -> list[Tap]:
        """Return the taps for a candidate, best first."""
        ways = [(0, variant) for variant in _CAREFUL]
        if self._check == "mismatch":
            side = 0 if candidate.expected is not None else 1
            ways = [(side, candidate.variants[1])]
        elif self._check == "nan":
            ways = [(0, candidate.variants[0])]
        return [
            Tap(side, functools.partial(self._tap, side, variant))
            for side, variant in ways
            if self._failures[variant] < _MOST_TAP_FAILURES
        ]

    def _tap(
        self, side: int, variant: Variant, hlo: bytes, inputs: Sequence[np.ndarray]
    ) -> Future[Outcome]:
        future = self._start(side, variant, hlo, inputs)
        self._failures[variant] += future.result().outputs is None
        return future


def _start(
    workers: Workers, side: int, variant: Variant | None, hlo: bytes, inputs: Sequence[np.ndarray]
) -> Future[Outcome]:
    assert variant is not None
    return workers.submit(variant, hlo, inputs)


@contextlib.contextmanager
def _cache_off() -> Iterator[None]:
    """Make workers compile instead of loading cached executables."""
    before = os.environ.get("SNAPRT_CACHE")
    os.environ["SNAPRT_CACHE"] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ["SNAPRT_CACHE"]
        else:
            os.environ["SNAPRT_CACHE"] = before
