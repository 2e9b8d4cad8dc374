"""``snaprt ls``: what was recorded in a folder or a packed file, from the manifests alone."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import click

from snaprt import shown
from snaprt.cli import output, progress
from snaprt.cli.fitted_table import Column, FittedTable
from snaprt.cli.snapshot import ranks
from snaprt.errors import SnaprtError, SnapshotError, UsageError
from snaprt.snapshot.format import places, schema
from snaprt.snapshot.format.read import open_snapshot, read_manifest
from snaprt.snapshot.share import prune
from snaprt.units import counted, first_names, format_size

_FEW_BYTES: Final = 256 << 20  # of stored arrays, which are read in a second

_COLUMNS: Final = (
    Column("graph"),
    Column("step", right=True, rank=3),
    Column("execution", right=True),
    Column("device", rank=4),
    Column("inputs", rank=5),
    Column("outputs", rank=6),
    Column("size", right=True, rank=2),
    Column("because", rank=7),
    Column("error", rank=1),
)


@dataclass(frozen=True)
class ExecutionRow:
    """What was recorded of one execution on one device; the keys of ``--json``."""

    files: Mapping[str, Path]  # by what they hold
    graph: str
    graph_id: str
    step: int  # steps that came before; -1 where nobody counted them
    execution: int  # executions of the same executable that came before
    process: int
    device: str  # platform, number
    device_index: int  # place of the device among the executable's own
    inputs: tuple[str, ...] | None  # types; None where none are recorded
    outputs: tuple[str, ...] | None
    file_bytes: int
    stored_bytes: int  # of the arrays in the store that they refer to, which others may share
    reason: str
    error: str
    redacted: tuple[str, ...]
    run: int = 1  # of which run of the execution the outputs are; 2: it ran again


class _Listed(NamedTuple):
    path: Path
    bytes: int  # of the file
    execution: ranks.ToldExecution
    types: tuple[str, ...]  # of the arrays
    stored: Mapping[str, int]  # size by member of each array that lies in the store


def _range(text: str | None) -> tuple[float, float]:
    if text is None:
        return -math.inf, math.inf
    first, colon, last = text.partition(":")
    with contextlib.suppress(ValueError):
        span = int(first or 0), int(last) if last else (math.inf if colon else int(first))
        if span[0] <= span[1]:
            return span
    raise UsageError(f"{text!r} is not a number or a range", hint="write 7, 7:12 or 7:")


@click.command("ls")
@click.argument("place", metavar="DIR", type=output.PATH)
@click.option("--graph", metavar="REGEX", help="Only graphs whose name matches.")
@click.option("--step", metavar="N[:M]", help="Only these steps.")
@click.option("--execution", metavar="N[:M]", help="Only these executions of each executable.")
@click.option("--device", type=click.IntRange(min=0), help="Only this device of each executable.")
@click.option("--failed", is_flag=True, help="Only failed executions.")
@click.option(
    "--ranks",
    "by_rank",
    is_flag=True,
    help="Show each rank of a job: its progress, recordings and missing recordings.",
)
@click.option("--check", is_flag=True, help="Read all modules and arrays to find damage.")
@output.json_option
@click.pass_context
def command(
    context: click.Context,
    place: Path,
    graph: str | None,
    step: str | None,
    execution: str | None,
    device: int | None,
    failed: bool,
    by_rank: bool,
    check: bool,
    as_json: bool,
) -> None:
    """List the recorded executions in DIR, a folder or a packed file.

    Each line is one execution on one device. `snaprt inspect FILE` shows the details.

    The exit status is 1 if a file is damaged. Without --check, only manifests and stored arrays are
    verified: that each array exists and has the right size, and, if all of them are at most 256 MiB
    in total, the right checksum.

    \b
    Example:
      snaprt ls dump
      snaprt ls dump --graph train --step 100:200 --json
      snaprt ls dump --ranks
    """
    if by_rank:
        filters = {"graph", "step", "execution", "device", "failed", "check"}
        why, hint = "cannot be combined with --ranks", "--ranks shows all that each rank recorded"
        output.refuse_options(context, filters, why, hint)
    pattern = None if graph is None else _compiled(graph)
    steps, executions = _range(step), _range(execution)

    def is_wanted(row: ExecutionRow) -> bool:
        return (
            (pattern is None or pattern.search(row.graph) is not None)
            and steps[0] <= row.step <= steps[1]
            and executions[0] <= row.execution <= executions[1]
            and device in (None, row.device_index)
            and (bool(row.error) or not failed)
        )

    with progress.showing("reading") as line:
        files, damaged = _read_all(place, line.done)
        if not by_rank:
            damaged += _damaged_arrays(place, files, check)
    if by_rank:
        by_ranks = ranks.rows_of_ranks(place, [file.execution for file in files])
        if as_json:
            output.emit_json("snaprt.ls", {"path": place, "ranks": by_ranks, "damaged": damaged})
        else:
            ranks.show(by_ranks)
        _exit(context, damaged)
    rows = list(filter(is_wanted, _rows(files)))
    store = prune.stored_arrays(place) if place.is_dir() else []
    store_bytes = sum(path.stat().st_size for path in store)
    if as_json:
        content = {"rows": rows, "damaged": damaged, "stored_arrays": len(store)}
        output.emit_json("snaprt.ls", {"path": place, **content, "bytes": store_bytes})
    else:
        _show(rows, len(store), store_bytes)
        if not files:
            _name_folders_below(place)
    _exit(context, damaged)


def _exit(context: click.Context, damaged: Sequence[str]) -> NoReturn:
    for error in damaged:
        output.error(error)
    context.exit(output.EXIT_MISMATCH if damaged else output.EXIT_OK)


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"--graph {text!r} is not a valid regular expression: {error}") from error


def _read_all(place: Path, tell: Callable[[int, int], None]) -> tuple[list[_Listed], list[str]]:
    if not place.is_dir() and not places.is_pack_file(place):
        raise UsageError(
            f"{place} is neither a directory nor a packed file",
            hint="name the directory that the snapshots were recorded into",
        )
    files, damaged = [], []
    paths = prune.named_as_snapshots(place) if place.is_dir() else places.snapshots_in(place)
    if not paths and place.is_file():
        damaged.append(f"{place} is damaged: it contains no readable snapshot")
    for count, path in enumerate(paths, 1):
        try:
            files.append(_listed(path, *read_manifest(path)))
        except SnaprtError as error:
            leads_nowhere = path.is_symlink() and not path.exists()
            damaged.append(
                f"{path} is a symbolic link that leads nowhere" if leads_nowhere else error.message
            )
        tell(count, len(paths))
    return files, damaged


def _listed(path: Path, manifest: schema.Manifest, file_bytes: int) -> _Listed:
    arrays = manifest.arrays
    return _Listed(
        path,
        file_bytes,
        ranks.ToldExecution.of(manifest.execution),
        tuple([shown.array_type(array.dtype, array.shape) for array in arrays]),
        {array.member: array.stored_bytes for array in arrays if array.in_store},
    )


def _damaged_arrays(place: Path, files: Sequence[_Listed], check: bool) -> Iterator[str]:
    """Yield what is wrong with stored arrays, and with all else in the files if asked for."""
    sizes = {member: size for file in files for member, size in file.stored.items()}
    reads = check or sum(sizes.values()) <= _FEW_BYTES
    seen: set[str] = set()
    for file in files:
        fresh = {member: size for member, size in file.stored.items() if member not in seen}
        seen |= set(fresh)
        try:
            for member, size in fresh.items():
                _check_stored_size(place / member, size, file.path)
            if check or (reads and fresh):
                snapshot = open_snapshot(file.path)
                for member in fresh:
                    snapshot.check_stored(member)
                if check:
                    snapshot.check()
        except SnaprtError as error:
            yield error.message


def _check_stored_size(stored: Path, size: int, needed_by: Path) -> None:
    try:
        actual = places.size(stored)
    except OSError as error:
        raise SnapshotError(
            f"cannot read an array that {needed_by} needs: {stored}: {error.strerror or error}"
        ) from error
    if actual != size:
        raise SnapshotError(f"{stored} is damaged; {needed_by} needs it")


def _rows(files: Iterable[_Listed]) -> list[ExecutionRow]:
    pairs: dict[str, dict[str, _Listed]] = {}
    for file in files:
        role = file.execution.role
        stem = file.path.name.removesuffix(schema.SUFFIXES[role])
        pairs.setdefault(stem, {})[role] = file
    rows = [_row(pair) for pair in pairs.values()]
    return sorted(
        rows, key=lambda row: (row.step, row.graph, row.execution, row.device_index, row.run)
    )


def _row(pair: Mapping[str, _Listed]) -> ExecutionRow:
    executions = [file.execution for file in pair.values()]
    first = executions[0]
    stored = {member: size for file in pair.values() for member, size in file.stored.items()}
    return ExecutionRow(
        files={role: file.path for role, file in pair.items()},
        graph=first.name,
        graph_id=first.graph_id,
        step=first.step,
        execution=first.execution_count,
        process=first.process,
        device=f"{first.device.platform} {first.device.id}",
        device_index=first.device_index,
        inputs=pair["inputs"].types if "inputs" in pair else None,
        outputs=pair["outputs"].types if "outputs" in pair else None,
        file_bytes=sum(file.bytes for file in pair.values()),
        stored_bytes=sum(stored.values()),
        reason=next((execution.reason for execution in executions if execution.reason), ""),
        error=next((execution.error for execution in executions if execution.error), ""),
        redacted=first.redacted,
        run=first.run_number,
    )


def _show(rows: list[ExecutionRow], stored: int, stored_bytes: int) -> None:
    if rows:
        output.console.print(FittedTable(_COLUMNS, [_cells(row) for row in rows]))
    total = format_size(sum(row.file_bytes for row in rows))
    count = sum(row.run == 1 for row in rows)
    output.log.print(f"{counted(count, 'recorded execution')}, {total}")
    if stored:
        output.log.print(f"{counted(stored, 'stored array')}, {format_size(stored_bytes)}")


def _name_folders_below(place: Path) -> None:
    """Name the folders right below one without snapshots that have some: a folder for each run."""
    if not place.is_dir():
        return
    below = [path for path in sorted(place.iterdir()) if path.is_dir() and os.access(path, os.R_OK)]
    recorded = [path for path in below if places.snapshots_in(path)]
    commands = [f"snaprt ls {shown.shell_word(str(path))}" for path in recorded]
    if commands:
        output.log.print(shown.lines(f"subfolders contain recordings: {first_names(commands, 3)}"))


def _cells(row: ExecutionRow) -> list[str]:
    return [
        shown.name(row.graph),
        "-" if row.step < 0 else str(row.step),
        str(row.execution) if row.run == 1 else f"{row.execution} (run {row.run})",
        row.device,
        _few(row.inputs),
        _few(row.outputs),
        format_size(row.file_bytes + row.stored_bytes),
        shown.lines(row.reason) or "-",
        shown.lines(schema.first_line(row.error)) or "-",
    ]


def _few(types: tuple[str, ...] | None, most: int = 2) -> str:
    if not types:
        return "-" if types is None else "none"
    first = ", ".join(types[:most])
    return first if len(types) <= most else f"{first} and {len(types) - most} more"
