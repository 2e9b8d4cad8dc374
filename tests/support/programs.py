"""Programs in processes of their own: the one way in which tests start and run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Final

from forked_programs import ForkedProgram, can_fork

SNAPRT: Final = ("-m", "snaprt")
"""``run_program((*SNAPRT, "ls"), folder)`` runs the command line."""

_IMPORTS_JAX: Final = re.compile(r"\b(import|from) [\w., ]*\bjax\b")

Program = str | Path | tuple[str, ...]
"""Source code, a script, or the words that follow ``python``."""


def start_program(
    program: Program,
    *arguments: object,
    folder: Path | None = None,
    devices: int | None = None,
    without: Collection[str] = (),
    errors: int = subprocess.PIPE,
    fork: bool = True,
    **variables: object,
) -> subprocess.Popen[str]:
    """Start Python on a program, with its output in pipes.

    Args:
        program: Source code (it may be indented), the path of a script, or words for Python.
        arguments: What the program gets in ``sys.argv``.
        folder: The working directory.
        devices: How many CPU devices XLA shows the program.
        without: Environment variables that are taken away.
        errors: Where standard error goes: a pipe of its own, or ``subprocess.STDOUT``.
        fork: Whether source code or a script that imports JAX may find it imported: it is
            forked, see ``forked_programs``.
        variables: Environment variables that are set.
    """
    source = ""
    if isinstance(program, str):
        source = textwrap.dedent(program)
        words = ["-c", source]
    elif isinstance(program, Path):
        source = ((folder or Path()) / program).read_text()
        words = [str(program)]
    else:
        words = list(program)
    environment = {name: text for name, text in os.environ.items() if name not in without}
    if devices is not None:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    environment |= {name: str(value) for name, value in variables.items()}
    fork = fork and bool(_IMPORTS_JAX.search(source)) and can_fork(environment)
    start = ForkedProgram if fork else subprocess.Popen
    return start(
        [sys.executable, *words, *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )


def finish(
    process: subprocess.Popen[str], *, status: int | None = 0, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Wait for a process, and check its exit status where one is expected (None: any)."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert status is None or process.returncode == status, (process.returncode, err or out)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err or "")


def run_program(
    program: Program,
    *arguments: object,
    status: int | None = 0,
    timeout: float = 240,
    folder: Path | None = None,
    devices: int | None = None,
    without: Collection[str] = (),
    fork: bool = True,
    **variables: object,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end: ``start_program`` and ``finish`` in one."""
    process = start_program(
        program,
        *arguments,
        folder=folder,
        devices=devices,
        without=without,
        fork=fork,
        **variables,
    )
    return finish(process, status=status, timeout=timeout)
