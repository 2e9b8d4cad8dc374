"""``snaprt inspect``: print what is in a file without running it.

It knows options and how contents are shown; reading is `snaprt_replay.load.contents`'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from snaprt_replay.compare.array_statistics import describe
from snaprt_replay.load import contents
from snaprt_replay.load.case import NamedArray
from snaprt_replay.load.contents import FileContents

from snaprt import shown
from snaprt.cli import output, tables
from snaprt.errors import UsageError
from snaprt.host.whole_files import whole_file, writing

# So many elements of an array are printed, by NumPy's own abbreviation.
_PRINTED_ELEMENTS = 200


@click.command("inspect")
@click.argument("file", type=output.PATH)
@click.option("--hlo", is_flag=True, help="Print the module as HLO text.")
@click.option("--stablehlo", is_flag=True, help="Print the module as StableHLO text.")
@click.option("--array", "array_name", metavar="NAME", help="Print one array.")
@click.option(
    "--save",
    type=output.PATH,
    metavar="FILE.npy",
    help="Save the array of --array; types that NumPy lacks, such as bfloat16, are saved as raw "
    "bits.",
)
@output.json_option
def command(
    file: Path, hlo: bool, stablehlo: bool, array_name: str | None, save: Path | None, as_json: bool
) -> None:
    """Print what is in FILE without running it: where it was recorded, its module, its arrays.

    FILE is any file that `snaprt replay` accepts.

    \b
    Example:
      snaprt inspect step.inputs.snap
      snaprt inspect step.inputs.snap --array arg0 --save arg0.npy
      snaprt inspect module_0000.jit_step.snapshot.0.pb --hlo
    """
    options = [name for name, is_given in (("--hlo", hlo), ("--stablehlo", stablehlo)) if is_given]
    options += ["--array"] if array_name is not None else []
    if len(options) > 1:
        raise UsageError(f"{' and '.join(options)} cannot be combined", hint="use one at a time")
    if save is not None and array_name is None:
        raise UsageError("--save needs --array", hint="--array NAME --save FILE.npy")
    file_contents = contents.read(file)
    if hlo or stablehlo:
        _print_text(file_contents, "hlo" if hlo else "stablehlo", as_json)
    elif array_name is not None:
        _print_array(file_contents, file_contents.array(array_name), save, as_json)
    else:
        _print_summary(file_contents, as_json)


def _print_text(
    file_contents: FileContents, form: Literal["hlo", "stablehlo"], as_json: bool
) -> None:
    text = file_contents.module_text(form)
    if as_json:
        output.emit_json("snaprt.inspect", {"path": file_contents.path, form: text})
    else:
        output.print_line(shown.lines(text))


def _print_array(
    file_contents: FileContents, array: NamedArray, save: Path | None, as_json: bool
) -> None:
    if save is not None:
        _save(save, array)
    statistics = describe(array)
    if as_json:
        output.emit_json("snaprt.inspect", {"path": file_contents.path, "array": statistics})
        return
    output.console.print(tables.statistics_table([statistics]))
    output.console.print()
    click.echo(np.array2string(array.value, threshold=_PRINTED_ELEMENTS, max_line_width=100))


def _save(path: Path, array: NamedArray) -> None:
    with writing(f"save {array.name} to {path}"), whole_file(path) as file:
        np.lib.format.write_array(file, contents.storable(array.value), allow_pickle=False)
    output.log.print(f"saved {array.name} to {path}")


def _print_summary(file_contents: FileContents, as_json: bool) -> None:
    statistics = [(role, describe(array)) for role, array in file_contents.arrays()]
    if as_json:
        data: dict[str, Any] = {
            "path": file_contents.path,
            "format": file_contents.format,
            "module": file_contents.name,
            "facts": file_contents.facts,
            "parameters": [str(parameter) for parameter in file_contents.parameters],
            "notes": file_contents.notes,
            "arrays": [{"role": role, **vars(row)} for role, row in statistics],
        }
        output.emit_json("snaprt.inspect", data)
        return
    output.console.print(
        f"{file_contents.path}: {file_contents.format}, module {shown.name(file_contents.name)}"
    )
    width = max((len(label) for label in file_contents.facts), default=0)
    for label, value in file_contents.facts.items():
        text = shown.lines(value).replace("\n", "\n    ")
        output.console.print(f"  {label:<{width}}  {text}")
    for note in file_contents.notes:
        output.console.print(f"note: {shown.lines(note)}")
    for role in ("inputs", "outputs"):
        chosen = [row for its_role, row in statistics if its_role == role]
        if chosen:
            output.console.print(f"\n{role}: {len(chosen)}")
            output.console.print(tables.statistics_table(chosen))
    if not statistics:
        parameters = ", ".join(map(str, file_contents.parameters)) or "none"
        output.console.print(f"\nno arrays; parameters of the module: {parameters}")
