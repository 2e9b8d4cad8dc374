"""Decide whether a candidate shows the failure, and whether it is still the same failure.

A check looks at a candidate and returns what it sees as a `Symptom`: the class of the failure, its
size and its message. The symptom of a smaller program must match that of the first program, or the
search would drift from the requested bug to another one. An intermittent failure counts if it shows
in a minimum number of a given number of looks. Several candidates are judged at the same time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Literal, Protocol

from snaprt.errors import ExecutionError, SnaprtError, UsageError
from snaprt.hlo.literals import TUPLE, literal_to_array
from snaprt_replay.hlo import hlo_module
from snaprt_replay.localize.measure import error_between
from snaprt_replay.localize.nonfinite import Bad, has_infinity, has_nan
from snaprt_replay.localize.program import FlatModule, Line
from snaprt_replay.localize.session import BudgetSpentError
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.run.workers import Failure, Outcome

CheckName = Literal["mismatch", "nan", "crash", "slow-compile", "command"]

# A part of a program, or a corner of an array, does not have the same error as the whole, but an
# error smaller than this share of the original one is rounding, not the bug.
_KEPT_SHARE: Final = 0.03
_LARGE_ERROR: Final = 1e4
_SKIP: Final = 125
_MOST_STATUS: Final = 127


@dataclasses.dataclass(frozen=True)
class Symptom:
    """What was seen of a failure."""

    what: str  # its class, ``finite error`` or ``compile crash``
    # The largest error, in multiples of the default tolerance; 0 where there is none. Not NaN:
    # equal failures must compare equal.
    error: float = 0.0
    message: str = ""  # what XLA said, without what changes from run to run

    def __str__(self) -> str:
        parts = [self.what]
        if 0 < self.error < math.inf:
            parts.append(f"{self.error:.3g} times the tolerance")
        if self.message:
            parts.append(self.message)
        return ", ".join(parts)


class UnjudgedError(Exception):
    """It cannot be determined whether a candidate fails. Never raised out of this package.

    Args:
        obstacle: Why not; the user's error if the candidate is FILE itself.
    """

    def __init__(self, obstacle: SnaprtError) -> None:
        self.obstacle = obstacle


class RunCandidate(Protocol):
    """Start a candidate on one side."""

    def __call__(self, candidate: Candidate, side: int) -> Future[Outcome]:
        """Return the future outcome of side 0, the suspect, or 1, the reference."""
        ...


def _is_same(first: Symptom, symptom: Symptom) -> bool:
    return (symptom.what, symptom.message) == (first.what, first.message)


@dataclasses.dataclass(frozen=True)
class Check:
    """One kind of failure."""

    name: CheckName  # what the user calls it
    # Looks at a candidate once; None if it does not fail. Raises UnjudgedError if that cannot be
    # determined.
    see: Callable[[Candidate, RunCandidate], Symptom | None]
    # Returns whether what is seen is still the first failure.
    persists: Callable[[Symptom, Symptom], bool] = _is_same
    seconds: float = 0.0  # how long compiling may take, if the failure is slow compilation


def _finished(running: Future[Outcome]) -> Outcome:
    """Return the outcome of a side that can run programs.

    Raises:
        UnjudgedError: It cannot, so that it shows no failure of the program.
    """
    outcome = running.result()
    if outcome.failure is not None and outcome.failure.cannot_run:
        raise UnjudgedError(outcome.failure.as_error("the candidate"))
    return outcome


def _failed(candidate: Candidate, side: int, failure: Failure) -> UnjudgedError:
    name = candidate.variants[side].text if candidate.variants else f"side {'AB'[side]}"
    return UnjudgedError(
        ExecutionError(
            f"{name} fails on the program: {failure}: {failure.message}",
            hint="`snaprt minify --check crash` finds the smallest program with this failure; --a "
            "names the side that fails",
        )
    )


def _see_mismatch(candidate: Candidate, run: RunCandidate) -> Symptom | None:
    running = [run(candidate, 0)]
    if candidate.expected is None:
        running.append(run(candidate, 1))
    outcome, *reference = map(_finished, running)
    for side, each in enumerate((outcome, *reference)):
        if each.failure is not None:
            raise _failed(candidate, side, each.failure)
    right = reference[0].outputs if reference else candidate.expected
    assert right is not None
    assert outcome.outputs is not None
    pairs = zip(right, outcome.outputs, strict=True)
    error = max((error_between(expected, actual) for expected, actual in pairs), default=0.0)
    if error <= 1.0:
        return None
    misplaced = "a NaN or an infinity where there should be none, or none where there should be one"
    return Symptom(misplaced if math.isinf(error) else "wrong values", error)


def _is_as_wrong(first: Symptom, symptom: Symptom) -> bool:
    return (
        symptom.what == first.what and symptom.error >= min(first.error, _LARGE_ERROR) * _KEPT_SHARE
    )


def _see_nonfinite(candidate: Candidate, run: RunCandidate) -> Symptom | None:
    outcome = _finished(run(candidate, 0))
    if outcome.failure is not None:
        raise _failed(candidate, 0, outcome.failure)
    outputs = outcome.outputs
    assert outputs is not None
    for what, has in (("NaN", has_nan), ("an infinity", has_infinity)):
        bad = [number for number, output in enumerate(outputs) if has(output)]
        if bad and not any(map(has, candidate.inputs)):
            line = FlatModule(candidate.modules[0], {}).entry
            is_constant = all(_is_constant(line, line.root.operand_ids[n], has) for n in bad)
            return Symptom(f"{what}, a constant of the program" if is_constant else what)
    return None


def _is_constant(line: Line, output: int, bad: Bad) -> bool:
    """Return whether a bad output is a constant of the program, whatever the inputs are.

    A program with such an output alone is no smaller form of one whose inputs make it fail.
    """
    return not line.depends_on_inputs(output) and any(
        bad(literal_to_array(instruction.literal))
        for instruction in line.needed_for(output)
        if instruction.opcode == "constant" and instruction.shape.element_type != TUPLE
    )


def _see_crash(candidate: Candidate, run: RunCandidate) -> Symptom | None:
    failure = _finished(run(candidate, 0)).failure
    return None if failure is None else Symptom(failure.kind, message=failure.signature)


MISMATCH: Final = Check("mismatch", _see_mismatch, _is_as_wrong)
"""The suspect's outputs differ from those of the reference side, or from the expected ones."""
NONFINITE: Final = Check("nan", _see_nonfinite)
"""The outputs contain a NaN or an infinity, but the inputs do not.

If it is a constant of the program, whatever the inputs are, that is another failure.
"""
CRASH: Final = Check("crash", _see_crash)
"""The suspect returns no outputs: it crashes, is rejected, fails, hangs, or runs out of memory.

If there is no such device or interpreter, that is no failure of the program.
"""


