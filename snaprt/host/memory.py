"""How much memory this process can still get: of the machine, and of its container.

Source: the kernel's Documentation/filesystems/proc.rst, admin-guide/cgroup-v2.rst (memory.max) and
admin-guide/cgroup-v1/memory.rst.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class _Controller:
    """Where a version of control groups says what a group may use and what it uses."""

    line: re.Pattern[str]  # of /proc/self/cgroup: which group this process is in
    mount: str
    limit: str
    usage: str
    freed: str  # of memory.stat: what of the usage is given back where memory is short


_CONTROLLERS: Final = (
    _Controller(
        re.compile(r"^0::/(.*)$", re.MULTILINE),
        "sys/fs/cgroup",
        "memory.max",
        "memory.current",
        "inactive_file",
    ),
    _Controller(
        re.compile(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$", re.MULTILINE),
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes of memory are free, or can be freed; 0 where nothing says so.

    Args:
        root: The folder that holds ``proc`` and ``sys``.
    """
    of_machine = _number(_text(root / "proc/meminfo"), r"^MemAvailable:\s+(\d+) kB$")
    if of_machine is None:
        return 0
    return max(0, min([1024 * of_machine, *_left_to_groups(root)]))


def _left_to_groups(root: Path) -> Iterator[int]:
    """Yield what is left to each group with a limit that this process is in."""
    groups = _text(root / "proc/self/cgroup")
    for controller in _CONTROLLERS:
        found = controller.line.search(groups)
        mount = root / controller.mount
        # A container may see its own group at the mount, whatever the path says.
        folder = mount / found[1] if found else mount
        while folder.is_relative_to(mount):
            limit = _number(_text(folder / controller.limit), r"^(\d+)$")
            usage = _number(_text(folder / controller.usage), r"^(\d+)$")
            if limit is not None and usage is not None:
                statistics = _text(folder / "memory.stat")
                yield limit - usage + (_number(statistics, rf"^{controller.freed} (\d+)$") or 0)
            folder = folder.parent


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _number(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else None
