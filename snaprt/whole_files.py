"""Writes files that appear whole or not at all; it must not know what is in them."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and leave what was there if that fails.

    Devices and pipes, such as ``/dev/null`` and ``/dev/stdout``, are written to: replaced, they
    would be lost. A link stays, and leads to the new file.

    Raises:
        OSError: The system refused.
    """
    if path.parent == Path("/dev") or (path.exists() and not path.is_file()):
        with path.open("ab") as stream:
            stream.write(content)
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident():x}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
