"""``snaprt pack``, ``unpack`` and ``prune``: one file to share, folders of it again, and cleaning.

They know options; the work is done in `snaprt.snapshot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from snaprt.cli import output, progress
from snaprt.snapshot.share import redact
from snaprt.snapshot.share.pack import Packed, pack, unpack
from snaprt.snapshot.share.prune import AGE, orphans, prune
from snaprt.units import format_size

SCHEMA: Final = "snaprt.pack"
PRUNE_SCHEMA: Final = "snaprt.prune"
SCHEMA_VERSION: Final = 1

_PATH: Final = click.Path(path_type=Path)


@click.command("pack")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=_PATH)
@click.option("-o", "--output", "out", type=_PATH, required=True, metavar="OUT", help="The file.")
@click.option(
    "--redact",
    "kinds",
    multiple=True,
    type=click.Choice(redact.KINDS),
    help="Take these out before it is shared; may be given several times.",
)
@click.option("--replace", is_flag=True, help="Write over OUT if it is there.")
@output.json_option
def pack_command(
    files: tuple[Path, ...], out: Path, kinds: Sequence[redact.Kind], replace: bool, as_json: bool
) -> None:
    """Make one file of recorded executions: inputs, outputs, all devices, stored arrays.

    FILE is a snapshot of an execution, a directory of them, or a packed file. What is in OUT can be
    replayed and looked into as it is; `snaprt unpack` gives back the files, bit for bit.

    --redact values leaves shapes, dtypes, statistics and a seed; names gives the graph, its inputs,
    outputs and functions neutral names; paths takes out source files and paths in the environment.

    \b
    Example:
      snaprt pack dump/step*-execution000007.inputs.snap -o step.pack
      snaprt pack dump -o all.pack
      snaprt pack step.inputs.snap -o bug.pack --redact values --redact names --redact paths
    """
    with progress.showing("packing"):
        packed = pack(files, out, kinds, replace)
    _report(packed, "packed", as_json)


@click.command("unpack")
@click.argument("file", type=_PATH)
@click.option(
    "-d",
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    metavar="DIR",
    help="Where to.  [default: .]",
)
@output.json_option
def unpack_command(file: Path, directory: Path, as_json: bool) -> None:
    """Write what is in a packed file into a folder, as it was before.

    An existing file with the same content stays; one with other content is an error.

    \b
    Example:
      snaprt unpack step.pack -d dump
    """
    with progress.showing("unpacking"):
        unpacked = unpack(file, directory)
    _report(unpacked, "unpacked", as_json)


def _report(packed: Packed, word: str, as_json: bool) -> None:
    if as_json:
        output.emit_json(SCHEMA, SCHEMA_VERSION, vars(packed))
        return
    for name in packed.snapshots:
        click.echo(name)
    for note in packed.notes:
        output.log.print(f"note: {note}")
    output.log.print(
        f"{word} {len(packed.snapshots)} snapshots and {packed.arrays} stored arrays, "
        f"{format_size(packed.bytes)}: {packed.path}"
    )


@click.command("prune")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--older-than",
    "age",
    type=click.FloatRange(min=0),
    default=AGE,
    metavar="SECONDS",
    help=f"Leave arrays alone that were stored or reused since.  [default: {AGE:.0f}]",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@output.json_option
def prune_command(directory: Path, age: float, dry_run: bool, as_json: bool) -> None:
    """Remove the stored arrays in DIRECTORY that no snapshot there refers to any more.

    They are left over from --dedupe where snapshots were removed. Programs may go on recording.

    \b
    Example:
      snaprt prune dump --dry-run
    """
    found = orphans(directory, age) if dry_run else prune(directory, age)
    if as_json:
        output.emit_json(PRUNE_SCHEMA, SCHEMA_VERSION, {"removed": not dry_run, "arrays": found})
        return
    for orphan in found:
        click.echo(orphan.path)
    word = "would be removed" if dry_run else "removed"
    total = format_size(sum(orphan.bytes for orphan in found))
    output.log.print(f"{len(found)} stored arrays, {total}: {word}")
