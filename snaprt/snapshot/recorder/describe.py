"""Describes a held execution for a snapshot's manifest."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from snaprt import jaxapi, variables
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.content import array_content, gather
from snaprt.snapshot.recorder import surroundings
from snaprt.snapshot.recorder.pending import HeldExecution, read_again

_LONGEST_ERROR = 20_000  # characters: a traceback of hundreds of frames says no more


@dataclass(frozen=True)
class Cause:
    """Why an execution is recorded, and what surrounds the program when that is known."""

    reason: str  # the condition as the user wrote it, or what else asked for it
    error: str = ""  # what failed, as text
    xla_flags: str = field(default_factory=surroundings.xla_flags)
    environment: Mapping[str, str] = field(default_factory=surroundings.environment)
    jax_config: Mapping[str, str] = field(default_factory=surroundings.jax_config)


def error_text(error: BaseException) -> str:
    """Return the error's kind and words, and below them its traceback."""
    words = "".join(traceback.format_exception_only(error)).strip()
    frames = "".join(traceback.format_exception(error))
    return variables.without_credentials(f"{words}\n\n{frames}"[:_LONGEST_ERROR])


def describe(
    held: HeldExecution,
    role: schema.Role,
    index: int,
    device: jaxapi.Device,
    cause: Cause,
    run: str,
) -> schema.Execution:
    """Return what the manifest says of an execution on one device."""
    executable = held.executable
    return schema.Execution(
        role=role,
        name=executable.name,
        graph_id=executable.graph_id,
        process=jax.process_index(),
        executable=executable.number,
        device_index=index,
        execution_count=held.moment.execution,
        step=held.moment.step,
        time=held.time,
        device=surroundings.describe_device(device),
        devices=tuple(surroundings.describe_device(one) for one in executable.devices),
        platform_version=surroundings.platform_version(device),
        versions=surroundings.versions(),
        xla_flags=cause.xla_flags,
        environment=cause.environment,
        jax_config=cause.jax_config,
        input_names=_unique(executable.input_names),
        output_names=_unique(executable.output_names),
        donated=tuple(executable.donated),
        source_locations=(),
        driver=surroundings.driver(device.platform),
        processor=surroundings.processor(device.platform),
        run=run,
        rank=held.moment.rank,
        reason=cause.reason,
        error=cause.error,
    )


def contents(
    execution: schema.Execution, held: HeldExecution, device: jaxapi.Device
) -> schema.Contents:
    """Gather what goes into the file; in the writer's thread, so that it may take its time."""
    is_inputs = execution.role == "inputs"
    places = held.inputs if is_inputs else held.outputs
    names = execution.input_names if is_inputs else execution.output_names
    assert places is not None
    while True:
        arrays_now = list(places)
        try:
            gathered = gather(execution, held.executable.artifacts, names, arrays_now, device)
            break
        except RuntimeError:  # one was deleted, and copied into its place before
            if all(one is other for one, other in zip(arrays_now, places, strict=True)):
                raise

    def again(array: schema.ArrayContent, place: int) -> schema.ArrayContent:
        def fetch(whole: Any) -> np.ndarray:
            return array_content(array.name, whole, device).fetch()

        return dataclasses.replace(array, fetch=lambda: read_again(fetch, places, place))

    arrays = [
        again(array, place) if isinstance(array, schema.ArrayContent) else array
        for place, array in enumerate(gathered.arrays)
    ]
    return dataclasses.replace(gathered, arrays=arrays)


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each that was there before with its number added."""
    taken: dict[str, None] = {}
    for number, name in enumerate(names):
        while name in taken:
            name = f"{name}#{number}"
        taken[name] = None
    return tuple(taken)
