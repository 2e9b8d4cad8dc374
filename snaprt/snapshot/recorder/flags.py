"""Settles with XLA who acts on which flag of XLA_FLAGS.

XLA parses the variable once, at the first use of a compiler or a device, and ends the process on a
flag it does not know. snaprt acts on ``--xla_dump_hlo_snapshots`` itself, so XLA must not see it.
"""

from __future__ import annotations

import difflib
import mmap
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snaprt import jaxapi, settings
from snaprt.errors import UsageError
from snaprt.host.whole_files import from_root
from snaprt.variables import parse_flags

SNAPSHOTS_FLAG = "xla_dump_hlo_snapshots"
FOLDER_FLAG = "xla_dump_to"

_SWITCH = {"": True, "true": True, "1": True, "false": False, "0": False}
"""Text after a flag of XLA's that is on or off, to its value."""

_NOT_FOLDERS = ("-", "sponge", "test_undeclared_outputs_dir")
"""Values of --xla_dump_to that XLA takes for something else than a directory."""

_SWITCH_TEXT = re.compile("|true|false|0|1")
_CERTAIN = {
    FOLDER_FLAG: re.compile(".*", re.DOTALL),
    SNAPSHOTS_FLAG: _SWITCH_TEXT,
    "xla_dump_hlo_as_text": _SWITCH_TEXT,
    "xla_force_host_platform_device_count": re.compile("[0-9]{1,6}"),
}
"""Flags and values that every XLA takes, so that none has to be asked."""

_PROBE_SECONDS = 30


def dump_folder_of(variable: str) -> Path | None:
    """Return the directory into which XLA_FLAGS asks to record; None where it does not ask.

    Raises:
        UsageError: It asks, but does not name a directory, or gives the switch another value.
    """
    values = {flag.name: flag.value for flag in parse_flags(variable)}  # the last one counts
    if SNAPSHOTS_FLAG not in values:
        return None
    switch = _SWITCH.get((values[SNAPSHOTS_FLAG] or "").lower())
    if switch is None:
        raise UsageError(
            f"XLA_FLAGS has --{SNAPSHOTS_FLAG}={values[SNAPSHOTS_FLAG]}",
            hint="use true, false, 1, 0, or no value",
        )
    if not switch:
        return None
    folder = values.get(FOLDER_FLAG)
    if not folder:
        raise UsageError(
            f"XLA_FLAGS has --{SNAPSHOTS_FLAG} but no directory to record into",
            hint=f"add --{FOLDER_FLAG}=DIR to XLA_FLAGS",
        )
    if folder in _NOT_FOLDERS:
        raise UsageError(
            f"XLA_FLAGS has --{FOLDER_FLAG}={folder}, which is not a directory",
            hint=f"snapshots are files: name a directory, as in --{FOLDER_FLAG}=dump",
        )
    return from_root(Path(folder))


def folder_of(variable: str) -> Path | None:
    """Return the directory that ``--xla_dump_to`` names in XLA_FLAGS, whatever is dumped there."""
    folder = {flag.name: flag.value for flag in parse_flags(variable)}.get(FOLDER_FLAG)
    return from_root(Path(folder)) if folder and folder not in _NOT_FOLDERS else None


def without_ours(variable: str) -> str:
    """Return XLA_FLAGS without what snaprt acts on in XLA's place.

    ``--xla_dump_to`` goes too where no other ``--xla_dump_`` flag is left: alone it would make XLA
    write every module as text, which the snapshot flag beside it had kept it from.
    """
    flags = parse_flags(variable)
    if not any(flag.name == SNAPSHOTS_FLAG for flag in flags):
        return variable
    rest = [flag for flag in flags if flag.name != SNAPSHOTS_FLAG]
    if not any(flag.name.startswith("xla_dump_") and flag.name != FOLDER_FLAG for flag in rest):
        rest = [flag for flag in rest if flag.name != FOLDER_FLAG]
    return " ".join(flag.text for flag in rest)


