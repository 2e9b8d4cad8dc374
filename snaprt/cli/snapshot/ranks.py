"""What each rank of a job has recorded and what is missing: ``snaprt ls --ranks``."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from snaprt import shown
from snaprt.cli import output
from snaprt.cli.fitted_table import Column, FittedTable
from snaprt.host.regular_files import read_file
from snaprt.snapshot.format import schema
from snaprt.snapshot.recorder.ranks.states import RankState, missing_file, read_states
from snaprt.units import format_duration

_COLUMNS: Final = (
    Column("rank", right=True),
    Column("host", rank=4),
    Column("step", right=True, rank=2),
    Column("last program"),
    Column("execution", right=True),
    Column("seen", right=True, rank=3),
    Column("state", rank=1),
    Column("recorded", right=True),
    Column("missing"),
)
_MOST_SHOWN: Final = 3
_MOST_SIGNS: Final = 60  # of how a rank ended
_KILLED: Final = "killed, or crashed"
_STARTED: Final = 18  # of the numbers of a process in /proc: when it started


class ToldExecution(NamedTuple):
    """What a list needs of an `ExecutionRecord`: there may be thousands, and the rest is large."""

    role: schema.Role
    name: str
    graph_id: str
    process: int
    rank: int
    device: schema.DeviceRecord
    devices: tuple[schema.DeviceRecord, ...]
    device_index: int
    execution_count: int
    step: int
    reason: str
    error: str
    redacted: tuple[str, ...]
    run_number: int

    @classmethod
    def of(cls, execution: schema.ExecutionRecord) -> ToldExecution:
        """Return it of one execution."""
        return cls(*[getattr(execution, field) for field in cls._fields])


@dataclass(frozen=True)
class MissingExecution:
    """An execution that other ranks have recorded, and this one has not."""

    graph: str
    graph_id: str
    execution: int
    why: str  # "" if the rank did not say


@dataclass(frozen=True)
class RankRow:
    """One rank; the keys of ``--json``."""

    rank: int
    state: RankState | None  # None if it left none
    status: str  # how it ended, or what it does now; "" if it left no state
    recorded: int  # executions
    missing: tuple[MissingExecution, ...]


def rows_of_ranks(place: Path, executions: Iterable[ToldExecution]) -> list[RankRow]:
    """Return what is known of each rank, given what was recorded into a folder.

    Raises:
        UsageError: A state cannot be read.
    """
    states = {state.rank: state for state in read_states(place)} if place.is_dir() else {}
    names: dict[tuple[str, int], str] = {}
    present: dict[tuple[str, int], set[int]] = {}
    expected: dict[tuple[str, int], set[int]] = {}
    devices: dict[tuple[tuple[str, int], int], dict[schema.Role, set[int]]] = {}
    for execution in executions:
        key = execution.graph_id, execution.execution_count
        names[key] = execution.name
        of_program = {device.process for device in execution.devices}
        is_of_one = len(of_program) == 1
        rank = execution.rank if is_of_one else execution.process
        present.setdefault(key, set()).add(rank)
        expected.setdefault(key, set()).update({rank} if is_of_one else of_program)
        devices.setdefault((key, rank), {}).setdefault(execution.role, set()).add(
            execution.device.id
        )
    with_inputs = {key for (key, _), roles in devices.items() if "inputs" in roles}
    rows = []
    for rank in sorted(set(states).union(*expected.values())):
        reasons = _said_missing(place, rank)
        missing = [
            MissingExecution(names[key], *key, why=reasons.get(key, ""))
            for key in sorted(names)
            if rank not in present[key] and (rank in expected[key] or key in reasons)
        ]
        missing += [
            MissingExecution(names[key], *key, why=f"no inputs of device {device}")
            for key in sorted(with_inputs)
            for device in sorted(_without_inputs(devices.get((key, rank), {})))
        ]
        recorded = sum(rank in ranks for ranks in present.values())
        state = states.get(rank)
        status = "" if state is None else _status(state)
        rows.append(RankRow(rank, state, status, recorded, tuple(missing)))
    return rows


def _without_inputs(devices: Mapping[schema.Role, set[int]]) -> set[int]:
    """Return the devices of which the outputs of an execution are there, and not its inputs."""
    return devices.get("outputs", set()) - devices.get("inputs", set())


def _said_missing(place: Path, rank: int) -> Mapping[tuple[str, int], str]:
    """Return why a rank could not record what others asked it for."""
    reasons: dict[tuple[str, int], str] = {}
    try:
        lines = read_file(missing_file(place, rank)).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return reasons
    for line in lines:
        try:
            entry = json.loads(line)
            reasons[str(entry["graph_id"]), int(entry["execution"])] = str(entry["why"])
        except (ValueError, KeyError, TypeError):
            continue  # the end of a process that was killed as it wrote
    return reasons


def show(rows: list[RankRow]) -> None:
    """Print a table of ranks."""
    if not rows:
        output.log.print("No rank state and no recordings found here.")
        return
    output.console.print(FittedTable(_COLUMNS, [_cells(row) for row in rows]))


def _cells(row: RankRow) -> list[str]:
    state = row.state
    last_seen = "-"
    if state is not None:
        last_seen = f"{format_duration(max(0.0, time.time() - state.time))} ago"
    program = shown.lines(state.program) if state is not None and state.program else "-"
    return [
        str(row.rank),
        shown.lines(state.host) if state is not None else "-",
        str(state.step) if state is not None else "-",
        program,
        str(state.execution) if program != "-" and state is not None else "-",
        last_seen,
        shown.lines(shown.cut(row.status, _MOST_SIGNS)) or "-",
        str(row.recorded),
        _missing_text(row.missing),
    ]


def _status(state: RankState) -> str:
    """Return how a process ended, or what it does now, as far as this machine knows."""
    if state.ended.strip():
        return state.ended.strip().splitlines()[0]
    if state.host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return "running, or killed"
    try:
        _, _, fields = Path(f"/proc/{state.pid}/stat").read_text().rpartition(") ")
    except OSError:
        return _KILLED
    flag, *numbers = fields.split()
    since_boot = int(numbers[_STARTED]) / os.sysconf("SC_CLK_TCK")
    up = float(Path("/proc/uptime").read_text().split()[0])
    began = time.time() - up + since_boot
    if flag in "ZX" or began > state.time + 1:  # another process has its number now
        return _KILLED
    return "stopped" if flag in "Tt" else "running"


def _missing_text(missing: tuple[MissingExecution, ...]) -> str:
    texts = [
        f"{shown.lines(execution.graph)} {execution.execution}"
        + (f" ({shown.lines(execution.why)})" if execution.why else "")
        for execution in missing[:_MOST_SHOWN]
    ]
    if len(missing) > _MOST_SHOWN:
        texts.append(f"and {len(missing) - _MOST_SHOWN} more")
    return ", ".join(texts) or "-"
