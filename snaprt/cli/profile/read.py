"""Reads profiles that `jax.profiler` has written: their events, and the modules that ran.

Checked with the profiles that JAX 0.10.2 and 0.12.0 write on CPUs. On CPUs, operations are events
of the host's threads; on GPUs and TPUs, of the devices' planes. What an event is, its values say.

Source of the fields: `tsl/profiler/protobuf/xplane.proto` of openxla.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jax

from snaprt.errors import UsageError
from snaprt.hlo.proto import HloProto, XlaMessage, parse
from snaprt.hlo.wire import fields
from snaprt.host.regular_files import read_file
from snaprt.jaxapi import PROFILE_RUNS, PROFILE_SUFFIX

_HINT: Final = "Write one with `snaprt run --profile DIR -- train.py`, or with jax.profiler.trace."

# Numbers of fields: of XSpace, XPlane, a map's entry, XEventMetadata, XStatMetadata and XStat.
_PLANES: Final = 1
_PLANE_NAME, _EVENT_METADATA, _STAT_METADATA = 2, 4, 5
_VALUE: Final = 2
_METADATA_NAME, _METADATA_STATS = 2, 5
_STAT_ID, _STAT_BYTES = 1, 6
_STAT_METADATA_ID, _STAT_METADATA_NAME = 1, 2


@dataclass(frozen=True)
class ProfileEvent:
    """Something that took time."""

    name: str  # what it was
    start: float  # when it began, in nanoseconds since the profile did
    end: float  # when it ended
    line: int  # the thread or the stream that it belongs to; no other line has this number
    values: Mapping[str, Any]  # what the profile says beside the name


@dataclass(frozen=True)
class HostProfile:
    """What one process of a job has written."""

    file: Path
    host: str  # the name in it: of the machine, with the rank in a job of several processes
    # The operations that devices ran, in order of their start.
    operations: list[ProfileEvent] = field(default_factory=list)
    # The executions of programs, where the devices tell them; else empty.
    executions: list[ProfileEvent] = field(default_factory=list)
    # What the host did, in the same order, without Python's functions.
    host_events: list[ProfileEvent] = field(default_factory=list)
    # The optimized modules that ran, by their names in the profile: ``jit_f(7)``.
    modules: dict[str, XlaMessage] = field(default_factory=dict)


def find_files(place: Path) -> list[Path]:
    """Return the files of a profile, one for each process.

    Args:
        place: A file, a folder of such files, or what was given to ``--profile`` or `jax.profiler`,
            where the latest profile is taken.

    Raises:
        UsageError: There is no profile.
    """
    if not place.exists():
        raise UsageError(f"{place} does not exist", hint=_HINT)
    if place.is_file():
        if not place.name.endswith(PROFILE_SUFFIX):
            raise UsageError(f"{place} is not a profile: its name does not end in {PROFILE_SUFFIX}")
        return [place]
    runs = sorted(
        run for run in (place / PROFILE_RUNS).glob("*") if any(run.glob(f"*{PROFILE_SUFFIX}"))
    )
    files = sorted((runs[-1] if runs else place).glob(f"*{PROFILE_SUFFIX}"))
    if not files:
        raise UsageError(f"no profile in {place}", hint=_HINT)
    return files


def read_profile(file: Path) -> HostProfile:
    """Read the profile of one process.

    Raises:
        UsageError: The file cannot be read, or is none.
    """
    profile = HostProfile(file, file.name.removesuffix(PROFILE_SUFFIX))
    try:
        content = read_file(file)
        profile.modules.update(_modules(memoryview(content), file))
        planes = list(jax.profiler.ProfileData.from_serialized_xspace(content).planes)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot read {file}: {reason}", hint=_HINT) from error
    except (ValueError, RuntimeError) as error:
        reason = f"is not a profile, or is damaged: {error}"
        raise UsageError(f"{file} {reason}", hint=_HINT) from error
    number = 0
    for plane in planes:
        is_of_device = plane.name.startswith("/device:")
        for line in plane.lines:
            number += 1
            for event in _events(line, number):
                _sort(profile, event, plane.name, line.name if is_of_device else None)
    for events in (profile.operations, profile.executions, profile.host_events):
        events.sort(key=lambda event: (event.start, -event.end))
    return profile


def _events(line: Any, number: int) -> Iterator[ProfileEvent]:
    for event in line.events:
        name = event.name
        if name.startswith(("$", "end: ", "ThreadpoolListener::")):  # Python's, and marks
            continue
        yield ProfileEvent(name, event.start_ns, event.end_ns, number, dict(event.stats))


def _sort(profile: HostProfile, event: ProfileEvent, plane: str, device_line: str | None) -> None:
    """Add an event where it belongs; `device_line` is None for those of the host."""
    if device_line == "XLA Modules":
        profile.executions.append(event)
    elif "hlo_op" in event.values or device_line == "XLA Ops":
        values = {"device": plane, **event.values} if device_line is not None else event.values
        profile.operations.append(
            ProfileEvent(event.name, event.start, event.end, event.line, values)
        )
    elif device_line is None and "run_id" not in event.values:
        profile.host_events.append(event)


def _modules(space: memoryview, file: Path) -> Iterator[tuple[str, XlaMessage]]:
    """Yield the optimized modules; JAX's reader has no access to where they are."""
    for number, plane in fields(space):
        if number != _PLANES or isinstance(plane, int):
            continue
        metadata, names = [], {}
        is_wanted = False
        for field_number, value in fields(plane):
            if isinstance(value, int):
                continue
            if field_number == _PLANE_NAME:
                is_wanted = bytes(value) == b"/host:metadata"
            elif field_number == _EVENT_METADATA:
                metadata.append(value)
            elif field_number == _STAT_METADATA:
                about = _message(_value_of(value))
                names[about.get(_STAT_METADATA_ID)] = about.get(_STAT_METADATA_NAME)
        for entry in metadata if is_wanted else ():
            yield from _module_of(_value_of(entry), names, file)


def _module_of(
    metadata: memoryview, names: Mapping[Any, Any], file: Path
) -> Iterator[tuple[str, XlaMessage]]:
    name = _message(metadata).get(_METADATA_NAME, b"")
    for number, value in fields(metadata):
        if number == _METADATA_STATS and not isinstance(value, int):
            stat = _message(value)
            if _STAT_BYTES in stat and names.get(stat.get(_STAT_ID)) == b"Hlo Proto":
                yield name.decode(), parse(HloProto, stat[_STAT_BYTES], file).hlo_module


def _value_of(entry: memoryview) -> memoryview:
    return next(
        (
            value
            for number, value in fields(entry)
            if number == _VALUE and not isinstance(value, int)
        ),
        memoryview(b""),
    )


def _message(content: memoryview) -> dict[int, Any]:
    """Return the fields of a message, the last of each number."""
    return {
        number: value if isinstance(value, int) else bytes(value)
        for number, value in fields(content)
    }
