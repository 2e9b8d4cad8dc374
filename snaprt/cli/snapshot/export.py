"""``snaprt export``: write a recorded execution in a form that other programs read.

It knows options; the forms are `snaprt_replay.export`'s.
"""

from __future__ import annotations

from pathlib import Path

import click
from snaprt_replay.export import FORMS, export

from snaprt.cli import output, progress

_FORMS_HELP = "\n".join(f"  {name:<13} {form.help}" for name, form in FORMS.items())

_HELP = f"""Convert a recorded execution to a format that other programs read.

FILE is any file that `snaprt replay` accepts. The formats:

\b
{_FORMS_HELP}

\b
Example:
  snaprt export step.inputs.snap --to python -o step
  snaprt export step.inputs.snap --to hlo-snapshot -o step.pb
  snaprt export step.inputs.snap --to stablehlo -o step.mlir
"""


@click.command("export", help=_HELP)
@click.argument("file", type=output.PATH)
@click.option("--to", type=click.Choice(list(FORMS)), required=True, help="Output format.")
@click.option(
    "-o",
    "--output",
    "out",
    type=output.PATH,
    required=True,
    metavar="OUT",
    help="File to write; for python, a folder.",
)
@click.option("--replace", is_flag=True, help="Overwrite an existing file.")
@output.json_option
def command(file: Path, to: str, out: Path, replace: bool, as_json: bool) -> None:
    """Write a recorded execution in another form; what is printed as help is `_HELP`."""
    with progress.showing("converting"):
        case = export(file, to, out, replace=replace)
    if as_json:
        content = {"path": file, "to": to, "output": out, "notes": case.notes}
        output.emit_json("snaprt.export", content)
        return
    for note in case.notes:
        output.log.print(f"note: {note}")
    output.print_line(out)