def slow_compile(seconds: float) -> Check:
    """Return the check that compiling takes longer than it may."""

    def see(candidate: Candidate, run: RunCandidate) -> Symptom | None:
        outcome = _finished(run(candidate, 0))
        timed_out = outcome.failure is not None and outcome.failure.signature == "compile timeout"
        if outcome.failure is not None and not timed_out:
            raise _failed(candidate, 0, outcome.failure)
        is_slow = timed_out or outcome.compile_seconds > seconds
        return Symptom(f"compiling takes over {seconds:.3g} s") if is_slow else None

    return Check("slow-compile", see, seconds=seconds)


def command(words: Sequence[str], write: Callable[[Candidate, Path], Path]) -> Check:
    """Return the check that runs a user's command, with exit statuses as in ``git bisect run``.

    The check raises UsageError if a status is over 127, where git bisect stops too.

    Args:
        words: The command; ``{}`` stands for the candidate's file, which otherwise comes last.
        write: Writes a candidate into a folder, and returns the file to pass to the command.
    """

    def see(candidate: Candidate, run: RunCandidate) -> Symptom | None:
        with tempfile.TemporaryDirectory() as folder:
            file = str(write(candidate, Path(folder)))
            named = [word.replace("{}", file) for word in words]
            if not any("{}" in word for word in words):
                named.append(file)
            try:
                process = subprocess.run(named, capture_output=True, check=False)
            except OSError as error:
                raise UsageError(f"cannot run {named[0]}: {error.strerror}") from error
        status = process.returncode
        if status == _SKIP:
            raise UnjudgedError(
                UsageError(
                    f"the command cannot tell whether the program fails: it ended with {_SKIP}",
                    hint="use 0 if the failure does not occur, 1 if it does",
                )
            )
        if not 0 <= status <= _MOST_STATUS:
            last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise UsageError(
                f"the command ended with status {status}: {' '.join(last)}",
                hint="use 0 if the failure does not occur, 1 to 127 if it does, 125 if it "
                "cannot be determined; any other status ends the search, as in `git bisect "
                "run`",
            )
        return Symptom(f"{named[0]} says so") if status else None

    return Check("command", see)


