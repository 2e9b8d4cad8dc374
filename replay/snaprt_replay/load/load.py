"""Load any file that can be replayed into a `Case`; it must not know devices or comparisons.

`sniff` tells the format from the content, the table `_LOADERS` has the loader for each. A format
that brings no inputs takes them from an ``.npz`` file or from a seeded random generator.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from snaprt import jaxapi
from snaprt.errors import SnapshotError, UsageError
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot, sibling_inputs, sibling_outputs
from snaprt_replay.load import inputs as given_inputs
from snaprt_replay.load import shared, siblings, sniff, xla_files
from snaprt_replay.load.case import Case, NamedArray, Signature, name_arrays
from snaprt_replay.load.newer_modules import readable_module
from snaprt_replay.load.shards import ShardedArray, sharded
from snaprt_replay.process.parsing import check_parses


def load(
    path: str | Path, inputs: str | Path | None = None, random_seed: int | None = None
) -> Case:
    """Load a file for replay.

    Args:
        path: A snapshot of snaprt's or XLA's, or a bare module in any form.
        inputs: An ``.npz`` file to take the inputs from instead of the recorded ones.
        random_seed: Draw the inputs instead, from this seed.

    Returns:
        The case. Its inputs are None where the file has none and none were asked for. Recorded
        outputs are dropped where the inputs are not the recorded ones.

    Raises:
        SnapshotError: The file cannot be read, is damaged, or is of no known format.
        UsageError: The given inputs do not fit the module.
    """
    if inputs is not None and random_seed is not None:
        raise UsageError("inputs can come from a file or from a seed, not from both")
    path = Path(path)
    case = _LOADERS[sniff.sniff(path)](path)
    if inputs is None and random_seed is None:
        return case
    parameters = module_parameters(case.stablehlo, path)
    if inputs is not None:
        arrays = given_inputs.read_inputs(Path(inputs), parameters)
        source = f"the inputs are those of {inputs}"
    else:
        assert random_seed is not None
        arrays = given_inputs.random_inputs(random_seed, parameters)
        source = f"the inputs are random, from seed {random_seed}"
    dropped = ", not the recorded ones: there is nothing to compare with" if case.outputs else ""
    return dataclasses.replace(
        case,
        inputs=arrays,
        outputs=None,
        input_parts={},
        output_parts=(),
        parameters=parameters,
        notes=(*case.notes, source + dropped),
    )


def module_parameters(stablehlo: bytes, path: Path) -> tuple[Signature, ...]:
    """Return what a module's ``main`` expects.

    Raises:
        SnapshotError: The module cannot be parsed, or takes what no array can be.
    """
    try:
        module = jaxapi.parse_module(stablehlo)
        parameters, _ = jaxapi.module_signature(module)
    except ValueError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = next((line for line in lines if "error:" in line), (lines or ["no reason given"])[0])
        raise SnapshotError(
            f"the module in {path} cannot be read: {why.strip()}",
            hint="the file is damaged, or holds dialects that this jaxlib does not know",
        ) from error
    return tuple(Signature(tuple(shape), np.dtype(dtype)) for shape, dtype in parameters)


# --- snaprt's own snapshots ---


def _load_snapshot(path: Path) -> Case:
    file = open_snapshot(path)
    if len(file.manifest.execution.devices) > 1:
        return _load_of_devices(file)
    notes: list[str] = []
    inputs_path: Path | None = path
    outputs_path = sibling_outputs(path)
    if file.role == "outputs":
        inputs_path, outputs_path = sibling_inputs(path), path
        if inputs_path is None:
            notes.append(f"{path.name} holds outputs, and there is no .inputs.snap beside it")
    elif outputs_path is None:
        notes.append(f"there is no {_outputs_name(path)} beside it: nothing to compare with")
    execution, error = file.manifest.execution, file.manifest.trace_error
    if execution.error.strip():
        notes.append(f"recorded when this was raised: {execution.error.strip().splitlines()[0]}")
    inputs = _arrays(open_snapshot(inputs_path), "inputs") if inputs_path else None
    outputs = None
    if outputs_path is not None:
        outputs_file = open_snapshot(outputs_path)
        _check_same_execution(file, outputs_file)
        outputs = _arrays(outputs_file, "outputs")
    module, made = readable_module(file)
    parameters = (
        tuple(Signature(array.shape, array.dtype) for array in inputs)
        if inputs is not None
        else module_parameters(module, path)
    )
    return Case(
        path=path,
        format=sniff.SNAPSHOT,
        name=execution.name,
        stablehlo=module,
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
        environment=recorded_environment(file),
        trusted=True,
        notes=(*notes, *made),
        unfinished=error.message if error is not None else "",
    )


def _load_of_devices(file: SnapshotFile) -> Case:
    """Join what the devices of one execution left in one folder."""
    execution = file.manifest.execution
    path, count = file.path, len(execution.devices)
    files: list[Path] = []
    arrays: dict[schema.Role, tuple[ShardedArray, ...]] = {}
    for role in schema.ROLES:
        if file.role == role or siblings.has_any(file, role):
            joined = siblings.files_of_devices(file, role)
            files += [one.path for one in joined]
            arrays[role] = _joined_arrays(joined)
    inputs, outputs = arrays.get("inputs"), arrays.get("outputs")
    notes = [f"joined from {len(files)} files: {count} devices"]
    processes = len({device.process for device in execution.devices})
    if processes > 1:
        notes[0] += f" of {processes} processes, whose collectives may have added in another order"
    if inputs is None:
        notes.append("there are no files with inputs beside it")
    if outputs is None:
        notes.append("there are no files with outputs beside it: nothing to compare with")
    differing = [one for one in inputs or () if one.copies_differ]
    if differing:
        told = ", ".join(one.name for one in differing)
        notes.append(f"copies on different devices differ, and each device gets its own: {told}")
    module, made = readable_module(file)
    wholes = tuple(one.whole() for one in inputs) if inputs is not None else None
    return Case(
        path=path,
        format=sniff.SNAPSHOT,
        name=execution.name,
        stablehlo=module,
        inputs=wholes,
        outputs=None if outputs is None else tuple(one.whole() for one in outputs),
        parameters=(
            tuple(Signature(array.shape, array.dtype) for array in wholes)
            if wholes is not None
            else module_parameters(module, path)
        ),
        environment=recorded_environment(file),
        devices=count,
        partitioning=_partitioning(file.module.compile_options, path),
        input_parts={one.name: one.parts for one in differing},
        output_parts=outputs or (),
        files=tuple(files),
        trusted=True,
        notes=(*notes, *made),
    )


def _joined_arrays(files: Sequence[SnapshotFile]) -> tuple[ShardedArray, ...]:
    return tuple(_joined_array(files, name) for name in files[0].array_names)


def _joined_array(files: Sequence[SnapshotFile], name: str) -> ShardedArray:
    """Read one array's parts; copies with one digest are read once."""
    known: dict[tuple[str, str], np.ndarray] = {}
    parts, indices = [], []
    for file in files:
        record = file.record(name)
        index = record.index
        if index is None and record.shape == record.global_shape:
            index = tuple((0, size) for size in record.shape)
        if index is None:
            raise SnapshotError(
                f"{file.path} does not say which part of {name} it holds",
                hint="a snaprt before format 1.1 wrote it; record the execution again",
            )
        # Without a digest its values were left out, and are drawn anew: the same for each copy.
        same = (record.digest, str(index)) if record.digest else ("", str(index))
        if same not in known:
            known[same] = file.array(name)
        parts.append(known[same])
        indices.append(index)
    first = files[0].record(name)
    shape = first.global_shape + parts[0].shape[len(first.shape) :]
    joined = sharded(name, shape, parts, indices)
    if not joined.fills_whole():
        names = ", ".join(file.path.name for file in files)
        raise SnapshotError(
            f"the parts of {name} do not make up the whole array of shape {list(shape)}: {names}",
            hint="the files are of different executions, or were put together by hand",
        )
    return joined


