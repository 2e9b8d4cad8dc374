"""Names of temporary files, and what is left of them; it must not know what is in them.

A temporary file's name says which process writes it, so that the next one on the same machine can
tell what a process that was killed has left behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import threading
from pathlib import Path

import blake3


def temporary_name(name: str) -> str:
    """Return the name under which this thread writes a file that will be called ``name``."""
    return f".{name}.{threading.get_ident():x}.{_process_mark()}-{os.getpid()}.tmp"


def remove_leftovers(folder: Path) -> int:
    """Remove the temporary files of processes on this machine that ended without cleaning up.

    Returns:
        How many were removed. A folder that cannot be read has none.
    """
    removed = 0
    ours = re.compile(rf"\..*\.{_process_mark()}-(\d+)\.tmp")
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            found = ours.fullmatch(entry.name)
            if found and not _is_alive(int(found[1])):
                os.unlink(entry.path)
                removed += 1
    return removed


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@functools.cache
def _process_mark() -> str:
    """Return 8 hex digits for the set of processes in which a process number means something."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return blake3.blake3(f"{platform.node()} {namespace}".encode()).hexdigest()[:8]
