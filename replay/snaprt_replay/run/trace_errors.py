"""Replay an error that was raised while a graph was recorded; nothing is compiled or run for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.format.schema import TraceErrorRecord
from snaprt.snapshot.format.trace_errors import RaisedAgain, operation_text, raise_again
from snaprt.snapshot.share.executions import only_execution
from snaprt_replay.load import sniff
from snaprt_replay.load.snapshots import recorded_environment
from snaprt_replay.run import devices


@dataclasses.dataclass(frozen=True, eq=False)
class TraceErrorReplay:
    """An error while a graph was recorded, raised again.

    Args:
        path: The file.
        name: The graph's name.
        recorded: What the file says of the error.
        raised: What evaluating the failed operation gave here.
        warnings: What was otherwise when the file was recorded, in sentences.
    """

    path: Path
    name: str
    recorded: TraceErrorRecord
    raised: RaisedAgain
    warnings: tuple[str, ...]

    @property
    def reproduces(self) -> bool:
        """Return whether the same operation raised the same error, word for word."""
        recorded, raised = self.recorded, self.raised
        return (raised.kind, raised.message) == (recorded.kind, recorded.message)

    @property
    def operation(self) -> str:
        """Return the operation that failed as one line, empty where none did."""
        return operation_text(self.recorded)

    @property
    def summary(self) -> str:
        """Return one sentence for a person."""
        raised = self.raised
        if self.reproduces:
            return "the same operation raises the same error"
        if raised.obstacle:
            return raised.obstacle
        if raised.kind:
            return f"the operation raises another error, {raised.kind}: {raised.message}"
        what = self.recorded.primitive or self.recorded.function
        return f"{what} raises no error with these operands and parameters"


def replay_trace_error(path: Path) -> TraceErrorReplay | None:
    """Raise the error in a snapshot again; None where the file is of another kind.

    Raises:
        SnapshotError: The file cannot be read.
    """
    form = sniff.sniff(path)
    if form not in (sniff.SNAPSHOT, sniff.PACK):
        return None
    file = open_snapshot(only_execution(path) if form == sniff.PACK else path)
    recorded = file.manifest.trace_error
    if recorded is None:
        return None
    here = devices.environment(devices.find_device(None))
    told = {name: value for name, value in recorded_environment(file).items() if name in _TELLING}
    return TraceErrorReplay(
        path=path,
        name=file.manifest.execution.name,
        recorded=recorded,
        raised=raise_again(recorded),
        warnings=devices.differences(told, here),
    )


_TELLING = ("jax", "jaxlib", "snaprt")
"""What may change what an operation accepts; it never reaches a device or a compiler."""
