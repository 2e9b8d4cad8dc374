"""``snaprt pack``, ``unpack`` and ``prune``: one file to share, folders of it again, and cleaning.

They know options; the work is done in `snaprt.snapshot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from snaprt.cli import output, progress
from snaprt.snapshot.share import redact
from snaprt.snapshot.share.pack import Packed, pack, unpack
from snaprt.snapshot.share.prune import AGE, orphans, prune
from snaprt.units import counted, format_size


@click.command("pack")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=output.PATH)
@click.option(
    "-o", "--output", "out", type=output.PATH, required=True, metavar="OUT", help="File to write."
)
@click.option(
    "--redact",
    "kinds",
    multiple=True,
    type=click.Choice(redact.KINDS),
    help="Remove these before sharing. Repeatable.",
)
@click.option("--replace", is_flag=True, help="Overwrite OUT if it exists.")
@output.json_option
def pack_command(
    files: tuple[Path, ...],
    out: Path,
    kinds: Sequence[redact.RedactionKind],
    replace: bool,
    as_json: bool,
) -> None:
    """Pack recorded executions into one file: inputs, outputs, all devices, stored arrays.

    FILE is a snapshot, a directory of snapshots, or a packed file. Other commands read OUT
    directly; `snaprt unpack` restores the files, bit for bit.

    --redact values keeps only shapes, dtypes, statistics and a seed. --redact names gives neutral
    names to the graph, its inputs, outputs and functions. --redact paths removes source files and
    paths in the environment.

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
@click.argument("file", type=output.PATH)
@click.option(
    "-d",
    "--directory",
    type=output.FOLDER,
    default=Path(),
    metavar="DIR",
    help="Output directory.  [default: .]",
)
@output.json_option
def unpack_command(file: Path, directory: Path, as_json: bool) -> None:
    """Unpack a packed file into a folder.

    Existing files with the same content are kept; different content is an error.

    \b
    Example:
      snaprt unpack step.pack -d dump
    """
    with progress.showing("unpacking"):
        unpacked = unpack(file, directory)
    _report(unpacked, "unpacked", as_json)


def _report(packed: Packed, word: str, as_json: bool) -> None:
    if as_json:
        output.emit_json("snaprt.pack", vars(packed))
        return
    for name in packed.snapshots:
        output.print_line(name)
    for note in packed.notes:
        output.log.print(f"note: {note}")
    output.log.print(
        f"{word} {counted(len(packed.snapshots), 'snapshot')} and "
        f"{counted(packed.arrays, 'stored array')}, {format_size(packed.bytes)}: {packed.path}"
    )


@click.command("prune")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--older-than",
    "age",
    type=output.AGE,
    default=AGE,
    metavar="SECONDS",
    help=f"Keep arrays that were stored or reused in the last SECONDS.  [default: {AGE:.0f}]",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, without removing it.")
@output.json_option
def prune_command(directory: Path, age: float, dry_run: bool, as_json: bool) -> None:
    """Remove stored arrays in DIRECTORY that no snapshot there refers to.

    Such arrays remain when snapshots recorded with --dedupe are removed. Programs may keep
    recording into DIRECTORY meanwhile.

    \b
    Example:
      snaprt prune dump --dry-run
    """
    with progress.showing("looking for arrays that nothing uses"):
        unused_arrays = orphans(directory, age) if dry_run else prune(directory, age)
    if as_json:
        output.emit_json("snaprt.prune", {"removed": not dry_run, "arrays": unused_arrays})
        return
    for orphan in unused_arrays:
        output.print_line(orphan.path)
    word = "would be removed" if dry_run else "removed"
    total = format_size(sum(orphan.bytes for orphan in unused_arrays))
    output.log.print(f"{counted(len(unused_arrays), 'stored array')}, {total}: {word}")
