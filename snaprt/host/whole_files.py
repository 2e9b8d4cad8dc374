"""Writes files that appear whole or not at all, and removes what dead processes left half done.

It must not know what is in them. A temporary file's name says which process writes it, so that the
next one on the same machine can tell what a process that was killed has left behind.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from snaprt.errors import SnaprtError, UsageError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file as `whole_file` does.

    Raises:
        OSError: The system refused.
    """
    with whole_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its place when the block ends; if that fails, what was there stays.

    Devices and pipes, such as ``/dev/null`` and ``/dev/stdout``, are written to: replaced, they
    would be lost. A link stays, and leads to the new file.

    Raises:
        OSError: The system refused.
    """
    if path.parent == Path("/dev") or (path.exists() and not path.is_file()):
        with path.open("ab") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    _remove_leftovers_once(target.parent)
    temporary = target.with_name(temporary_name(target.name))
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@functools.cache
def _remove_leftovers_once(folder: Path) -> None:
    """Remove what killed processes left in a folder, which may be large, but not at each file."""
    remove_leftovers(folder)


#: Bytes of a name that leave room for what a temporary one adds: a file system takes 255.
_LONGEST: Final = 200


def temporary_name(name: str) -> str:
    """Return the name under which this thread writes a file that will be called ``name``."""
    encoded = os.fsencode(name)
    if len(encoded) > _LONGEST:
        name = f"{zlib.crc32(encoded):08x}"
    return f".{name}.{threading.get_ident():x}.{_process_mark()}-{os.getpid()}.tmp"


def from_root(path: Path) -> Path:
    """Return a path that stays the same wherever the program goes.

    Where the working directory was removed it is left as it is: whoever writes there says so.
    """
    try:
        return path.absolute()
    except FileNotFoundError:
        return path


def named_path(path: str | Path) -> Path:
    """Return a path as a user names it, from the root; an unknown user's ``~name`` is a name."""
    return from_root(Path(os.path.expanduser(path)))


@contextlib.contextmanager
def temporary_folder(beside: Path, name: str) -> Iterator[Path]:
    """Make a folder that is removed in the end, or by the next one where this process is killed."""
    folder = beside / temporary_name(name)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ring_name(run: str) -> str:
    """Return the name of the folder in which a process's flight recorder keeps what is too much."""
    return f"ring-{run}.{_process_mark()}-{os.getpid()}"


def remove_leftovers(folder: Path) -> int:
    """Remove temporary files and folders of processes on this machine that ended too early for it.

    Returns:
        How many were removed. A folder that cannot be read has none.
    """
    removed = 0
    ours = re.compile(rf"(?:\..*|ring-\w+)\.{_process_mark()}-(\d+)(?:\.tmp)?")
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(OSError):
        entries = list(os.scandir(folder))
    for entry in entries:
        match = ours.fullmatch(entry.name)
        if match and not _is_alive(int(match[1])):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
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
    return f"{zlib.crc32(f'{platform.node()} {namespace}'.encode()):08x}"


_SPACE: Final = "free some space"
_PERMISSIONS: Final = "change the permissions"
#: Where nothing but another place helps, as on a read-only file system, there is no row.
REMEDIES: Final[Mapping[int | None, str]] = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: f"{_SPACE} or raise the disk quota",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def remedy(error: OSError, elsewhere: str) -> str:
    """Return a hint for a file that could not be written, in lower case and without a period.

    Args:
        error: How the system refused.
        elsewhere: How to name another place, such as ``use another folder``.
    """
    advice = REMEDIES.get(error.errno)
    return elsewhere if advice is None else f"{advice}, or {elsewhere}"


def remedy_sentence(error: OSError, elsewhere: str) -> str:
    """Return the hint of `remedy` as a sentence."""
    hint = remedy(error, elsewhere)
    return f"{hint[:1].upper()}{hint[1:]}."


def refused(variable: str, path: str | Path, error: OSError, kind: str) -> str:
    """Return what is said where the file or folder that a variable names cannot be written.

    Args:
        variable: The variable.
        path: What it names.
        error: How the system refused.
        kind: What to set it to another one of: ``file`` or ``folder``.
    """
    advice = remedy_sentence(error, f"set {variable} to another {kind}")
    return f"{variable}: cannot write to {path}: {error.strerror or error}. {advice}"


NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
TOO_LARGE: Final = (*NO_SPACE, errno.EFBIG)


@contextlib.contextmanager
def going_on_without_room(tell: Callable[[OSError], object]) -> Iterator[None]:
    """Tell of a disk that is full, which ends no program: what names the file is not wrong."""
    try:
        yield
    except OSError as error:
        if error.errno not in TOO_LARGE:
            raise
        tell(error)


def refuse_device(out: Path, elsewhere: str = "name a file in an existing directory") -> None:
    """Refuse a pipe or a device, which a file would replace, or which takes none of its kind.

    Raises:
        UsageError: ``out`` is one.
    """
    if os.path.exists(out) and not os.path.isfile(out) and not os.path.isdir(out):
        raise UsageError(f"cannot write {out}: it is a pipe or a device", hint=elsewhere)


@contextlib.contextmanager
def writing(
    what: str,
    elsewhere: str = "name a file in an existing directory",
    *,
    kind: type[SnaprtError] = UsageError,
    hint: Callable[[OSError, str], str] = remedy_sentence,
) -> Iterator[None]:
    """Make an error of ours where the system refuses what is done inside.

    Args:
        what: What is done, such as ``save outputs to FILE``.
        elsewhere: How to name another place, see `remedy`.
        kind: The error.
        hint: Makes its hint: `remedy` or `remedy_sentence`.
    """
    try:
        yield
    except OSError as error:
        raise kind(
            f"cannot {what}: {error.strerror or error}", hint=hint(error, elsewhere)
        ) from error
