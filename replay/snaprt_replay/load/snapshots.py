"""Load snaprt's own snapshots: of one device or several, redacted, or from a newer jaxlib."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.read import (
    SnapshotFile,
    open_snapshot,
    sibling_inputs,
    sibling_outputs,
    sibling_second_outputs,
)
from snaprt.snapshot.share.executions import contradiction, files_of_devices, has_any
from snaprt_replay.load import sniff
from snaprt_replay.load.case import Case, NamedArray, ShardedArray, Signature, sharded
from snaprt_replay.load.modules import (
    ModuleAlone,
    can_parse,
    module_parameters,
    without_effects,
)


def load_snapshot(path: Path) -> Case:
    """Load the execution that a snapshot records, with the files next to it.

    Raises:
        SnapshotError: A file is damaged, missing, or from a different execution.
    """
    file = open_snapshot(path)
    several = len(file.manifest.execution.devices) > 1
    return _as_redacted(_of_devices(file) if several else _of_one_device(file), file)


def _of_one_device(file: SnapshotFile) -> Case:
    path, notes = file.path, []
    execution = file.manifest.execution
    inputs_path: Path | None = path
    outputs_path = sibling_outputs(path)
    if file.role == "outputs":
        inputs_path, outputs_path = sibling_inputs(path), path
        if execution.run_number > 1 and inputs_path is not None:
            outputs_path = sibling_outputs(inputs_path)
        if inputs_path is None:
            notes.append(f"{path.name} contains outputs, but there is no .inputs.snap next to it")
    elif outputs_path is None:
        expected = path.name.removesuffix(schema.SUFFIXES["inputs"]) + schema.SUFFIXES["outputs"]
        notes.append(f"there is no {expected} next to it: nothing to compare with")
    if execution.error.strip():
        notes.append(f"recorded when this was raised: {schema.first_line(execution.error)}")
    inputs = _arrays(open_snapshot(inputs_path), "inputs") if inputs_path else None
    outputs = None
    if outputs_path is not None:
        outputs_file = open_snapshot(outputs_path)
        why = contradiction(execution, outputs_file.manifest.execution)
        if why:
            raise SnapshotError(
                f"{path} and {outputs_path.name} are from different executions "
                f"({outputs_path.name}: {why})",
                hint="one of them was renamed or overwritten; record again",
            )
        outputs = _arrays(outputs_file, "outputs")
    second_path = sibling_second_outputs(inputs_path) if inputs_path and outputs_path else None
    second = None
    if second_path is not None:
        second = _arrays(open_snapshot(second_path), "outputs")
    case = _case(file, inputs, outputs, [*notes, *_findings(file)])
    case = dataclasses.replace(case, second_outputs=second)
    error = file.manifest.trace_error
    return dataclasses.replace(case, unfinished=error.message) if error is not None else case


def _of_devices(file: SnapshotFile) -> Case:
    """Join the files that the devices of one execution wrote into one folder."""
    execution = file.manifest.execution
    files: list[Path] = []
    arrays: dict[schema.Role, tuple[ShardedArray, ...]] = {}
    for role in schema.ROLES:
        if file.role == role or has_any(file, role):
            joined = files_of_devices(file, role)
            files += [part_file.path for part_file in joined]
            arrays[role] = tuple(_joined_array(joined, name) for name in joined[0].array_names)
    inputs, outputs = arrays.get("inputs"), arrays.get("outputs")
    devices = list(execution.devices)
    device = devices.index(execution.device) if execution.device in devices else 0
    notes = [f"joined from {len(files)} files: {len(execution.devices)} devices"]
    processes = len({device.process for device in execution.devices})
    if processes > 1:
        notes[0] += (
            f" of {processes} processes, whose collectives may have added in a different order"
        )
    if inputs is None:
        notes.append("there are no files with inputs next to it")
    if outputs is None:
        notes.append("there are no files with outputs next to it: nothing to compare with")
    differing = [array for array in inputs or () if array.copies_differ]
    if differing:
        names = ", ".join(array.name for array in differing)
        notes.append(f"copies on different devices differ, so each device gets its own: {names}")
    second = None
    if outputs is not None and has_any(file, "outputs", 2):
        joined = files_of_devices(file, "outputs", 2)
        files += [part_file.path for part_file in joined]
        second = tuple(_joined_array(joined, name).whole(device) for name in joined[0].array_names)
    return dataclasses.replace(
        _case(file, _wholes(inputs, device), _wholes(outputs, device), [*notes, *_findings(file)]),
        second_outputs=second,
        devices=len(execution.devices),
        device=device,
        partitioning=_partitioning(file),
        input_parts={array.name: array.parts for array in differing},
        output_parts=outputs or (),
        files=tuple(files),
    )


def _findings(file: SnapshotFile) -> list[str]:
    """Return what re-checking the execution showed when it was recorded."""
    recheck = file.manifest.execution.recheck
    return [] if recheck is None else [f"re-checked during recording: {recheck.finding}"]


def _case(
    file: SnapshotFile,
    inputs: tuple[NamedArray, ...] | None,
    outputs: tuple[NamedArray, ...] | None,
    notes: Sequence[str],
) -> Case:
    module, conversion = readable_module(file)
    alone = without_effects(module) if b"callback" in module else ModuleAlone(module)
    environment = dict(recorded_environment(file))
    if alone.stablehlo is not module:
        del environment["optimised_hlo"]  # what is replayed has another
    return Case(
        path=file.path,
        format=sniff.SNAPSHOT,
        name=file.manifest.execution.name,
        stablehlo=alone.stablehlo,
        inputs=inputs,
        outputs=outputs,
        parameters=(
            tuple(Signature(array.shape, array.dtype) for array in inputs)
            if inputs is not None
            else module_parameters(alone.stablehlo, file.path)
        ),
        environment=environment,
        graph_id=file.manifest.execution.graph_id,
        trusted=True,
        notes=(*notes, *conversion, *alone.notes),
        with_branches_that_call=alone.with_branches_that_call,
    )


def _as_redacted(case: Case, file: SnapshotFile) -> Case:
    """Return a case with notes on what was redacted, and without meaningless outputs."""
    redacted = file.manifest.execution.redacted
    if not redacted:
        return case
    notes = [f"redacted before sharing: {', '.join(redacted)}"]
    if "values" in redacted:
        notes.append(
            "the inputs are drawn from a seed, with the statistics of the recorded ones, so "
            "there are no recorded outputs to compare with"
        )
        case = dataclasses.replace(case, outputs=None, second_outputs=None, output_parts=())
    return dataclasses.replace(case, notes=(*case.notes, *notes))


def _arrays(file: SnapshotFile, role: schema.Role) -> tuple[NamedArray, ...]:
    if file.role != role:
        raise SnapshotError(
            f"the name of {file.path} says {role}, but it holds {file.role}",
            hint="the file was renamed; restore its name",
        )
    return tuple(NamedArray(name, file.array(name)) for name in file.array_names)


def _wholes(arrays: Sequence[ShardedArray] | None, device: int) -> tuple[NamedArray, ...] | None:
    return None if arrays is None else tuple(array.whole(device) for array in arrays)


def _joined_array(files: Sequence[SnapshotFile], name: str) -> ShardedArray:
    """Read one array's parts; copies with the same digest are read once."""
    arrays: dict[tuple[str, str], np.ndarray] = {}
    parts, indices = [], []
    for file in files:
        record = file.record(name)
        index = record.index
        if index is None and record.shape == record.global_shape:
            index = tuple((0, size) for size in record.shape)
        if index is None:
            raise SnapshotError(
                f"{file.path} does not say which part of {name} it holds",
                hint="it was written before format 1.1; record the execution again",
            )
        # Without a digest its values were omitted and are drawn at random, equal for each copy.
        same = (record.digest, str(index))
        if same not in arrays:
            arrays[same] = file.array(name)
        parts.append(arrays[same])
        indices.append(index)
    first = files[0].record(name)
    shape = first.global_shape + parts[0].shape[len(first.shape) :]
    joined = sharded(name, shape, parts, indices)
    if not joined.fills_whole():
        names = ", ".join(file.path.name for file in files)
        raise SnapshotError(
            f"the parts of {name} do not form the whole array of shape {list(shape)}: {names}",
            hint="the files are from different executions, or were assembled by hand",
        )
    return joined