def _partitioning(compile_options: bytes, path: Path) -> jaxapi.Partitioning:
    try:
        return jaxapi.partitioning_of_options(compile_options)
    except ValueError as error:
        raise SnapshotError(
            f"the compile options in {path} cannot be read: {error}",
            hint="another jaxlib may read them; the file says which one wrote it",
        ) from error


def _outputs_name(path: Path) -> str:
    return path.name.removesuffix(schema.SUFFIXES["inputs"]) + schema.SUFFIXES["outputs"]


def _arrays(file: SnapshotFile, role: schema.Role) -> tuple[NamedArray, ...]:
    if file.role != role:
        raise SnapshotError(
            f"{file.path} is called as if it held {role}, but it holds {file.role}",
            hint="the file was renamed; give it its name back",
        )
    return tuple(NamedArray(name, file.array(name)) for name in file.array_names)


def _check_same_execution(one: SnapshotFile, other: SnapshotFile) -> None:
    first, second = one.manifest.execution, other.manifest.execution
    if (first.graph_id, first.execution_count) != (second.graph_id, second.execution_count):
        raise SnapshotError(
            f"{one.path} and {other.path.name} are of different executions: graph "
            f"{first.graph_id} execution {first.execution_count}, graph {second.graph_id} "
            f"execution {second.execution_count}",
            hint="one of them was renamed or overwritten; record again",
        )


