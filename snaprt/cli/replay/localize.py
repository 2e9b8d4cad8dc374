"""``snaprt localize``: find the operation where two sides of a program start to differ."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from snaprt_replay.batch import gather
from snaprt_replay.load.load import load
from snaprt_replay.localize.findings import to_json
from snaprt_replay.localize.pipeline import Find, Request, localize
from snaprt_replay.report import text
from snaprt_replay.report.saved import headline_of
from snaprt_replay.run.variants.variants import Variant

from snaprt.cli import output, progress, tables
from snaprt.cli.replay import formats, two_sides

_PATH: Final = click.Path(path_type=Path)
_STATE_SUFFIX: Final = ".localize"


@click.command("localize")
@click.argument("file", metavar="FILE", type=_PATH)
@two_sides.variant_option(
    "--a",
    "suspect",
    help="The side to look at.  [default: the platform that FILE was recorded on, or cpu]",
)
@two_sides.variant_option(
    "--b",
    "reference",
    help="The side to compare it with.  [default: f64; with --against, what --a is]",
)
@two_sides.against_option
@click.option(
    "--find",
    type=click.Choice(["auto", "difference", "nonfinite"]),
    default="auto",
    help="What to look for; auto looks for NaN and Inf where the sides agree.",
    show_default=True,
)
@two_sides.search_options
@click.option(
    "--state",
    type=_PATH,
    metavar="DIR",
    help="Where a search that was broken off goes on.  [default: FILE.localize]",
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
    find: Find,
    budget: float | None,
    timeout: float,
    state: Path | None,
    inputs: Path | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Find the operation where two sides of a program start to differ.

    Both sides run the program of FILE, in two variants (docs/variants.md), or side A runs it and
    side B that of OTHER. The program is cut into regions; each is run on both sides from the same
    values, and the search goes on inside the first that goes wrong, down to one instruction, in
    loops and branches too. Where the sides agree on a NaN or an infinity, it is the first operation
    that makes one of finite values. Where the programs of FILE and OTHER differ, only what differs
    is named: the fewest operations with which, as OTHER has them, the difference is gone.

    The status is 0 if the sides agree, 1 if something was found or the budget is spent.

    \b
    Example:
      snaprt localize step.inputs.snap
      snaprt localize step.inputs.snap --a gpu --b cpu --budget 600
      snaprt localize on_a.inputs.snap --against on_b.inputs.snap
      snaprt localize step.inputs.snap --find nonfinite
    """
    case = load(file, inputs, seed)
    other = load(against) if against is not None else None
    state = state or file.with_name(file.name + _STATE_SUFFIX)
    request = Request(suspect, reference, find, budget, timeout, state)
    with progress.showing("localizing"):
        found = localize(
            case, request, other, tell=lambda line: output.log.print(tables.printable(line))
        )
    if formats.asked_for():
        formats.write_files([gather.of_localization(case, found, Path())])
    if as_json:
        envelope = to_json(found)
        output.emit_json(envelope.pop("schema"), envelope.pop("version"), envelope)
    else:
        for line in text.localization_lines(found):
            output.console.print(line)
        output.console.print()
        output.console.print(formats.verdict(headline_of(found)))
    context.exit(output.EXIT_OK if found.kind == "nothing" else output.EXIT_MISMATCH)
