"""``snaprt minify``: find the smallest program that still shows a failure."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text
from snaprt_replay.load.case import Case, on_one_device
from snaprt_replay.load.load import load
from snaprt_replay.minify.checks import CheckName, Patience
from snaprt_replay.minify.pipeline import Minified, MinifyRequest, minify
from snaprt_replay.run.variants.variants import Variant
from snaprt_replay.run.workers import forked_from_here

from snaprt import shown
from snaprt.cli import output, progress
from snaprt.cli.replay import two_sides
from snaprt.errors import UsageError
from snaprt.units import format_duration

_SUFFIX: Final = ".minified"
_WITHOUT_VALUES: Final = ("crash", "slow-compile")
_OPERATOR: Final = re.compile(r"\d*(<|>>?)[^<>]*|\|\|?|&&?|;")  # of a shell


@click.command("minify")
@click.argument("file", metavar="FILE", type=output.PATH)
@click.option(
    "--check",
    type=click.Choice(["mismatch", "nan", "crash", "slow-compile"]),
    help="Kind of failure to look for.  [default: mismatch]",
)
@click.option(
    "--check-command",
    metavar="COMMAND",
    help="Command that detects the failure, with an exit status as for `git bisect run`; {} "
    "stands for the file.",
)
@two_sides.variant_option(
    "--a",
    "suspect",
    help="Side that fails.  [default: the platform that FILE was recorded on, or cpu]",
)
@two_sides.variant_option(
    "--b",
    "reference",
    help="Side to compare with.  [default: the recorded outputs, or f64; with --against, same "
    "as --a]",
)
@two_sides.against_option
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    metavar="M",
    help="Run each program up to M times.",
    show_default=True,
)
@click.option(
    "--needed",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="How many of the M runs must fail.",
    show_default=True,
)
@click.option(
    "--slower-than",
    type=output.LIMIT_OVER_0,
    metavar="SECONDS",
    help="Threshold for slow-compile.  [default: half the time of FILE]",
)
@two_sides.search_options
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    default=2,
    metavar="N",
    help="Number of programs to check in parallel.",
    show_default=True,
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=output.PATH,
    metavar="DIR",
    help="Output folder.  [default: FILE.minified]",
)
@output.json_option
@click.pass_context
def command(
    context: click.Context,
    file: Path,
    check: CheckName | None,
    check_command: str | None,
    suspect: Variant | None,
    reference: Variant | None,
    against: Path | None,
    repeat: int,
    needed: int,
    slower_than: float | None,
    budget: float | None,
    timeout: float,
    jobs: int,
    folder: Path | None,
    inputs: Path | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Find the smallest program that still shows a failure, and write it up for a bug report.

    snaprt replaces instructions with the values they computed, shrinks dimensions, and simplifies
    values and flags, as long as the same failure remains. The output folder holds a snapshot, a
    script that needs only jax and numpy, the module as text, and an ISSUE.md.

    The exit status is 0 if FILE does not fail, 1 if it fails and was minified.

    \b
    Example:
      snaprt minify step.inputs.snap
      snaprt minify step.inputs.snap --a gpu --b cpu --budget 600
      snaprt minify module.hlo.txt --check crash
      snaprt minify step.inputs.snap --check nan --repeat 5 --needed 2
      snaprt minify step.inputs.snap --check-command 'python is_it_wrong.py {}'
    """
    if check is not None and check_command is not None:
        raise UsageError(
            "--check and --check-command cannot be combined", hint="the command is the check"
        )
    if needed > repeat:
        raise UsageError(
            f"--needed {needed} is more than --repeat {repeat}",
            hint="raise --repeat, or lower --needed",
        )
    if slower_than is not None and check != "slow-compile":
        raise UsageError(
            "--slower-than needs --check slow-compile", hint="add --check slow-compile"
        )
    context.with_resource(forked_from_here())
    name: CheckName = "command" if check_command is not None else check or "mismatch"
    file = two_sides.one_execution(file)
    case = load(file, inputs, seed)
    if case.inputs is None and name in _WITHOUT_VALUES:
        case = load(file, None, 0)
    request = MinifyRequest(
        check=name,
        suspect=suspect,
        reference=reference,
        command=() if check_command is None else _words(check_command),
        slower_than=slower_than,
        patience=Patience(repeat, needed, budget, jobs),
        timeout=timeout,
    )
    folder = folder or file.with_name(file.name + _SUFFIX)
    is_new = not folder.exists()
    output.writable(folder, "--output")  # before a search that may take hours
    try:
        with progress.showing("minifying"):
            minified = minify(
                case,
                request,
                folder,
                load(two_sides.one_execution(against)) if against is not None else None,
                tell=lambda line: output.log.print(shown.lines(line)),
            )
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # something was found
                folder.rmdir()
    if as_json:
        output.emit_json("snaprt.minify", _to_json(file, minified))
    else:
        _show(case, name, minified)
    context.exit(output.EXIT_OK if minified is None else output.EXIT_MISMATCH)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(
            f"cannot read the command {command!r} of --check-command: {error}",
            hint="close its quotes, as in a shell",
        ) from error
    if not words:
        raise UsageError("the command of --check-command is empty", hint="name a program")
    # As an argument, an operator would make most programs fail, whatever the candidate is.
    for word in words:
        if _OPERATOR.fullmatch(word):
            raise UsageError(
                f"the command of --check-command runs without a shell, which {word} needs",
                hint="""run it in a shell: --check-command "sh -c 'COMMAND'\"""",
            )
    return words


