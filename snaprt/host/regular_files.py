"""Opens files to read, but no pipes and no devices, where reading may never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: str | Path) -> BinaryIO:
    """Open a file to read its bytes; refuse a pipe or a device.

    Raises:
        OSError: There is none, or it cannot be read.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.ESPIPE, "it is a pipe or a device; save what it holds as a file")
    return open(path, "rb")


def read_file(path: str | Path, most: int = -1) -> bytes:
    """Return the bytes of a file.

    Args:
        path: The file.
        most: How many bytes it may have, if there is a limit.

    Raises:
        OSError: As `open_file`, or it has more.
    """
    with open_file(path) as file:
        content = file.read(most + 1 if most >= 0 else -1)
    if 0 <= most < len(content):
        raise OSError(errno.EFBIG, "it is too large")
    return content
