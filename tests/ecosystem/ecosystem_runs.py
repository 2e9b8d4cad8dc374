"""Runs other libraries' kind of programs plainly and under snaprt, and compares what they print.

A program is one file of ``programs/``, or any other program or notebook: what it prints is its
result. Whatever it imports has to be installed, or it is skipped.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import notebook_cells

PROGRAMS = {path.stem: path for path in sorted((Path(__file__).parent / "programs").glob("*.py"))}

#: What two correct executions of one program may differ by, once it has trained a few steps.
RELATIVE, ABSOLUTE = 5e-3, 2e-3

#: How long a program may run, in seconds.
LONGEST = 300

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_NUMBER = re.compile(r"-?\d+\.\d*(?:e[-+]?\d+)?|-?\d+(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Mode:
    """A way to run a program.

    Attributes:
        options: What stands before the program; ``None`` means without snaprt.
        environment: What is set for it.
        rounds: Whether its floating point results may differ in their last bits.
    """

    options: Sequence[str] | None
    environment: Mapping[str, str] = field(default_factory=dict)
    rounds: bool = False


_CACHE = {"SNAPRT_JAX_CACHE": "1"}
PLAIN = Mode(None)

#: In this order: what one leaves in the cache, the next may find.
MODES = {
    "plain": PLAIN,
    "lazy": Mode(("--lazy",), rounds=True),
    "lazy, warm": Mode(("--lazy",), rounds=True),
    "record": Mode(("--record",)),
    "when nan": Mode(("--record", "--when", "nan")),
    "keep last": Mode(("--keep-last", "2")),
    "cache, cold": Mode((), _CACHE),
    "cache, warm": Mode((), _CACHE),
}

#: The same in half as many processes: recorder and cache have nothing to do with each other.
FEW_MODES = {
    "plain": PLAIN,
    "lazy": MODES["lazy"],
    "record; cache, cold": Mode(("--record",), _CACHE),
    "when nan, keep last; cache, warm": Mode(("--when", "nan", "--keep-last", "2"), _CACHE),
}

#: What is known to differ, by program and mode, and why.
DIFFERS: Mapping[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Ran:
    """What a program did: its exit status, what it printed, and the seconds it took."""

    status: int
    output: str
    errors: str
    seconds: float


def missing_libraries(program: Path) -> list[str]:
    """Return the modules that a program imports at its top and that are not installed."""
    if program.suffix in notebook_cells.SUFFIXES:
        return []  # its cells say so, and go on
    found: set[str] = set()
    for node in ast.parse(program.read_text()).body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return sorted(name for name in found if importlib.util.find_spec(name.split(".")[0]) is None)


def run(program: Path, mode: Mode, folder: Path) -> Ran:
    """Run a program in a process of its own.

    Args:
        program: Its file.
        mode: How.
        folder: Where its caches and snapshots go; runs that share it share them.

    Returns:
        What it did; if it was ended after `LONGEST`, with the status of ``timeout``.
    """
    (folder / "dump").mkdir(exist_ok=True)
    command = [sys.executable]
    if mode.options is not None:
        command += ["-m", "snaprt", "run", *mode.options]
    command += [notebook_cells.__file__] if program.suffix in notebook_cells.SUFFIXES else []
    environment = {
        **os.environ,
        "SNAPRT_CACHE_DIR": str(folder / "cache"),
        "SNAPRT_DUMP_DIR": str(folder / "dump"),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
        **mode.environment,
    }
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, str(program)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ran(124, "", f"it did not end in {LONGEST} s", LONGEST)
    seconds = time.perf_counter() - started
    return Ran(done.returncode, _ADDRESS.sub("0x", done.stdout), done.stderr, seconds)


def difference(plain: Ran, other: Ran, mode: Mode) -> str | None:
    """Return how a run differs from the plain one, or ``None``.

    Args:
        plain: What the program does without snaprt.
        other: What it did.
        mode: How it ran; where that rounds, numbers may differ a little, all else may not.
    """
    if plain.status != other.status:
        return f"status {other.status} instead of {plain.status}\n{other.errors[-4000:]}"
    if plain.output == other.output:
        return None
    if mode.rounds and _equal_within_rounding(plain.output, other.output):
        return None
    printed = [ran.output.splitlines() for ran in (plain, other)]
    lines = difflib.unified_diff(*printed, "without snaprt", "with it", lineterm="", n=1)
    return "\n".join(["prints something else", *lines, other.errors[-2000:]])


def _equal_within_rounding(plain: str, other: str) -> bool:
    expected, numbers = _NUMBER.findall(plain), _NUMBER.findall(other)
    return (
        _words(plain) == _words(other)
        and len(expected) == len(numbers)
        and all(map(_is_near, expected, numbers))
    )


def _words(text: str) -> list[str]:
    return _NUMBER.sub("#", text).split()  # without the spaces, which line numbers up


def _is_near(expected: str, number: str) -> bool:
    if "." not in expected:
        return expected == number  # a count
    return abs(float(expected) - float(number)) <= ABSOLUTE + RELATIVE * abs(float(expected))