def _partitioning(file: SnapshotFile) -> jaxapi.Partitioning:
    try:
        return jaxapi.partitioning_of_options(file.module.compile_options)
    except ValueError as error:
        raise SnapshotError(
            f"cannot read the compile options in {file.path}: {error}",
            hint="try the jaxlib that wrote it, as recorded in the file",
        ) from error


def readable_module(file: SnapshotFile) -> tuple[bytes, tuple[str, ...]]:
    """Return a snapshot's module in a form that the installed jaxlib can read.

    StableHLO is only backward compatible: a newer jaxlib may write an operation in a form that the
    installed one does not know. The file also contains the module as HLO.

    Returns:
        The module as `jaxapi.parse_module` takes it, and a note if it is not as it was written.

    Raises:
        SnapshotError: There is no such form.
    """
    module, writer = file.module, file.manifest.execution.versions.get("jaxlib", "")
    here = metadata.version("jaxlib")
    if _numbers(writer) <= _numbers(here) or can_parse(module.stablehlo):
        return module.stablehlo, ()
    try:
        stablehlo = jaxapi.hlo_to_stablehlo(module.hlo)
    except ValueError as error:
        raise SnapshotError(
            f"{file.path} was written with jaxlib {writer}, and jaxlib {here} cannot read its "
            f"module: {error}",
            hint=f"replay it with jaxlib {writer} or a later one",
        ) from error
    return stablehlo, (
        f"jaxlib {here} cannot read the StableHLO of jaxlib {writer}: using its HLO instead",
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def recorded_environment(file: SnapshotFile) -> Mapping[str, str]:
    """Return the environment that a snapshot was recorded in, as in `Case.environment`."""
    execution, proof = file.manifest.execution, file.manifest.proof
    return {
        **execution.versions,
        "platform": execution.device.platform,
        "device_kind": execution.device.kind,
        "platform_version": execution.platform_version,
        "driver": execution.driver,
        "processor": execution.processor,
        "xla_flags": execution.xla_flags,
        "fingerprint": proof.fingerprint,
        "optimised_hlo": proof.optimised_hlo,
        "aliases": ", ".join(proof.aliases),
    }