def recorded_environment(file: SnapshotFile) -> Mapping[str, str]:
    """Return what a snapshot says of where it was recorded, as in `Case.environment`."""
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


# --- bare modules ---


def _load_module_file(path: Path, form: str) -> Case:
    module = path.read_bytes()
    with contextlib.suppress(ValueError):  # `module_parameters` says what is wrong with it
        module = xla_files.without_tokens(module)
    return Case(
        path=path,
        format=form,
        name=path.name.partition(".")[0],
        stablehlo=module,
        inputs=None,
        outputs=None,
        parameters=module_parameters(module, path),
    )


def _load_bytecode(path: Path) -> Case:
    check_parses(path)
    return _load_module_file(path, sniff.MLIR_BYTECODE)


# --- XLA's files ---


def _load_xla(path: Path, form: str, read: Callable[[Path], xla_files.LoadedHlo]) -> Case:
    loaded = read(path)
    inputs = _named(loaded.inputs, "arg")
    return Case(
        path=path,
        format=form,
        name=loaded.name,
        stablehlo=loaded.stablehlo,
        inputs=inputs,
        outputs=_named(loaded.outputs, "out"),
        parameters=tuple(Signature(shape, dtype) for shape, dtype in loaded.parameters),
        environment=loaded.environment,
        notes=loaded.notes,
    )


def _named(values: Sequence[np.ndarray] | None, prefix: str) -> tuple[NamedArray, ...] | None:
    return None if values is None else name_arrays(values, prefix)


_LOADERS: Final[Mapping[str, Callable[[Path], Case]]] = {
    sniff.SNAPSHOT: lambda path: shared.as_redacted(_load_snapshot(path)),
    sniff.PACK: lambda path: shared.as_redacted(_load_snapshot(shared.only_execution(path))),
    sniff.MLIR_TEXT: lambda path: _load_module_file(path, sniff.MLIR_TEXT),
    sniff.MLIR_BYTECODE: _load_bytecode,
    sniff.HLO_TEXT: lambda path: _load_xla(path, sniff.HLO_TEXT, xla_files.load_hlo_text),
    sniff.HLO_MODULE: lambda path: _load_xla(path, sniff.HLO_MODULE, xla_files.load_hlo_module),
    sniff.HLO_SNAPSHOT: lambda path: _load_xla(
        path, sniff.HLO_SNAPSHOT, xla_files.load_hlo_snapshot
    ),
    sniff.HLO_UNOPTIMIZED_SNAPSHOT: lambda path: _load_xla(
        path, sniff.HLO_UNOPTIMIZED_SNAPSHOT, xla_files.load_unoptimized_snapshot
    ),
}