def check_flags(variable: str) -> None:
    """Find out whether XLA would end the process over these flags, before it does.

    Where the flags are not ones that every XLA takes, XLA itself is asked, in a process of its own
    (0.1 s); if that cannot be done, nothing is said.

    Raises:
        UsageError: A flag that this XLA does not know, or a value that it cannot read.
    """
    flags = parse_flags(variable)
    if all(flag.name in _CERTAIN and _CERTAIN[flag.name].fullmatch(flag.value or "")
           for flag in flags):  # fmt: skip
        return
    complaint = _ask_xla(variable)
    unread = re.search(r"Couldn't interpret value (.*) for flag (\w+)", complaint)
    if unread:
        raise UsageError(
            f"XLA cannot read the value {unread[1]!r} of the flag --{unread[2]} in XLA_FLAGS",
            hint=f"XLA would end the process because of it; correct --{unread[2]} in XLA_FLAGS",
        )
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", complaint)
    if not unknown:
        return
    names = [word.lstrip("-").partition("=")[0] for word in unknown[1].split()]
    close = difflib.get_close_matches(names[0], _names_in_xla(), n=1, cutoff=0.85)
    raise UsageError(
        f"XLA does not know --{', --'.join(names)} in XLA_FLAGS",
        hint=(f"did you mean --{close[0]}? " if close else "")
        + "XLA would end the process because of it; remove it from XLA_FLAGS",
    )


def _ask_xla(variable: str) -> str:
    """Let XLA parse the flags in another process; return what it complains of, if it does."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from jaxlib import xla_client\nxla_client.CompileOptions()"
    )
    try:
        process = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "XLA_FLAGS": variable},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stderr.decode(errors="replace") if process.returncode else ""


def _names_in_xla() -> set[str]:
    """Return what looks like a flag's name in XLA's binary; for suggestions alone."""
    names: set[bytes] = set()
    for library in jaxapi.xla_binaries():
        with open(library, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            names.update(re.findall(rb"xla_[a-z0-9_]{3,80}", content))
    return {name.decode() for name in names}


_lock = threading.Lock()
_checked = ""  # the XLA_FLAGS that were found good last


def take_over() -> None:
    """Let XLA parse its flags, if it has not yet, without those on which snaprt acts in its place.

    To be called before each first use of a compiler or a device; costs a few microseconds once
    XLA has parsed. ``os.environ`` and so child processes keep the flags as the user wrote them.

    Raises:
        UsageError: XLA would end the process over a flag, or the flags ask to record but say not
            where.
    """
    global _checked
    variable = os.environ.get("XLA_FLAGS", "")
    if variable == _checked or jaxapi.backends_are_initialized():
        return
    with _lock:
        if variable == _checked:
            return
        if settings.get("SNAPRT_DUMP_DIR") is None:
            dump_folder_of(variable)
        for_xla = without_ours(variable)
        check_flags(for_xla)
        if for_xla != variable:
            with _environment("XLA_FLAGS", for_xla):
                jaxapi.dump_options_of_xla()
        _checked = variable


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ[name]
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ[name] = before


def compiler_overrides() -> dict[str, bool | str]:
    """Return the compiler options that keep XLA from writing snapshots of its own.

    Empty unless XLA had parsed the snapshot flag before snaprt could take it over, as when a
    script used a device before it imported snaprt. To be called after ``take_over``: if XLA has not
    parsed its flags yet, this makes it do so.
    """
    options = jaxapi.dump_options_of_xla()
    if not options[SNAPSHOTS_FLAG]:
        return {}
    overrides: dict[str, bool | str] = {SNAPSHOTS_FLAG: False}
    flags = {name for name, value in options.items() if value}
    if flags <= {SNAPSHOTS_FLAG, FOLDER_FLAG, "xla_dump_hlo_as_long_text"}:  # the last: by default
        overrides[FOLDER_FLAG] = ""  # as in `without_ours`
    return overrides
