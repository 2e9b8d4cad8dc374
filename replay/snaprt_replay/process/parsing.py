"""Check in a process of its own whether a module can be read: reading may end the process."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from pathlib import Path

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt_replay.process.child import run_child

# A sound module of any size is read in seconds; damaged bytecode can send MLIR round in circles.
_PARSE_SECONDS = 60


def check_parses(path: Path) -> None:
    """Raise SnapshotError if reading the module in a file ends the process that does it, or hangs.

    MLIR answers some damaged bytecode so; what it answers with an error is not looked at here.
    """
    hint = "get the file again from where it was made"
    try:
        child = run_child("parse", path, _PARSE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise SnapshotError(
            f"{path} seems damaged: it could not be read in {_PARSE_SECONDS} seconds", hint=hint
        ) from error
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise SnapshotError(f"{path} is damaged: reading it ended the process ({name})", hint=hint)


def can_parse(module: bytes) -> bool:
    """Return whether a module can be read here; MLIR prints why not, which nobody is to see."""
    with tempfile.NamedTemporaryFile(prefix="snaprt-replay-") as file:
        file.write(module)
        file.flush()
        return run_child("parse", Path(file.name)).returncode == 0


def serve(path: str) -> None:
    """Read the module in a file; the child's part of the above."""
    jaxapi.parse_module(Path(path).read_bytes())
