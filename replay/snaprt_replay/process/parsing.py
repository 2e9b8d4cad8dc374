"""Check in a process of its own whether a module can be read: reading may end the process."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt_replay.process.child import child_environment

# A sound module of any size is read in seconds; damaged bytecode can send MLIR round in circles.
# These are of processor time, as a busy machine is no damage; _WAITED times as long is waited.
_PARSE_SECONDS = 20
_WAITED = 6


def check_parses(path: Path) -> None:
    """Raise SnapshotError if reading the module in a file ends the process that does it, or hangs.

    MLIR answers some damaged bytecode so; what it answers with an error is not looked at here.
    """
    hint = "get the file again from its source"
    status = _parse_alone(path)
    if status == -signal.SIGXCPU:
        raise SnapshotError(
            f"{path} seems to be damaged: reading it took longer than {_PARSE_SECONDS} seconds",
            hint=hint,
        )
    if status < 0:
        name = signal.Signals(-status).name
        raise SnapshotError(
            f"{path} is damaged: reading it crashed the process ({name})", hint=hint
        )


def can_parse(module: bytes) -> bool:
    """Return whether a module can be read here; MLIR prints why not, which nobody is to see."""
    with tempfile.NamedTemporaryFile(prefix="snaprt-replay-") as file:
        file.write(module)
        file.flush()
        return _parse_alone(Path(file.name)) == 0


def _parse_alone(path: Path) -> int:
    """Return the status of a process that reads a module: -SIGXCPU if that took too long."""
    script = [
        sys.executable,
        "-P",
        str(jaxapi.PARSE_ALONE),
        str(path),
        str(math.ceil(_PARSE_SECONDS)),
    ]
    try:
        return subprocess.run(
            script,
            capture_output=True,
            env=child_environment(),
            check=False,
            timeout=_PARSE_SECONDS * _WAITED,
        ).returncode
    except subprocess.TimeoutExpired:
        return -signal.SIGXCPU
