"""``snaprt localize``: find the operation where two sides of a program start to differ."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from snaprt_replay import gather
from snaprt_replay.load.load import load
from snaprt_replay.localize.findings import to_json
from snaprt_replay.localize.pipeline import LocalizeRequest, SearchTarget, localize
from snaprt_replay.report import text
from snaprt_replay.report.saved import headline_of
from snaprt_replay.run.variants.variants import Variant
from snaprt_replay.run.workers import forked_from_here

from snaprt import shown
from snaprt.cli import output, progress
from snaprt.cli.replay import formats, two_sides

_STATE_SUFFIX: Final = ".localize"


@click.command("localize")
@click.argument("file", metavar="FILE", type=output.PATH)
@two_sides.variant_option(
    "--a",
    "suspect",
    help="Suspect side.  [default: the platform that FILE was recorded on, or cpu]",
)
@two_sides.variant_option(
    "--b",
    "reference",
    help="Side to compare it with.  [default: f64; with --against, same as --a]",
)
@two_sides.against_option
@click.option(
    "--find",
    type=click.Choice(["auto", "difference", "nonfinite"]),
    default="auto",
    help="What to look for; auto looks for NaN and Inf if the sides agree.",
    show_default=True,
)
@two_sides.search_options
@click.option(
    "--state",
    type=output.PATH,
    metavar="DIR",
    help="Directory of the search state; an interrupted search resumes from it.  [default: "
    "FILE.localize]",
)
@formats.format_options
@output.json_option
@click.pass_context
def command(
    context: click.Context,
    file: Path,
    suspect: Variant | None,
    reference: Variant | None,
    against: Path | None,
    find: SearchTarget,
    budget: float | None,
    timeout: float,
    state: Path | None,
    inputs: Path | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Find the operation where two sides of a program start to differ.

    Both sides run the program in FILE, as two variants (docs/how-to/devices-differ.md). With
    --against, side A runs FILE and side B runs OTHER. The program is divided into regions. Each
    region runs on both sides with the same inputs; the search continues inside the first region
    that goes wrong, down to one instruction, including loops and branches.

    If the sides agree on a NaN or an infinity, the result is the first operation that produces one
    from finite values. If the programs in FILE and OTHER differ, the result is the smallest set of
    differing operations that causes the difference.

    The exit status is 0 if the sides agree, 1 if something was found or the budget ran out.

    \b
    Example:
      snaprt localize step.inputs.snap
      snaprt localize step.inputs.snap --a gpu --b cpu --budget 600
      snaprt localize on_a.inputs.snap --against on_b.inputs.snap
      snaprt localize step.inputs.snap --find nonfinite
    """
    formats.check_writable()
    context.with_resource(forked_from_here())
    file = two_sides.one_execution(file)
    case = load(file, inputs, seed)
    other = load(two_sides.one_execution(against)) if against is not None else None
    state = state or file.with_name(file.name + _STATE_SUFFIX)
    request = LocalizeRequest(suspect, reference, find, budget, timeout, state)
    with progress.showing("localizing"):
        localization = localize(
            case, request, other, tell=lambda line: output.log.print(shown.lines(line))
        )
    reports = []
    if formats.asked_for():
        words = output.given_words(context, {"file"})
        reports = [gather.of_localization(case, localization, Path(), words)]
    with formats.written(reports):
        if as_json:
            output.print_json(to_json(localization))
        else:
            for line in text.localization_lines(localization):
                output.console.print(line)
            output.console.print()
            output.console.print(formats.verdict(headline_of(localization)))
    context.exit(output.EXIT_OK if localization.kind == "nothing" else output.EXIT_MISMATCH)