def _to_json(file: Path, minified: Minified | None) -> dict[str, Any]:
    if minified is None:
        return {"file": file, "fails": False}
    shrunk = minified.shrunk
    return {
        "file": file,
        "fails": True,
        "check": minified.check,
        "folder": minified.folder,
        "failure_before": shrunk.first,
        "failure": shrunk.symptom,
        "instructions_before": shrunk.original.instructions,
        "instructions": shrunk.candidate.instructions,
        "steps": shrunk.steps,
        "programs_looked_at": shrunk.asked,
        "seconds": shrunk.seconds,
        "finished": shrunk.finished,
        "confirmed": minified.confirmed,
        "script_fails": minified.script_fails,
        "neighbor": None if shrunk.neighbor is None else shrunk.neighbor.change,
        "notes": minified.notes,
    }


def _show(case: Case, check: CheckName, minified: Minified | None) -> None:
    console = output.console
    if minified is None:
        for note in on_one_device(case)[1]:
            console.print(f"note: {shown.lines(note)}")
        which = "--check-command" if check == "command" else f"--check {check}"
        none = f": {case.path} does not fail {which}"
        console.print(Text.assemble(("NO FAILURE", "green"), none))
        return
    shrunk = minified.shrunk
    for note in minified.notes:
        console.print(f"note: {shown.lines(note)}")
    if shrunk.first.what != shrunk.symptom.what:
        console.print(f"the whole program: {shown.lines(str(shrunk.first))}")
    if shrunk.neighbor is not None:
        console.print(f"passes with: {shown.lines(shrunk.neighbor.change)}")
    if not shrunk.finished:
        console.print("the budget ran out: a longer run may find a smaller program")
    if not minified.confirmed:
        console.print(
            "the failure did NOT recur in new processes: it is intermittent; see --repeat and "
            "--needed"
        )
    if minified.script_fails is not None:
        console.print(
            f"repro.py {'fails as expected' if minified.script_fails else 'does not fail'}"
        )
    console.print(
        f"{shrunk.asked} programs checked in {format_duration(shrunk.seconds)}; results are in "
        f"{minified.folder}"
    )
    console.print()
    before, now = shrunk.original.instructions, shrunk.candidate.instructions
    conclusion = f": {now} of {before} instructions fail: {shown.lines(str(shrunk.symptom))}"
    console.print(Text.assemble(("MINIFIED", "bold red"), conclusion))
