"""What counts as the failure, and as still the same one; it must not know how programs shrink.

A check looks at a candidate and says what it sees as a `Signature`: the class of the failure, its
size, its message. What is seen in a smaller program must fit what was seen in the first one, or
the search would slip from the bug that was asked for to another.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np

from snaprt.errors import UsageError
from snaprt_replay import floatbits
from snaprt_replay.localize.measure import error_between
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.run.workers import Outcome

CheckName = Literal["mismatch", "nan", "crash", "slow-compile", "command"]

# A program of which a part is left, or a corner of an array, has not the same error as the whole;
# but one that has less than this share of it shows rounding, not the bug.
_KEPT_SHARE: Final = 0.03
_LARGE_ERROR: Final = 1e4
_SKIP: Final = 125
_MOST_STATUS: Final = 127


@dataclasses.dataclass(frozen=True)
class Signature:
    """What was seen of a failure.

    Args:
        what: Its class, ``finite error`` or ``compile crash``.
        error: The largest error, in multiples of the default tolerance; 0 where there is none. Not
            NaN: equal failures must compare equal.
        message: What XLA said, without what changes from run to run.
    """

    what: str
    error: float = 0.0
    message: str = ""

    def __str__(self) -> str:
        told = [self.what]
        if 0 < self.error < math.inf:
            told.append(f"{self.error:.3g} times the tolerance")
        if self.message:
            told.append(self.message)
        return ", ".join(told)


class UnjudgedError(Exception):
    """A candidate of which it cannot be told whether it fails. It never leaves this package."""


class Run(Protocol):
    """Start a candidate on one side."""

    def __call__(self, candidate: Candidate, side: int) -> Future[Outcome]:
        """Return the outcome to come of side 0, the suspect, or 1, the reference."""
        ...


class Check(Protocol):
    """One kind of failure."""

    @property
    def name(self) -> CheckName:
        """Return what the user calls it."""
        ...

    def see(self, candidate: Candidate, run: Run) -> Signature | None:
        """Look once; return None if the candidate does not fail.

        Raises:
            UnjudgedError: It cannot be told.
        """
        ...

    def persists(self, first: Signature, seen: Signature) -> bool:
        """Return whether what is seen is still the first failure."""
        ...


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The suspect's outputs are not those of the reference side, or not the expected ones."""

    name: CheckName = "mismatch"

    def see(self, candidate: Candidate, run: Run) -> Signature | None:
        """See `Check`."""
        running = [run(candidate, 0)]
        if candidate.expected is None:
            running.append(run(candidate, 1))
        got, *rest = [one.result() for one in running]
        right = rest[0].outputs if rest else candidate.expected
        if right is None or got.outputs is None or len(right) != len(got.outputs):
            raise UnjudgedError
        pairs = zip(right, got.outputs, strict=True)
        error = max((error_between(one, other) for one, other in pairs), default=0.0)
        if error <= 1.0:
            return None
        misplaced = "a NaN or an infinity where none belongs, or none where one does"
        return Signature(misplaced if math.isinf(error) else "wrong values", error)

    def persists(self, first: Signature, seen: Signature) -> bool:
        """See `Check`."""
        least = min(first.error, _LARGE_ERROR) * _KEPT_SHARE
        return seen.what == first.what and seen.error >= least


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """A NaN, or an infinity, comes out where none goes in."""

    name: CheckName = "nan"

    def see(self, candidate: Candidate, run: Run) -> Signature | None:
        """See `Check`."""
        outputs = run(candidate, 0).result().outputs
        if outputs is None:
            raise UnjudgedError
        for what, has in _NON_FINITE.items():
            if any(map(has, outputs)) and not any(map(has, candidate.inputs)):
                return Signature(what)
        return None

    def persists(self, first: Signature, seen: Signature) -> bool:
        """See `Check`."""
        return seen.what == first.what


def _has(test: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> bool:
    floating = floatbits.is_float(array.dtype) or floatbits.is_complex(array.dtype)
    return floating and bool(test(array).any())


_NON_FINITE: Final[Mapping[str, Callable[[np.ndarray], bool]]] = {
    "NaN": lambda array: _has(np.isnan, array),
    "an infinity": lambda array: _has(np.isinf, array),
}


@dataclasses.dataclass(frozen=True)
class Crash:
    """The suspect gives no outputs: it crashes, is refused, fails, hangs, or has no memory."""

    name: CheckName = "crash"

    def see(self, candidate: Candidate, run: Run) -> Signature | None:
        """See `Check`."""
        failure = run(candidate, 0).result().failure
        return None if failure is None else Signature(failure.kind, message=failure.signature)

    def persists(self, first: Signature, seen: Signature) -> bool:
        """See `Check`."""
        return (seen.what, seen.message) == (first.what, first.message)


@dataclasses.dataclass(frozen=True)
class SlowCompile:
    """Compiling takes longer than it may.

    Args:
        seconds: How long it may take.
    """

    seconds: float
    name: CheckName = "slow-compile"

    def see(self, candidate: Candidate, run: Run) -> Signature | None:
        """See `Check`."""
        outcome = run(candidate, 0).result()
        timed_out = outcome.failure is not None and outcome.failure.signature == "compile timeout"
        if outcome.failure is not None and not timed_out:
            raise UnjudgedError
        slow = timed_out or outcome.compile_seconds > self.seconds
        return Signature(f"compiling takes over {self.seconds:.3g} s") if slow else None

    def persists(self, first: Signature, seen: Signature) -> bool:
        """See `Check`."""
        return seen.what == first.what


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the user's says so, with an exit status as in ``git bisect run``.

    Args:
        words: What to run; ``{}`` stands for the candidate's file, which else comes last.
        write: Writes a candidate into a folder, and returns the file that the command is given.
    """

    words: Sequence[str]
    write: Callable[[Candidate, Path], Path]
    name: CheckName = "command"

    def see(self, candidate: Candidate, run: Run) -> Signature | None:
        """See `Check`.

        Raises:
            UsageError: The command ended with a status over 127: git bisect gives up then too.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = str(self.write(candidate, Path(folder)))
            words = [word.replace("{}", file) for word in self.words]
            if not any("{}" in word for word in self.words):
                words.append(file)
            try:
                done = subprocess.run(words, capture_output=True, check=False)
            except OSError as error:
                raise UsageError(f"cannot run {words[0]}: {error.strerror}") from error
        status = done.returncode
        if status == _SKIP:
            raise UnjudgedError
        if not 0 <= status <= _MOST_STATUS:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise UsageError(
                f"the command ended with status {status}: {' '.join(last)}",
                hint="0 says that the failure does not show, 1 to 127 that it does, 125 that it "
                "cannot be told; any other status ends the search, as in `git bisect run`",
            )
        return Signature(f"{words[0]} says so") if status else None

    def persists(self, first: Signature, seen: Signature) -> bool:
        """See `Check`."""
        return seen.what == first.what
