"""``snaprt triage -- PROGRAM``: runs the program in each mode, and names the first that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import click
from rich.text import Text

from snaprt.cli import output
from snaprt.cli.fitted_table import Column, Columns, FittedTable
from snaprt.cli.run.command import ProgramCommand

OK: Final = "ok"
FAILED: Final = "failed"
TIMEOUT: Final = "timeout"

_STYLES: Final = {OK: "green", FAILED: "bold red", TIMEOUT: "bold red"}
#: So much of the last line that a program printed is shown.
_LONGEST_LINE: Final = 100
_SETTLING_SECONDS: Final = 5.0


@dataclass(frozen=True)
class TriageMode:
    """One way to run the program."""

    name: str  # as the table has it
    options: tuple[str, ...]  # of ``snaprt run``
    blame: str  # what is likely at fault if this is the first mode that fails, and what to do
    # Environment variables that make the mode; XLA_FLAGS are added to those set.
    variables: Mapping[str, str] = field(default_factory=dict)


_BY_OPERATION: Final = {"SYNC_TENSORS_OPBYOP": "1", "GET_TENSORS_OPBYOP": "1"}

#: Each mode adds one thing to the one before it.
MODES: Final[tuple[TriageMode, ...]] = (
    TriageMode(
        "eager",
        ("--no-lazy",),
        "The program fails without the lazy runtime, too: look for the fault in the program or in "
        "JAX. `snaprt run --record --when error` records the execution that fails.",
    ),
    TriageMode(
        "op by op",
        ("--lazy",),
        "Recording is at fault: each operation ran as a separate program. Please report it with "
        "`snaprt bundle`; `snaprt run --no-lazy` avoids it.",
        _BY_OPERATION,
    ),
    TriageMode(
        "lazy, not optimized",
        ("--lazy",),
        "A graph of several operations is at fault, even without XLA's optimizations: "
        "`snaprt run --lazy --when error` records it, and `snaprt minify` makes it small.",
        {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    ),
    TriageMode(
        "lazy",
        ("--lazy",),
        "XLA's optimizations are at fault, or rounding that they change: record the step with "
        "`snaprt run --lazy --dump DIR`, and find the operation with `snaprt localize FILE "
        "--a cpu --b op-by-op`.",
    ),
)


@dataclass(frozen=True)
class TriageRun:
    """What came of a run: ``ok``, ``failed`` or ``timeout``, and the last line it printed."""

    mode: str
    result: str
    status: int | None
    seconds: float
    last_line: str


def run_mode(
    mode: TriageMode,
    program: Sequence[str],
    fails_if: re.Pattern[str] | None,
    timeout: float | None,
) -> TriageRun:
    """Run a program in a process of its own; what it prints is kept, and searched.

    Args:
        mode: How to run it.
        program: The script, or ``-m`` and a module, and its arguments.
        fails_if: The run counts as failed if a line of its output matches.
        timeout: Seconds after which it is ended.
    """
    words = [sys.executable, "-m", "snaprt", "run", *mode.options, "--", *program]
    started = time.perf_counter()
    process = subprocess.Popen(
        words,
        env=_environment(mode),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    is_late = False
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        is_late = True
        process.terminate()
        try:
            text, _ = process.communicate(timeout=_SETTLING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    seconds = time.perf_counter() - started
    lines = [line for line in text.splitlines() if line.strip()]
    failing_line = next(
        (line for line in lines if fails_if is not None and fails_if.search(line)), None
    )
    is_failed = process.returncode != 0 or failing_line is not None
    result = TIMEOUT if is_late else FAILED if is_failed else OK
    last = failing_line or (lines[-1] if lines else "")
    return TriageRun(
        mode.name, result, None if is_late else process.returncode, seconds, last.strip()
    )


def _environment(mode: TriageMode) -> dict[str, str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in _BY_OPERATION
    } | dict(mode.variables)
    if "XLA_FLAGS" in mode.variables:
        before = os.environ.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{before} {mode.variables['XLA_FLAGS']}".strip()
    return environment


def _checked_pattern(
    context: click.Context, option: click.Parameter, text: str | None
) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise click.BadParameter(
            f"{text!r} is not a valid regular expression: {error}", context, option
        ) from error


@click.command("triage", cls=ProgramCommand)
@click.option(
    "--fails-if",
    metavar="REGEX",
    callback=_checked_pattern,
    help="A run also fails if a line that it prints matches, such as 'loss.*nan'.",
)
@click.option(
    "--timeout",
    type=output.LIMIT_OVER_0,
    metavar="SECONDS",
    help="End a run after SECONDS, which then counts as failed.",
)
@output.json_option
@click.pass_context
def command(
    context: click.Context,
    fails_if: re.Pattern[str] | None,
    timeout: float | None,
    as_json: bool,
    program: tuple[str, ...],
) -> None:
    """Run a program in four modes, from eager to lazy, and report the first one that fails.

    The modes are eager, lazy with each operation as a separate program, lazy without XLA's
    optimizations, and lazy. Each runs the whole program in a new process. Each adds one thing to
    the mode before it, so the first one that fails shows what is at fault.

    The exit status is 0 if the program succeeds in all modes, 1 if it fails in any.

    \b
    Example:
      snaprt triage -- train.py --steps 20
      snaprt triage --fails-if "loss.*nan" --timeout 600 -- train.py
    """
    runs = []
    for mode in MODES:
        output.log.print(f"running {mode.name} ...")
        runs.append(run_mode(mode, program, fails_if, timeout))
    first = next((mode for mode, run in zip(MODES, runs, strict=True) if run.result != OK), None)
    if as_json:
        name, blame = ("", "") if first is None else (first.name, first.blame)
        output.emit_json("snaprt.triage", {"first_failed": name, "blame": blame, "runs": runs})
    else:
        _show(runs, first)
    context.exit(output.EXIT_OK if first is None else output.EXIT_MISMATCH)


def _show(runs: Sequence[TriageRun], first: TriageMode | None) -> None:
    columns: Columns[TriageRun] = (
        (Column("mode"), lambda run: run.mode),
        (Column("result"), lambda run: Text(run.result, _STYLES[run.result])),
        (Column("status"), lambda run: "" if run.status is None else str(run.status)),
        (Column("seconds", right=True), lambda run: f"{run.seconds:.1f}"),
        (
            Column("last line" if first is None else "last line, or the one that matches"),
            lambda run: Text(run.last_line[:_LONGEST_LINE]),
        ),
    )
    output.console.print(FittedTable.of(runs, columns))
    output.console.print()
    if first is None:
        output.console.print("all modes succeed")
    else:
        output.console.print(f"first to fail: {first.name}")
        output.console.print(first.blame)
