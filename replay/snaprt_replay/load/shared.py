"""What was packed and redacted to be shared, as a case; it must not know how files are laid out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from snaprt.errors import SnapshotError
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.share.executions import executions_in
from snaprt_replay.load.case import Case


def only_execution(pack: Path) -> Path:
    """Return the snapshot in a packed file that holds those of one execution.

    Raises:
        SnapshotError: It is damaged, or holds several executions, or none.
    """
    found = executions_in(pack)
    if len(found) == 1:
        return found[0]
    if not found:
        raise SnapshotError(
            f"{pack} holds no snapshot that can be read",
            hint="it is damaged; get it again from where it was made",
        )
    raise SnapshotError(
        f"{pack} holds {len(found)} executions",
        hint=f"name one of them, as in {found[0]}",
    )


def as_redacted(case: Case) -> Case:
    """Return a case that says what was taken out of its file, without outputs that mean nothing."""
    manifest = open_snapshot(case.path).manifest
    redacted = manifest.execution.redacted
    if not redacted:
        return case
    notes = [f"redacted before it was shared: {', '.join(redacted)}"]
    if "values" not in redacted:
        return dataclasses.replace(case, notes=(*case.notes, *notes))
    notes.append(
        "the inputs are drawn from a seed, with the statistics of the recorded ones: there are "
        "no recorded outputs to compare with"
    )
    return dataclasses.replace(case, outputs=None, output_parts=(), notes=(*case.notes, *notes))