Answer = Literal["fails", "passes", "fails otherwise", "cannot be told"]


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long to look."""

    repeat: int = 1  # how often to look at a candidate at most
    needed: int = 1  # in how many of the looks the failure must show
    # Seconds after which no further candidate is looked at; None for no limit.
    budget: float | None = None
    jobs: int = 2  # how many candidates to look at simultaneously


class Judge:
    """Decides whether candidates fail.

    Args:
        check: What to look for.
        run: How candidates are run.
        patience: How long to look.

    Attributes:
        symptom: What the failure looks like; None until `look_first` has seen it.
        obstacle: Why it could not be determined whether a candidate fails; None if it always
            could.
        asked: How many different candidates were looked at.
        passing: The candidates that pass and were made from the last program that fails.
    """

    def __init__(self, check: Check, run: RunCandidate, patience: Patience) -> None:
        self.check = check
        self.run = run
        self.patience = patience
        self.symptom: Symptom | None = None
        self.obstacle: SnaprtError | None = None
        self.asked = 0
        self.passing: list[Candidate] = []
        self._answers: dict[str, Answer] = {}
        self._started = time.perf_counter()
        self._pool = concurrent.futures.ThreadPoolExecutor(patience.jobs)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def seconds(self) -> float:
        """Return the time since the judge was created."""
        return time.perf_counter() - self._started

    @property
    def is_out_of_time(self) -> bool:
        """Return whether the budget is spent."""
        return self.patience.budget is not None and self.seconds > self.patience.budget

    def look_first(self, candidate: Candidate) -> Symptom | None:
        """Look at a program without knowing what its failure looks like.

        Returns:
            The most frequent symptom; None if fewer looks than needed showed a failure.
        """
        looks = [self._look(candidate) for _ in range(self.patience.repeat)]
        symptoms = [look for look in looks if isinstance(look, Symptom)]
        if len(symptoms) < self.patience.needed:
            return None
        return max(symptoms, key=symptoms.count)

    def adopt(self, symptom: Symptom) -> None:
        """Look for this failure from now on."""
        self.symptom = symptom
        self._answers.clear()

    def first(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """Return the first candidate that still fails; several are judged at the same time.

        Raises:
            BudgetSpentError: The time ran out before such a candidate was found.
        """
        self._check_budget()
        source = iter(candidates)
        waiting = [
            (candidate, self._start(candidate))
            for candidate in itertools.islice(source, self.patience.jobs)
        ]
        try:
            while waiting:
                candidate, future = waiting.pop(0)
                answer = future.result()
                if answer == "fails":
                    self.passing.clear()
                    return candidate
                if answer == "passes":
                    self.passing.append(candidate)
                self._check_budget()
                waiting += [
                    (following, self._start(following)) for following in itertools.islice(source, 1)
                ]
        finally:
            for _, future in waiting:
                future.cancel()
        return None

    def _check_budget(self) -> None:
        if self.is_out_of_time:
            raise BudgetSpentError

    def _start(self, candidate: Candidate) -> concurrent.futures.Future[Answer]:
        return self._pool.submit(self.answer, candidate)

    def answer(self, candidate: Candidate) -> Answer:
        """Return whether a candidate fails, judging it at most once."""
        answer = self._answers.get(candidate.key)
        if answer is None:
            self.asked += 1
            answer = self._answers[candidate.key] = self._judge(candidate)
        return answer

    def _judge(self, candidate: Candidate) -> Answer:
        assert self.symptom is not None
        try:
            for module in candidate.modules:
                hlo_module.verify(module)
        except SnaprtError:
            return "cannot be told"
        left, needed = self.patience.repeat, self.patience.needed
        answer: Answer = "cannot be told"
        while needed <= left:
            left -= 1
            look = self._look(candidate)
            if isinstance(look, Symptom) and self.check.persists(self.symptom, look):
                needed -= 1
                if not needed:
                    return "fails"
            else:
                answer = "fails otherwise" if isinstance(look, Symptom) else look
        return answer

    def _look(self, candidate: Candidate) -> Symptom | Literal["passes", "cannot be told"]:
        try:
            return self.check.see(candidate, self.run) or "passes"
        except UnjudgedError as error:
            self.obstacle = error.obstacle
            return "cannot be told"
