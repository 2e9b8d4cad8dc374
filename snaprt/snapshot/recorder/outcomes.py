"""Records executions for how they ended: with an error, with a NaN, late; knows no programs.

Who learns how one ended tells it here, in whatever thread that happens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from snaprt import metrics
from snaprt.snapshot.recorder.conditions import Condition
from snaprt.snapshot.recorder.describe import Cause, error_text
from snaprt.snapshot.recorder.failures import mark_recorded
from snaprt.snapshot.recorder.filing import KEEP_LAST, Filing, names_of
from snaprt.snapshot.recorder.pending import HeldExecution
from snaprt.snapshot.recorder.ring import Ring


class Outcomes:
    """Judges the conditions that had to wait for the end of an execution.

    Args:
        filing: Writes what is recorded.
        ring: What the flight recorder holds; a failure empties it onto the disk.

    Attributes:
        stop_with: Why the program is to be stopped, once a failure asks for that.
    """

    def __init__(self, filing: Filing, ring: Ring) -> None:
        self._filing = filing
        self._ring = ring
        self.stop_with: str | None = None

    def ended(self, held: HeldExecution, error: BaseException | None, nanoseconds: int) -> None:
        """Judge the conditions that had to wait for the end of an execution."""
        try:
            if error is not None:
                self.record_error(held, error)
                return
            for condition in held.watching:
                if condition.trigger == "slower" and nanoseconds > condition.slower:
                    if condition.takes(held.moment.graph_id):
                        took = f"{condition.text} (it took {nanoseconds / 1e6:.3f} ms)"
                        self._record(held, [condition], Cause(took))
                elif condition.trigger == "nan" and held.may_have_infinity_or_nan():
                    judge = functools.partial(self._judge_arrays, held, condition)
                    self._filing.writer.call(judge, sum(array.nbytes for array in held.inputs))
        except Exception as raised:
            self._filing.writer.complain(raised)

    def record_error(self, held: HeldExecution, error: BaseException) -> None:
        """Record an execution that failed, or was the last before the program did."""
        conditions = [
            condition
            for condition in held.watching
            if condition.trigger == "error" and condition.takes(held.moment.graph_id)
        ]
        if conditions or held.plan.keep_last:
            mark_recorded(error)
            self._record_failure(held, conditions, Cause("error", error_text(error)))

    def dump_ring(self, cause: Cause) -> list[Path]:
        """Queue what the ring holds to be written, and return the files that it will become."""
        expected: list[Path] = []
        for held, files in self._ring.take():
            if files is None:
                expected += names_of(held, cause)
            else:
                expected += [held.plan.folder / file.name for file in files]
            self._filing.queue_all(held, files, cause)
        return expected

    def _judge_arrays(self, held: HeldExecution, condition: Condition) -> None:
        """Record an execution whose flag is up, if it was the first to have such a value."""
        if held.has_new_infinity_or_nan():
            metrics.counter_add("SnapshotNaN")
            if condition.takes(held.moment.graph_id):
                self._record_failure(held, [condition], Cause(condition.text))

    def _record_failure(
        self, held: HeldExecution, conditions: Sequence[Condition], cause: Cause
    ) -> None:
        metrics.counter_add("SnapshotFailures")
        if conditions:
            self._record(held, conditions, cause)
        if held.plan.keep_last:
            self.dump_ring(Cause(KEEP_LAST, cause.error))
        if held.plan.stops:
            self.stop_with = (
                f"execution {held.moment.execution} of {held.executable.name}."
                f"{held.executable.graph_id} was recorded for {cause.reason!r} into "
                f"{held.plan.folder}, and the program is to stop then"
            )

    def _record(self, held: HeldExecution, conditions: Sequence[Condition], cause: Cause) -> None:
        """Record an execution that has ended."""
        outputs = [] if held.outputs is None or cause.error else held.outputs
        if self._filing.admits(held, conditions, sum(array.nbytes for array in outputs)):
            self._filing.queue(held, "inputs", conditions, cause)
            if outputs:
                self._filing.queue(held, "outputs", conditions, cause)
