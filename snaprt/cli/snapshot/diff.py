"""``snaprt diff``: say in what two recorded executions differ.

It knows options and how differences are shown; `snaprt_replay.compare.differences` finds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from rich.text import Text
from snaprt_replay.compare.differences import ArrayDifference, Differences, find_differences

from snaprt import shown
from snaprt.cli import output, progress, tables
from snaprt.cli.fitted_table import Column, FittedTable

_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}


@click.command("diff")
@click.argument("first", metavar="A", type=output.PATH)
@click.argument("second", metavar="B", type=output.PATH)
@output.json_option
@click.pass_context
def command(context: click.Context, first: Path, second: Path, as_json: bool) -> None:
    """Show how two recorded executions differ: versions, flags, inputs, outputs, instructions.

    A and B are any files that `snaprt replay` accepts. Arrays are compared bit by bit, modules as
    StableHLO without source locations, and large constants by their digests. Nothing is run.

    The exit status is 0 if they do not differ, 1 if they do.

    \b
    Example:
      snaprt diff monday/step.inputs.snap tuesday/step.inputs.snap
    """
    with progress.showing("comparing"):
        differences = find_differences(first, second)
    if as_json:
        output.emit_json(
            "snaprt.diff",
            {"first": first, "second": second, "differ": differences.any, **vars(differences)},
        )
    else:
        _show(differences)
    context.exit(output.EXIT_MISMATCH if differences.any else output.EXIT_OK)


def _show(differences: Differences) -> None:
    if differences.facts:
        columns = (Column("differs"), Column("A"), Column("B"))
        rows = [
            [shown.sentence(text) or "-" for text in (fact.what, fact.first, fact.second)]
            for fact in differences.facts
        ]
        output.console.print(FittedTable(columns, rows))
        output.console.print()
    for array in differences.arrays:
        output.console.print(shown.lines(_array_line(array)))
    output.console.print(f"{differences.same_arrays} arrays are identical")
    if differences.instructions:
        output.console.print()
    for line in differences.instructions:
        text = shown.lines(line)
        output.console.print(Text(text, style=_STYLES.get(text[:1], "")))
    for note in differences.notes:
        output.console.print(f"note: {shown.lines(note)}")
    if not differences.any:
        output.console.print("no differences")


def _array_line(array: ArrayDifference) -> str:
    start = f"{array.role} {array.name}"
    if array.reason or array.comparison is None:
        return f"{start}: {array.reason}"
    values = array.comparison
    kind = shown.array_type(values.dtype, values.shape)
    return (
        f"{start} {kind}: {values.differing} of {values.elements} elements differ, by at most "
        f"{tables.number_text(values.max_abs_error)}"
    )
